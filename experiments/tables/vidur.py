"""Tables of Vidur's profiler: kernels of Sarathi-Serve's layers and collectives of PyTorch, in float16.

Reads those of `mlp.csv`, `attention.csv` (both of one model), `all_reduce.csv` and `all_gather.csv` that are in a
folder. Each CSV has its shapes in its own columns, and times as `time_stats.<what>.median` in ms, rounded to us.
`kv_cache_size` of a decode is the number of positions before its own token. `size` is the bytes that each rank sends,
for an all-gather its share. Collectives across nodes are left out, as the schema has no nodes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from experiments.tables.columns import rows_of
from experiments.tables.csv_table import CsvTable
from experiments.tables.devices import entry
from testbed.errors import ConfigError, ProfileError
from testbed.specs.operator_tables import OperatorTables

LICENCE = "MIT"
_SHAPE = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "num_tokens", "num_tensor_parallel_workers")
_GEMMS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
_OTHERS = {  # their names -> the names that cost=tables looks for, if there is one
    "emb": "emb", "input_layernorm": "layernorm", "post_attention_layernorm": "layernorm", "attn_rope": "rotary_emb",
    "mlp_act": "act_fn", "add": "add",
}  # fmt: skip
_ATTENTION = (
    "n_embd", "n_q_head", "n_kv_head", "num_tensor_parallel_workers", "batch_size", "prefill_chunk_size",
    "kv_cache_size", "is_prefill", "attention_backend",
)  # fmt: skip
_COLLECTIVE = ("rank", "num_workers", "size", "collective", "devices_per_node")
_FILES = ("mlp.csv", "attention.csv", "all_reduce.csv", "all_gather.csv")


def read(folder: Path, device: str | None) -> OperatorTables:
    """Reads the tables in a folder. device: its name in our library, as the files do not state it. Raises ConfigError,
    ProfileError."""
    if device is None:
        raise ConfigError("vidur's files do not name their device; say which it is with --device")
    files = [folder / name for name in _FILES if (folder / name).is_file()]
    if not files:
        raise ProfileError(f"{folder} holds none of {', '.join(_FILES)}; see docs/tables.md")
    label = partial(rows_of, dtype="float16", engine="sarathi-serve", source="vidur", licence=LICENCE)
    tables, doubts = [], ["vidur: medians in whole us, so a kernel of a few us is known to a fifth"]
    for file in files:
        if file.name == "mlp.csv":
            tables += _mlp(file, label)
        elif file.name == "attention.csv":
            tables += _attention(file, label)
        else:
            table, num_left_out = _collective(file, file.stem, label)
            tables.append(table)
            if num_left_out:
                doubts.append(f"{file.name}: {num_left_out:,} points across nodes, or of other ranks, are left out")
    rows = pa.concat_tables(tables).combine_chunks()
    return OperatorTables(entry("device", device), device, rows, tuple(doubts))


def _mlp(file: Path, label: Any) -> list[Any]:
    """The GEMMs and the other layers of one rank, one table each."""
    csv = CsvTable(file, (*_SHAPE, "use_gated_mlp", *(_time(name) for name in _GEMMS)))
    heads, kv_heads, hidden, inner, rows, size = (csv.counts(name) for name in _SHAPE)
    head = hidden // heads
    q_size, kv_size, inner = heads // size * head, np.maximum(1, kv_heads // size) * head, inner // size
    gated = np.char.lower(csv.texts("use_gated_mlp")) == "true"
    products = {
        "attn_pre_proj": (q_size + 2 * kv_size, hidden),
        "attn_post_proj": (hidden, q_size),
        "mlp_up_proj": (np.where(gated, 2, 1) * inner, hidden),
        "mlp_down_proj": (hidden, inner),
    }
    widths = dict.fromkeys(_OTHERS, hidden) | {"attn_rope": q_size + kv_size, "mlp_act": inner}
    tables = []
    for name, (n, k) in products.items():
        time_ns = csv.times(_time(name), "ms")
        tables.append(label(csv.num_rows, operator="gemm", kernel=name, m=rows, n=n, k=k, time_ns=time_ns))
    for name, n in widths.items():
        if csv.has(_time(name)):  # not every model has all layers
            time_ns = csv.times(_time(name), "ms", may_be_empty=True)
            had = np.isfinite(time_ns)
            label_one = partial(label, operator="elementwise", kernel=_OTHERS[name])
            tables.append(label_one(int(had.sum()), m=rows[had], n=n[had], time_ns=time_ns[had]))
    return tables


def _attention(file: Path, label: Any) -> list[Any]:
    csv = CsvTable(file, (*_ATTENTION, _time("attn_prefill"), _time("attn_decode")))
    hidden, heads, kv_heads, size, batch = (csv.counts(name) for name in _ATTENTION[:5])
    chunk, before = csv.counts("prefill_chunk_size", 0), csv.counts("kv_cache_size", 0)
    kernels = np.char.lower(np.array([name.rpartition(".")[2] for name in csv.texts("attention_backend").tolist()]))
    is_prefill = np.char.lower(csv.texts("is_prefill")) == "true"
    tables = []
    for operator, column, some in (
        ("attention_prefill", _time("attn_prefill"), is_prefill),
        ("attention_decode", _time("attn_decode"), ~is_prefill),
    ):
        time_ns = csv.times(column, "ms", may_be_empty=True)
        csv.refuse_where(some & np.isnan(time_ns), column, "a time: is_prefill says so")
        sizes = {"new_tokens": chunk[some], "context": before[some]}
        if operator == "attention_decode":
            sizes = {"context": before[some] + 1}
        table = label(
            int(some.sum()), operator=operator, kernel=pa.array(kernels[some]), kv_dtype="float16",
            num_heads=(heads // size)[some], num_kv_heads=np.maximum(1, kv_heads // size)[some],
            head_dim=(hidden // heads)[some], batch=batch[some], time_ns=time_ns[some], **sizes,
        )  # fmt: skip
        tables.append(table)
    return tables


def _collective(file: Path, operator: str, label: Any) -> tuple[Any, int]:
    """The collectives within a node, as timed by rank 0; and the number of other rows, which are left out."""
    csv = CsvTable(file, (*_COLLECTIVE, _time(operator)))
    ranks, num_bytes = csv.counts("num_workers"), csv.counts("size")
    csv.refuse_where(csv.texts("collective") != operator, "collective", operator)
    some = (csv.counts("rank", 0) == 0) & (csv.counts("devices_per_node") == ranks) & (ranks > 1)
    time_ns = csv.times(_time(operator), "ms")
    whole = num_bytes * ranks if operator == "all_gather" else num_bytes
    table = label(
        int(some.sum()), operator=operator, kernel="nccl", num_bytes=whole[some], num_ranks=ranks[some],
        time_ns=time_ns[some],
    )  # fmt: skip
    return table, int((~some).sum())


def _time(name: str) -> str:
    return f"time_stats.{name}.median"
