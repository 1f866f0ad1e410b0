"""Whole simulated runs, from a configuration to the digest in the manifest, as `testbed run` and `simulate` have them.

    python -m tests.golden.configurations               writes configurations.jsonl anew
    python -m tests.golden.configurations --check       names those that differ; exit status 1 if any does
    python -m tests.golden.configurations --run vllm_v1 prints one run's digest, steps and summary

Time decides here too: the prices are the product's, and so are the draws of the traces. Each record keeps the trace's
fingerprint, so that another trace (numpy's samplers have the values of one version) is not taken for another decision.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from experiments.configuration.compose import compose_config
from experiments.configuration.options import options
from experiments.runs.run import execute
from testbed.traces.readers.own import read_jsonl
from testbed.traces.schema import Trace

RECORDS = Path(__file__).parent / "configurations.jsonl"
FOLDER = os.environ.get("TESTBED_TRACES")  # with the public traces, as for tests/traces

BASE = (
    "model=llama3.1_8b", "record.steps=false", "record.token_times=false", "allow_ignored=true",
    "scheduler.max_model_len=2048", "cache.num_cpu_blocks=0", "device.gemm_floor_ns=2000",  # as when they were recorded
)  # fmt: skip
CHATS = (  # in bursts; shared system prompts, sessions that go on, more than a pool of 320 blocks holds
    "trace.num_requests=200", "trace.rate=30", "trace.arrival=gamma", "trace.cv=5", "trace.num_tenants=3",
    "trace.min_turns=1", "trace.max_turns=3", "trace.think_time_s=0.5",
    "trace.num_system_prompts=3", "trace.system_prompt_tokens=100", "trace.max_session_tokens=1500",
    "trace.prompt={kind: lognormal, value: 120, sigma: 0.8, max_tokens: 600}",
    "trace.output={kind: lognormal, value: 90, sigma: 0.7, max_tokens: 300}",
    "cache.num_gpu_blocks=320",
)  # fmt: skip
LONG = (  # long prompts beside short ones: chunks
    "trace.num_requests=150", "trace.rate=25", "trace.prompt={kind: uniform, min_tokens: 20, max_tokens: 1500}",
    "trace.output={kind: uniform, min_tokens: 10, max_tokens: 150}", "cache.num_gpu_blocks=400",
)  # fmt: skip
SWAPS = ("scheduler.preemption=swap", "cache.num_cpu_blocks=600", "cache.num_gpu_blocks=200")
FAIR = "trace.tenants=[{name: chat, share: 3, max_turns: 4}, {name: batch, rate: 40, arrival: all_at_once}]"
FLEET = ("backend.num_replicas=3", "trace.rate=90", "trace.num_requests=300")

UNREACHED = ("vllm_v1_h100",)  # other limits than another preset's alone, which these loads do not reach


class Case(NamedTuple):
    """One run. file: of the folder of public traces. has_rows: the trace is `mixed_rows`."""

    overrides: tuple[str, ...]
    file: str | None = None
    has_rows: bool = False


def _case(*overrides: str, on: tuple[str, ...] = CHATS) -> Case:
    return Case((*on, *overrides))


def _rows(*overrides: str) -> Case:
    return Case(("cache.num_gpu_blocks=160", *overrides), has_rows=True)


def _azure(*overrides: str) -> Case:
    own = ("trace=azure", "trace.limit=250", "trace.rate_scale=3", "trace.max_prompt_tokens=1800")
    return Case((*own, "cache.num_gpu_blocks=900", *overrides), file="azure_llm_2023_conv.csv")


def _mooncake(*overrides: str) -> Case:
    own = ("trace=mooncake", "trace.limit=150", "trace.spread_batches=true", "scheduler.max_model_len=65536")
    return Case((*own, "cache.num_gpu_blocks=9000", *overrides), file="mooncake_fast25_conversation.jsonl.gz")


CASES: dict[str, Case] = {
    **{f"preset {name}": _case(f"scheduler={name}") for name in options("scheduler") if name not in UNREACHED},
    # swap
    "swap, unified": _case("scheduler=unified", *SWAPS),
    "swap, prefill first, lookahead": _case("scheduler=prefill_first", "scheduler.lookahead_slots=4", *SWAPS),
    "swap, decode first, long prompts": _case("scheduler=decode_first", *SWAPS, on=LONG),
    "swap, vLLM V0": _case("scheduler=vllm_v0", *SWAPS),
    "swap, vLLM V0, chunks": _case("scheduler=vllm_v0_chunked", "scheduler.max_num_batched_tokens=256", *SWAPS),
    "swap or recompute, the cheaper": _case(
        "scheduler=prefill_first", *SWAPS, "scheduler.preemption=cheaper", "scheduler.victim=most_blocks"
    ),
    "swap beside the computation": _case(
        "scheduler=unified", "backend.swap_overlap=true", "cache.num_cpu_blocks=80", *SWAPS[::2]
    ),
    # prefix caching
    "no prefix caching, unified": _case("scheduler=unified", "cache.prefix_caching=false"),
    "no prefix caching, nano-vllm": _case("scheduler=nano_vllm", "cache.prefix_caching=false"),
    "lfu, blocks of 32": _case("cache.eviction=lfu", "cache.block_size=32", "cache.num_gpu_blocks=150"),
    "cost-aware eviction, documents": _case(
        "cache.eviction=cost_aware", "trace.rag.num_documents=30", "trace.rag.document.value=150",
        "trace.rag.documents_per_prompt=3", "scheduler.max_model_len=4096",
    ),
    # windows, chunks, budgets
    "sliding window": _case("cache.sliding_window=200", "cache.num_gpu_blocks=130", on=LONG),
    "sliding window, prefill first, swap": _case("scheduler=prefill_first", "cache.sliding_window=300", *SWAPS),
    "small chunks": _case("scheduler.max_num_batched_tokens=96", "scheduler.long_prefill_token_threshold=64", on=LONG),
    "several partial prefills": _case(
        "scheduler=decode_first", "scheduler.max_num_batched_tokens=300", "scheduler.max_num_partial_prefills=3",
        "scheduler.long_prefill_token_threshold=200", on=LONG,
    ),
    # groups
    "parallel samples": _case("scheduler=vllm_v0_classic", "sampling.n=3", "cache.num_cpu_blocks=400"),
    "parallel samples, unified, swap": _case("scheduler=unified", "sampling.n=2", *SWAPS),
    "beams": _case("scheduler=prefill_first", "sampling.beam_width=3", "trace.num_requests=60", *SWAPS),
    "beams, vLLM V1": _case("sampling.beam_width=2", "trace.num_requests=100", "cache.num_cpu_blocks=400"),
    # queue orders, victims, admissions, on rows with priorities, deadlines, tenants, salts and cancellations
    "priorities": _rows("scheduler.queue_order=priority", "scheduler=vllm_v1"),
    "deadlines": _rows("scheduler=prefill_first", "scheduler.queue_order=edf", "scheduler.victim=last_in_queue_order"),
    "shortest remaining": _rows(
        "scheduler=unified", "scheduler.queue_order=srpt", "scheduler.oracle=noisy",
        "scheduler.victim=longest_remaining",
    ),
    "feedback levels, swap": _rows("scheduler=decode_first", "scheduler.queue_order=mlfq", *SWAPS),
    "depth first, tenants isolated": _rows(
        "scheduler=unified", "scheduler.queue_order={_target_: testbed.policies.orders.depth_first, tree: waiting}",
        "cache.isolate_tenants=true",
    ),
    "response ratio": _rows(
        "scheduler=trtllm_max_util", "scheduler.queue_order=hrrn", "scheduler.victim=least_progress"
    ),
    # generators
    "agents": _case("trace.agent.min_calls=1", "trace.agent.max_calls=3", "trace.agent.tool_time_s=0.2"),
    "fair shares of tenants": _case("scheduler=vtc", FAIR),
    "users in a closed loop": _case("trace.arrival=closed_loop", "trace.num_users=30", "cost=linear"),
    # fleets
    "three replicas, round robin": _case(*FLEET),
    "three replicas, least loaded": _case(*FLEET, "backend.router=least_loaded", "scheduler=unified", *SWAPS),
    "three replicas, prefix affinity": _case(*FLEET, "backend.router=prefix_affinity", "scheduler=sglang_lpm"),
    "three replicas, sessions stick": _case(*FLEET, "backend.router=session_sticky", "backend.schedule_ns=200000"),
    # public traces
    "azure, vLLM V1": _azure(),
    "azure, Sarathi-Serve, swap": _azure("scheduler=sarathi", "scheduler.preemption=swap", "cache.num_cpu_blocks=2000"),
    "mooncake, vLLM V1": _mooncake(),
    "mooncake, nano-vllm": _mooncake("scheduler=nano_vllm"),
}  # fmt: skip


class Record(NamedTuple):
    digest: str
    num_steps: int
    fingerprint: str  # of the trace


def is_absent(case: Case) -> bool:
    """Whether its trace is not on this machine."""
    return case.file is not None and (FOLDER is None or not (Path(FOLDER) / case.file).is_file())


def mixed_rows() -> list[dict[str, Any]]:
    """Requests with everything that a row may say, drawn by Python's own generator."""
    rng = random.Random("golden/rows")
    rows: list[dict[str, Any]] = []
    now = 0.0
    for index in range(150):
        now += rng.expovariate(40.0)
        tenant, salt = rng.choice((None, "a", "b")), rng.choice((None, None, "s"))
        num_prompt = 0
        for turn in range(rng.choice((1, 1, 1, 2, 3))):
            num_prompt += rng.randint(10, 250)
            row: dict[str, Any] = {
                "request_id": f"r{index}.{turn}", "session_id": f"s{index}", "turn": turn, "tenant": tenant,
                "prompt_tokens": num_prompt, "output_tokens": rng.randint(2, 150), "priority": rng.randrange(4),
                "cache_salt": salt,
            }  # fmt: skip
            row |= {"think_time": rng.uniform(0.05, 0.5)} if turn else {"arrival_time": round(now, 6)}
            row |= {"cancel_after": rng.uniform(0.05, 2.0)} if rng.random() < 0.15 else {}
            row |= {"deadline": rng.uniform(0.5, 5.0)} if rng.random() < 0.5 else {}
            num_prompt += row["output_tokens"]
            rows.append({key: value for key, value in row.items() if value is not None})
    return rows


@cache
def _mixed_trace() -> Trace:
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in mixed_rows()))
        return read_jsonl(file)


def run(name: str, folder: Path) -> tuple[Record, dict[str, Any]]:
    """What is kept of the run, and its summary."""
    case = CASES[name]
    overrides = [*BASE, *case.overrides]
    if case.file is not None:
        assert FOLDER is not None
        overrides.append(f"trace.path={Path(FOLDER) / case.file}")
    # a group is chosen before its keys are set
    overrides.sort(key=lambda item: "." in item.partition("=")[0])
    result = execute(compose_config(overrides), folder, trace=_mixed_trace() if case.has_rows else None)
    assert result.status == "complete", result.message
    manifest = json.loads((folder / "manifest.json").read_text())
    return Record(manifest["digest"], manifest["num_steps"], manifest["trace"]["fingerprint"]), result.summary


@cache
def recorded() -> dict[str, Record]:
    rows = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    return {row.pop("name"): Record(**row) for row in rows}


def _all() -> Iterator[tuple[str, Record, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as scratch:
        for index, name in enumerate(CASES):
            if is_absent(CASES[name]):
                print(f"{name}: {CASES[name].file} is not in the folder that TESTBED_TRACES names", file=sys.stderr)
                continue
            yield name, *run(name, Path(scratch) / str(index))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.configurations", description=__doc__.split("\n")[0])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="compare with what is recorded")
    action.add_argument("--run", choices=CASES, metavar="NAME", help="run this one, and print what came of it")
    options = parser.parse_args()
    if options.run is not None:
        with tempfile.TemporaryDirectory() as scratch:
            record, summary = run(options.run, Path(scratch) / "run")
        print(json.dumps({**record._asdict(), **summary}, indent=2))
        return 0
    found = {}
    for name, found[name], summary in _all():
        preemptions = summary["preemptions"]
        print(f"{name}: {found[name].digest}, {found[name].num_steps:,} steps, preemptions: {preemptions}")
    if options.check:
        differing = [name for name, record in found.items() if recorded()[name] != record]
        print(*differing, f"{len(differing)} of {len(found)} configurations differ", sep="\n")
        return 1 if differing else 0
    kept = recorded() if RECORDS.is_file() else {}  # of traces that are not here
    lines = [
        json.dumps({"name": name, **record._asdict()})
        for name in CASES
        if (record := found.get(name, kept.get(name))) is not None
    ]
    RECORDS.write_text("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
