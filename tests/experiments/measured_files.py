"""A simulated run written as the tools write what they measured: each format on the spot, from one truth."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from analysis.load import Run

EPOCH_S = 1_700_000_000.0


def rows_of(run: Run) -> list[dict[str, Any]]:
    """Arrival, lengths, latencies in s and the gaps between tokens of each request."""
    frame = run.requests
    columns = ("request_id", "arrival_ns", "num_prompt_tokens", "num_output_tokens", "ttft_s", "e2e_s", "token_ns")
    found = []
    for request_id, arrival, prompt, output, ttft, e2e, tokens in zip(*(frame[name] for name in columns), strict=True):
        gaps = (np.diff(np.asarray(tokens, dtype=np.int64)) / 1e9).tolist()
        found.append({
            "id": request_id, "arrival_s": int(arrival) / 1e9, "prompt": int(prompt), "output": int(output),
            "ttft_s": float(ttft), "e2e_s": float(e2e), "gaps_s": gaps,
        })  # fmt: skip
    return found


def vllm_bench(rows: list[dict[str, Any]]) -> str:
    return json.dumps({
        "date": "20260101-000000", "backend": "vllm", "model_id": "Qwen/Qwen3-0.6B", "request_rate": 4.0,
        "max_concurrency": None, "input_lens": [r["prompt"] for r in rows], "output_lens": [r["output"] for r in rows],
        "ttfts": [r["ttft_s"] for r in rows], "itls": [r["gaps_s"] for r in rows],
        "start_times": [353_399.5 + r["arrival_s"] for r in rows], "errors": [""] * len(rows),
        "generated_texts": [""] * len(rows), "mean_ttft_ms": 1.0,
    })  # fmt: skip


def aiperf(rows: list[dict[str, Any]]) -> str:
    lines = []
    for r in rows:
        start_ns = round((EPOCH_S + r["arrival_s"]) * 1e9)
        metrics = {
            "input_sequence_length": (r["prompt"], "tokens"), "output_sequence_length": (r["output"], "tokens"),
            "time_to_first_token": (1e3 * r["ttft_s"], "ms"), "request_latency": (1e3 * r["e2e_s"], "ms"),
            "inter_chunk_latency": ([1e3 * gap for gap in r["gaps_s"]], "ms"),
        }  # fmt: skip
        about = {"x_request_id": r["id"], "request_start_ns": start_ns, "request_end_ns": start_ns + 1,
                 "benchmark_phase": "profiling", "was_cancelled": False}  # fmt: skip
        units = {name: {"value": value, "unit": unit} for name, (value, unit) in metrics.items()}
        lines.append(json.dumps({"metadata": about, "metrics": units, "error": None}))
    return "\n".join(lines) + "\n"


def guidellm(rows: list[dict[str, Any]]) -> str:
    successful = [
        {
            "request_id": r["id"], "request_start_time": EPOCH_S + r["arrival_s"], "request_latency": r["e2e_s"],
            "prompt_tokens": r["prompt"], "output_tokens": r["output"], "time_to_first_token_ms": 1e3 * r["ttft_s"],
            "inter_token_latency_ms": 1e3 * max(r["e2e_s"] - r["ttft_s"], 0.0) / max(r["output"] - 1, 1),
        }
        for r in rows
    ]  # fmt: skip
    return json.dumps({"benchmarks": [{"requests": {"successful": successful, "errored": [{}], "incomplete": []}}]})


def servingsim(rows: list[dict[str, Any]]) -> str:
    lines = ["instance id,request id,model,input,output,arrival,end_time,latency,queuing_delay,TTFT,TPOT,ITL"]
    for i, r in enumerate(rows):
        arrival, latency, ttft = (round(r[name] * 1e9) for name in ("arrival_s", "e2e_s", "ttft_s"))
        gaps = [round(gap * 1e9) for gap in r["gaps_s"]]
        lines.append(
            f"0,{i},Qwen/Qwen3-0.6B,{r['prompt']},{r['prompt'] + r['output']},{arrival},{arrival + latency},{latency},"
            f'0,{ttft},0,"{gaps}"'
        )
    return "\n".join(lines) + "\n"


def servingsim_bench(rows: list[dict[str, Any]]) -> str:
    lines = []
    for i, r in enumerate(rows):
        arrival = 777.0 + r["arrival_s"]
        queued = arrival + (0.0 if i == 0 else 0.01)  # noted when a step has ended
        lines.append(json.dumps({
            "request_id": r["id"], "input_toks": r["prompt"], "output_toks": r["output"],
            "arrival_time": EPOCH_S + r["arrival_s"], "queued_ts": queued, "scheduled_ts": queued,
            "first_token_ts": arrival + r["ttft_s"], "last_token_ts": arrival + r["e2e_s"],
        }))  # fmt: skip
    return "\n".join(lines) + "\n"


def log_csv(rows: list[dict[str, Any]]) -> str:
    lines = ["request_id,arrival_s,num_prompt_tokens,num_output_tokens,ttft_s,e2e_s,failed"]
    lines += [f"{r['id']},{r['arrival_s']},{r['prompt']},{r['output']},{r['ttft_s']},{r['e2e_s']}," for r in rows]
    return "\n".join(lines) + "\n"


def log_jsonl(rows: list[dict[str, Any]]) -> str:
    lines = []
    for r in rows:
        times = np.cumsum([r["ttft_s"], *r["gaps_s"]]).tolist()
        lines.append(json.dumps({
            "request_id": r["id"], "arrival_s": r["arrival_s"], "num_prompt_tokens": r["prompt"],
            "num_output_tokens": r["output"], "ttft_s": r["ttft_s"], "e2e_s": r["e2e_s"], "token_times_s": times,
        }))  # fmt: skip
    return "\n".join(lines) + "\n"


WRITERS: dict[str, tuple[str, Callable[[list[dict[str, Any]]], str]]] = {  # format: (file, writer)
    "vllm-bench": ("bench.json", vllm_bench),
    "aiperf": ("profile_export.jsonl", aiperf),
    "guidellm": ("benchmarks.json", guidellm),
    "llmservingsim": ("sim.csv", servingsim),
    "llmservingsim-bench": ("requests.jsonl", servingsim_bench),
    "request-log": ("log.csv", log_csv),
    "request-log-jsonl": ("log.jsonl", log_jsonl),
}


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    file, writer = WRITERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(writer(rows))
    return folder / file


def study_file(folder: Path, runs: list[dict[str, Any]]) -> Path:
    (file := folder / "study.json").write_text(json.dumps(runs))
    return file


def study(runs: int = 1) -> list[dict[str, Any]]:
    """A study of short runs of a small model."""
    means = {"e2e_mean": 60.0, "ttft_mean": 12.0, "itl_mean": 3.2, "e2e_p90": 70.0}
    other = {"e2e_mean": 90.0, "ttft_mean": 24.0, "itl_mean": 6.4}
    return [
        {
            "name": f"run-{i}", "model": "Qwen/Qwen3-0.6B", "device": "H100", "tensor_parallel_size": 1,
            "dtype": "bfloat16", "engine": "vLLM 0.15.1", "max_num_seqs": 64, "max_num_batched_tokens": 1024,
            "num_gpu_blocks": 4000, "block_size": 16,
            "workload": {"system_prompt_len": 50, "question_len": 150, "output_len": 16,
                         "stages": [{"duration": 2, "rate": 5}, {"duration": 1, "rate": 20}]},
            "measured_ms": {"all": means, "stage0": means, "stage1": means},
            "predicted_ms": {"other": {"all": other, "stage0": other, "stage1": other}} if i == 0 else {},
        }
        for i in range(runs)
    ]  # fmt: skip
