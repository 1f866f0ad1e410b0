"""Run folders for the tests: a small continuous-batching queue that keeps the promises of `testbed.records.schema`."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from testbed.records.schema import REQUEST_COLUMNS, STEP_COLUMNS

ARROW = {
    "string": pa.string(), "int32": pa.int32(), "int64": pa.int64(), "uint64": pa.uint64(), "double": pa.float64(),
    "list<int64>": pa.list_(pa.int64()),
}  # fmt: skip
BLOCK = 16


@dataclass
class Job:
    index: int
    arrival: int
    prompt: int
    output: int
    cached: int
    computed: int = 0  # tokens that were, when it was preempted last
    tokens: list[int] = field(default_factory=list)
    queued: int | None = None
    first: int | None = None
    finish: int | None = None
    preemptions: int = 0
    recomputed: int = 0

    @property
    def blocks(self) -> int:
        return math.ceil((self.prompt + len(self.tokens) + 1) / BLOCK)


def table(rows: list[dict[str, Any]], schema: dict[str, str]) -> pa.Table:
    """Rows in the record schema; what a row does not name is null, and its replica 0."""
    absent = {"replica": 0}
    columns = {
        name: pa.array([row.get(name, absent.get(name)) for row in rows], ARROW[kind]) for name, kind in schema.items()
    }
    return pa.table(columns)


def request_row(**values: Any) -> dict[str, Any]:
    """One request row; instants in ns. `token_ns` fills first_token_ns and num_output_tokens unless they are given."""
    row = {
        "tenant": "a", "priority": 0, "num_prompt_tokens": 10, "num_output_tokens": 0, "num_token_steps": 0,
        "num_cached_tokens": 0,
    }  # fmt: skip
    row |= {"num_preemptions": 0, "num_recomputed_tokens": 0, "arrival_ns": 0, "queued_ns": 0} | values
    tokens = row.get("token_ns")
    if tokens:
        row = {"first_token_ns": tokens[0], "first_scheduled_ns": row["arrival_ns"]} | row
        row |= {name: len(tokens) for name in ("num_output_tokens", "num_token_steps") if name not in values}
    return row


def requests_of(*rows: dict[str, Any]) -> pa.Table:
    """Request records. rows: as for `request_row`; who is given no id has one by its place."""
    return table([request_row(**{"request_id": f"r{i}"} | row) for i, row in enumerate(rows)], REQUEST_COLUMNS)


def simulate(
    seed: int = 0, num_requests: int = 60, rate: float = 8.0, chunked: bool = True, watermark: float = 0.01,
    prefix_caching: bool = True, num_blocks: int = 260, noise: float = 0.0, stop_s: float | None = None,
) -> tuple[pa.Table, pa.Table, dict[str, Any]]:  # fmt: skip
    """(requests, steps, manifest) of a first-come-first-served engine with recompute preemption."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, num_requests))
    prompts, outputs = rng.integers(40, 700, num_requests), rng.integers(2, 90, num_requests)
    shared = rng.random(num_requests) < 0.5
    fingerprint = f"{seed:04x}{num_requests:04x}{int(rate * 100):06x}"
    jobs = [
        Job(i, int(arrivals[i] * 1e9), int(prompts[i]), int(outputs[i]), int(prompts[i]) // 2 // BLOCK * BLOCK)
        for i in range(num_requests)
    ]
    for job, hit in zip(jobs, shared, strict=True):
        job.cached = job.cached if hit and prefix_caching else 0
    jitter = np.random.default_rng(seed + 1000)
    steps = engine(jobs, chunked, watermark, num_blocks, lambda: float(np.exp(jitter.normal(0, noise))), stop_s)
    manifest = {
        "status": "complete" if stop_s is None else "partial",
        "backend": "sim",
        "created": "2025-01-01T00:00:00+00:00",
        "wall_s": 1.5,
        "code_version": "abc1234",
        "core": "compiled",
        "compiler": "mypyc 1.0",
        "versions": {"numpy": np.__version__, "llm-serving-testbed": "0.1.0"},
        "machine": {"platform": "Linux-x86_64", "cpu": "test", "num_cores": 2, "gpu": None},
        "command": f"testbed run seed={seed} trace.rate={rate}",
        "sweep": f"testbed run -m seed=0,1,2 trace.rate={rate}",
        "seed": seed,
        "trace": {"name": "synthetic", "num_requests": num_requests, "fingerprint": fingerprint, "notes": []},
        "model": "tiny",
        "device": "cpu",
        "attention": None,
        "attention_reasons": None,
        "cost": "linear",
        "num_gpu_blocks": num_blocks,
        "num_cpu_blocks": 0,
        "block_size": BLOCK,
        "num_steps": len(steps),
        "digest": f"{zlib.crc32(repr(steps).encode()):016x}",
    }
    rows = [row_of(job) for job in jobs]
    return table(rows, REQUEST_COLUMNS), table(steps, STEP_COLUMNS), manifest


def engine(jobs: list[Job], chunked: bool, watermark: float, num_blocks: int, jitter: Any, stop_s: Any) -> list[Any]:
    now, step, free = 0, 0, num_blocks
    pending, waiting, running, rows = list(jobs), [], [], []
    while pending or waiting or running:
        if stop_s is not None and now > stop_s * 1e9:
            break
        if not waiting and not running:
            now = max(now, pending[0].arrival)
        while pending and pending[0].arrival <= now:
            waiting.append(pending.pop(0))
            waiting[-1].queued = now
        admitted, blocked, prefill_tokens = [], None, 0
        while waiting and len(running) < 32:
            if free - waiting[0].blocks < watermark * num_blocks:
                blocked = "blocks"
                break
            job = waiting.pop(0)
            new = job.prompt + len(job.tokens) - job.cached
            if admitted and prefill_tokens + new > 2048:
                waiting.insert(0, job)
                blocked = "tokens"
                break
            free, prefill_tokens = free - job.blocks, prefill_tokens + new
            job.first = now if job.first is None else job.first
            job.recomputed += max(0, job.computed - job.cached)
            admitted.append(job)
            running.append(job)
        decodes = [job for job in running if job not in admitted] if chunked or not admitted else []
        preempted = 0
        while sum((j.prompt + len(j.tokens)) % BLOCK == BLOCK - 1 for j in decodes) > free and len(running) > 1:
            victim = running.pop()
            decodes = [job for job in decodes if job is not victim]
            free, preempted = free + victim.blocks, preempted + 1
            victim.preemptions += 1
            if victim in admitted:  # nothing of it was computed
                admitted.remove(victim)
                prefill_tokens -= victim.prompt + len(victim.tokens) - victim.cached
                victim.recomputed -= max(0, victim.computed - victim.cached)
            else:
                victim.computed = victim.prompt + len(victim.tokens) - 1
            waiting.insert(0, victim)
        context = sum(job.prompt + len(job.tokens) for job in decodes)
        forward = int((4e6 + 6e4 * prefill_tokens + 2e5 * len(decodes) + 300 * context) * jitter())
        end = now + forward + 300_000
        rows.append(
            {"step": step, "start_ns": now, "end_ns": end, "num_decodes": len(decodes), "num_prefills": len(admitted)}
            | {"num_decode_tokens": len(decodes), "num_prefill_tokens": prefill_tokens, "free_gpu_blocks": free}
            | {"decode_context_tokens": context, "num_emitted": len(decodes) + len(admitted)}
            | {"num_running": len(running), "num_waiting": len(waiting), "num_swapped": 0, "free_cpu_blocks": 0}
            | {"num_admitted": len(admitted), "num_cached_tokens": sum(job.cached for job in admitted)}
            | {"num_preempted": preempted, "num_swapped_out": 0, "num_swapped_in": 0, "num_ignored": 0}
            | {"blocked_by": blocked, "schedule_ns": 100_000, "prepare_ns": 150_000, "swap_ns": 0}
            | {"forward_ns": forward, "sample_ns": 50_000, "digest": step}
        )
        now, step = end, step + 1
        for job in [*decodes, *[job for job in admitted if job in running]]:
            before = job.blocks
            job.tokens.append(now)
            if len(job.tokens) >= job.output:
                job.finish = now
                running.remove(job)
                free += before
            else:
                free -= job.blocks - before
    return rows


def row_of(job: Job) -> dict[str, Any]:
    n, done = len(job.tokens), job.finish is not None
    return {
        "request_id": f"r{job.index}",
        "tenant": "ab"[job.index % 2],
        "priority": 0,
        "num_prompt_tokens": job.prompt,
        "num_output_tokens": n,
        "num_token_steps": n,
        "num_cached_tokens": job.cached,
        "num_preemptions": job.preemptions,
        "num_recomputed_tokens": job.recomputed,
        "finish_reason": "length" if done else None,
        "arrival_ns": job.arrival,
        "queued_ns": job.queued,
        "first_scheduled_ns": job.first,
        "first_token_ns": job.tokens[0] if n else None,
        "finish_ns": job.finish,
        "token_ns": job.tokens,
        "ttft_s": (job.tokens[0] - job.arrival) / 1e9 if n else None,
        "tpot_s": (job.tokens[-1] - job.tokens[0]) / (n - 1) / 1e9 if n >= 2 else None,
        "e2e_s": (job.finish - job.arrival) / 1e9 if done else None,
    }


def write_folder(
    folder: Path, requests: pa.Table, steps: pa.Table, manifest: dict[str, Any], config: dict[str, Any],
    done: bool = True,
) -> Path:  # fmt: skip
    """A run folder as the writer makes it, without summary.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config | {group: {} for group in ("backend", "scheduler", "cache", "trace") if group not in config}
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    (folder / "manifest.json").write_text(json.dumps({"num_gpu_blocks": None, **manifest}))
    pq.write_table(requests, folder / "requests.parquet")
    pq.write_table(steps, folder / "steps.parquet")
    (folder / "run.log").write_text("")
    if done:
        (folder / "done").write_text("")
    return folder


def write_run(folder: Path, backend: str = "sim", **options: Any) -> Path:
    """Simulates and writes one run; `options` as for `simulate`."""
    requests, steps, manifest = simulate(**options)
    composition = "decode_first" if options.get("chunked", True) else "prefill_first"
    config = {
        "backend": {"name": backend},
        "seed": options.get("seed", 0),
        "scheduler": {"name": composition, "max_num_seqs": 32},
        "cache": {"watermark": options.get("watermark", 0.01), "prefix_caching": options.get("prefix_caching", True)},
        "trace": {"rate": options.get("rate", 8.0), "num_requests": options.get("num_requests", 60)},
        "hydra": {"run": {"dir": str(folder)}},
    }
    manifest |= {"backend": backend, "scheduler": composition} | (
        {"attention": "torch", "cost": None} if backend == "real" else {}
    )
    return write_folder(folder, requests, steps, manifest, config, done=options.get("stop_s") is None)


def write_runs(root: Path, backend: str = "sim", **options: Any) -> list[Path]:
    """A run of each combination of the options that are lists, the last one fastest; its folder is named by them."""
    swept = {name: values for name, values in options.items() if isinstance(values, list)}
    return [
        write_run(root / "-".join(map(str, values)), backend, **options | dict(zip(swept, values, strict=True)))
        for values in product(*swept.values())
    ]


def change_config(folder, **settings):
    """Sets dotted keys (with "__" for the dot) in a run's configuration."""
    config = json.loads((folder / "config.yaml").read_text())
    for key, value in settings.items():
        section, _, leaf = key.rpartition("__")
        (config.setdefault(section, {}) if section else config)[leaf] = value
    (folder / "config.yaml").write_text(json.dumps(config))


def change_manifest(folder: Path, **entries: Any) -> None:
    """Sets entries of a run's manifest."""
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def change_columns(file: Path, **columns: Sequence[Any]) -> None:
    """Replaces columns of a Parquet file; their types stay."""
    table = pq.read_table(file)
    for name, values in columns.items():
        place = table.column_names.index(name)
        table = table.set_column(place, name, pa.array(values, table.schema.field(name).type))
    pq.write_table(table, file)


def change_requests(folder: Path, change: Callable[[int, dict[str, Any]], float]) -> None:
    """Changes the request records of a run. change: is given the number and the fields of a request, which it may
    change, and returns how many times as long the request takes."""
    file = folder / "requests.parquet"
    table = pq.read_table(file)
    rows = table.to_pylist()
    for i, row in enumerate(rows):
        slowness, arrival = change(i, row), row["arrival_ns"]
        for name in ("first_token_ns", "finish_ns"):
            row[name] = arrival + round(slowness * (row[name] - arrival))
        row["token_ns"] = [arrival + round(slowness * (t - arrival)) for t in row["token_ns"]]
        row |= {name: slowness * row[name] for name in ("ttft_s", "tpot_s", "e2e_s") if row[name] is not None}
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), file)
