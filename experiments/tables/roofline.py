"""The least time that a data sheet allows for each point of a table: FLOPs and bytes at the full rates.

The formulas of docs/cost-models.md for one call, vectorised, without efficiencies, floors and tiles. They are repeated
here because RooflineCost estimates single steps of one model, and counts narrow types at the rate of wide ones.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.reading.rows import FloatArray
from sim.cost.collectives import Collectives, collectives_of
from testbed.specs.device import DeviceSpec
from testbed.specs.model import KV_DTYPE_BYTES

_BYTES = {**KV_DTYPE_BYTES, "fp8_block": 1}
_WITHOUT = ("host", "sampler")


def has_bound(operator: str, dtype: str, spec: DeviceSpec) -> bool:
    if operator in ("all_reduce", "all_gather"):
        return spec.interconnect != "none"
    return operator not in _WITHOUT and dtype in _BYTES


def bounds_ns(operator: str, rows: pd.DataFrame, spec: DeviceSpec) -> FloatArray:
    """The least time of each row of a frame, ns. All are of this operator and of one dtype for which `has_bound`."""
    sizes = {name: numbers(rows, name) for name in ("m", "n", "k", "batch", "new_tokens", "context")}
    if operator in ("all_reduce", "all_gather"):
        ranks, index = np.unique(rows["num_ranks"].to_numpy(), return_inverse=True)
        ns_per_byte = np.array([_collective_ns_per_byte(operator, int(size), spec) for size in ranks])
        return ns_per_byte[index] * numbers(rows, "num_bytes")
    width = _BYTES[str(rows["dtype"].iloc[0])]
    rate = spec.flops_per_s * {1: 2.0, 4: 0.5}.get(width, 1.0)
    if operator == "gemm":
        m, n, k = sizes["m"], sizes["n"], sizes["k"]
        written = max(2, width)  # bytes of an output element: GEMMs of narrow types write wider ones
        flops, num_bytes = 2 * m * n * k, width * k * n + written * m * n + width * m * k
    elif operator == "elementwise":
        flops, num_bytes = 0 * sizes["m"], width * sizes["m"] * sizes["n"]
    else:
        flops, num_bytes = _attention(operator, rows, sizes, width)
    least_s: FloatArray = np.maximum(flops / rate, num_bytes / spec.memory_bytes_per_s)
    return least_s * 1e9


def _collective_ns_per_byte(operator: str, size: int, spec: DeviceSpec) -> float:
    """ns per byte at the rate of the link between devices (NVLink or PCIe), without latencies."""
    links = Collectives(size, collectives_of(size, spec).link_bytes_per_s, 0)
    return links.all_reduce_ns(1) if operator == "all_reduce" else links.all_gather_ns(1)


def _attention(
    operator: str, rows: pd.DataFrame, sizes: dict[str, FloatArray], width: int
) -> tuple[FloatArray, FloatArray]:
    """FLOPs and bytes of attention, limited to the window."""
    q_size = numbers(rows, "num_heads") * numbers(rows, "head_dim")
    kv_size = 2 * numbers(rows, "num_kv_heads") * numbers(rows, "head_dim")
    kv_size = kv_size * np.array([_BYTES.get(name or "", width) for name in rows["kv_dtype"]])
    window = numbers(rows, "window", np.inf)
    batch, new, context = sizes["batch"], sizes["new_tokens"], sizes["context"]
    if operator == "attention_decode":
        seen = batch * np.minimum(context, window)
        return 4 * q_size * seen, kv_size * seen + 2 * width * q_size * batch
    chunks = batch if operator == "attention_prefill" else np.ones_like(batch)
    # a token at position p sees min(p + 1, window): a triangle until the window is full, then a rectangle
    growing = np.clip(np.minimum(window, context + new) - context, 0, new)
    pairs = growing * context + growing * (growing + 1) / 2
    pairs = pairs + np.where(new > growing, (new - growing) * np.where(np.isinf(window), 0, window), 0)
    read = np.minimum(context, window) + new
    flops, num_bytes = 4 * q_size * chunks * pairs, chunks * (kv_size * read + 2 * width * q_size * new)
    if operator == "attention_mixed":
        seen = batch * np.minimum(numbers(rows, "decode_context"), window)
        flops, num_bytes = flops + 4 * q_size * seen, num_bytes + kv_size * seen + 2 * width * q_size * batch
    return flops, num_bytes


def numbers(rows: pd.DataFrame, name: str, missing: float = 0.0) -> FloatArray:
    return np.asarray(rows[name].fillna(missing), np.float64)
