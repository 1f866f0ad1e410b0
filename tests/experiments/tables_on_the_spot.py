"""Small trees of the sources of operator tables, as they lay them out, written where a test wants them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Rows = list[dict[str, Any]]


def aiconfigurator(root: Path, system: str = "h200_sxm", version: str = "0.24.0", **changes: Rows) -> Path:
    """`systems/` of the package with one device and engine; changes: other rows for gemm, prefill, decode, …"""
    tables = {**aiconfigurator_rows(), **changes}
    systems = root / "aiconfigurator_core" / "systems"
    (root / "aiconfigurator_core-0.12.3.dist-info").mkdir(parents=True, exist_ok=True)
    files = {
        "gemm": f"gemm/vllm/{version}/gemm_perf.parquet",
        "prefill": f"attention/vllm/{version}/context_attention_perf.parquet",
        "decode": f"attention/vllm/{version}/generation_attention_perf.parquet",
        "reduce": f"comm/vllm/{version}/custom_allreduce_perf.parquet",
        "nccl": "comm/nccl/2.29.2/nccl_perf.parquet",
    }
    for name, file in files.items():
        if tables[name]:
            path = systems / "data" / system / file
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(tables[name]), path)
    return systems


def aiconfigurator_rows() -> dict[str, Rows]:
    """Times are of no device: 1 us and what grows with the sizes."""
    gemm = [
        {"device": "NVIDIA H200", "kernel_source": "linear", "gemm_dtype": dtype, "m": m, "n": n, "k": 64,
         "latency": 0.002 + m * n * 1e-6}
        for dtype, m, n in product(("bfloat16", "fp8_block"), (1, 2, 4, 8), (64, 128))
    ]  # fmt: skip
    shared = {
        "device": "NVIDIA H200", "kernel_source": "fa3", "num_heads": 8, "head_dim": 64, "beam_width": 1,
        "attn_dtype": "bfloat16", "kv_cache_dtype": "fp8", "window_size": 0,
    }  # fmt: skip
    prefill = [
        shared | {"batch_size": 2, "isl": isl, "num_key_value_heads": 8, "step": 0, "latency": 0.01 * isl}
        for isl in (16, 32, 64)
    ]
    decode = [
        shared | {"batch_size": 4, "isl": 1, "num_key_value_heads": 2, "step": step, "latency": 0.01 + step * 1e-5}
        for step in (15, 31, 63)
    ]
    reduce = [
        {"kernel_source": kernel, "allreduce_dtype": "bfloat16", "num_gpus": 2, "message_size": size,
         "latency": 0.005 + size * 1e-8}
        for kernel, size in product(("graph", "x_eager"), (128, 256))
    ]  # fmt: skip
    nccl = [
        {"op_name": name, "kernel_source": "NCCL", "nccl_dtype": dtype, "num_gpus": 4, "message_size": 512,
         "latency": 0.01}
        for name, dtype in product(("all_reduce", "all_gather", "alltoall"), ("half", "int8"))
    ]  # fmt: skip
    return {"gemm": gemm, "prefill": prefill, "decode": decode, "reduce": reduce, "nccl": nccl}


META = """profiler_version: 1.0.0
vllm_version: 0.19.0
gpu: NVIDIA RTX 4090
hardware: RTX4090
model: meta-llama/Llama-3.1-8B
variant: bf16
measurement_iterations: 3
engine_effective: {enforce_eager: true, hf_overrides: {intermediate_size: 7168, num_attention_heads: 16}}
"""
DENSE = ("act_fn", "down_proj", "embedding", "layernorm", "o_proj", "qkv_proj", "rotary_emb", "gate_up_proj")


def llmservingsim(root: Path, meta: str = META, sizes: tuple[int, ...] = (1, 2)) -> Path:
    """<gpu>/<org>/<model>/bf16 with the CSVs of these degrees of tensor parallelism."""
    folder = root / "RTX4090" / "meta-llama" / "Llama-3.1-8B" / "bf16"
    for size in sizes:
        ranks = folder / f"tp{size}"
        ranks.mkdir(parents=True)
        dense = [f"{layer},{tokens},{300 + tokens / size}" for layer, tokens in product(DENSE, (1, 8, 64))]
        (ranks / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *dense]) + "\n")
        heads = [f"{layer},{rows},{1200 + rows}" for layer, rows in product(("lm_head", "sampler"), (1, 2))]
        (ranks / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *heads]) + "\n")
        attention = ["0,0,4,128,20.5", "16,32,0,0,30.5", "16,32,4,128,40.5"]
        header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
        (ranks / "attention.csv").write_text("\n".join([header, *attention]) + "\n")
    (folder / "meta.yaml").write_text(meta)
    return folder


def csv(path: Path, rows: list[Mapping[str, Any]]) -> None:
    lines = [",".join(rows[0]), *(",".join(str(value) for value in row.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n")


def vidur(folder: Path) -> Path:
    """The four CSVs, of a model with 8 heads of 64 and 2 KV heads, on 2 ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj", "emb", "input_layernorm",
              "post_attention_layernorm", "attn_rope", "mlp_act", "add")  # fmt: skip
    times = {f"time_stats.{name}.median": 0.5 for name in layers}
    shape = {"n_head": 8, "n_kv_head": 2, "n_embd": 512, "n_expanded_embd": 2048, "use_gated_mlp": True}
    csv(folder / "mlp.csv", [times | shape | {"num_tokens": m, "num_tensor_parallel_workers": 2} for m in (1, 2, 4)])
    model = {"n_embd": 512, "n_q_head": 8, "n_kv_head": 2, "num_tensor_parallel_workers": 2,
             "attention_backend": "AttentionBackend.FLASH_ATTENTION"}  # fmt: skip
    sizes = ("batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill")
    prefill, decode = "time_stats.attn_prefill.median", "time_stats.attn_decode.median"
    rows = [
        model | {prefill: 0.25, decode: ""} | dict(zip(sizes, (1, 64, 32, True), strict=True)),
        model | {prefill: "", decode: 0.02} | dict(zip(sizes, (4, 0, 99, False), strict=True)),
    ]
    csv(folder / "attention.csv", rows)
    for name in ("all_reduce", "all_gather"):
        ranks = {"num_workers": 4, "size": 2048, "collective": name}
        times = {f"time_stats.{name}.median": 0.04}
        places = [(0, 4), (1, 4), (0, 1)]  # rank 0; rank 1; across nodes
        csv(folder / f"{name}.csv", [times | ranks | {"rank": r, "devices_per_node": n} for r, n in places])
    return folder
