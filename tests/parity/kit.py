"""A real run of a tiny model, and its tape replayed by the simulator in the two ways that a user has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.configuration.config import RunConfig
from experiments.runs.run import RunResult, execute
from testbed.traces.readers.own import read_jsonl
from testbed.traces.schema import Trace
from tests.experiments.kit import REAL, SHORT, TINY, config_of

COMPOSITIONS = ("prefill_first", "decode_first", "unified", "vllm_v1")
ROOMY, TIGHT = 200, 22  # blocks of 4 tokens; the longest sequence of SHARED needs 18 of them

# Requests that share their beginnings, so that prefix caching has something to find.
SHARED = {
    "trace__num_requests": 10,
    "trace__rate": 3000.0,
    "trace__num_system_prompts": 2,
    "trace__system_prompt_tokens": 14,
    "trace__prompt": {"kind": "uniform", "min_tokens": 2, "max_tokens": 30},
    "trace__output": {"kind": "uniform", "min_tokens": 8, "max_tokens": 24},
}
TIMED: dict[str, Any] = {}
CLOSED = {  # all users at once, so that a tight pool is tight at any speed of the machine
    "trace__num_requests": 13,
    "trace__arrival": "all_at_once",
    "trace__min_turns": 2,
    "trace__max_turns": 3,
    "trace__think_time_s": 0.002,
    "trace__prompt": {"kind": "uniform", "min_tokens": 4, "max_tokens": 9},
    "trace__output": {"kind": "uniform", "min_tokens": 8, "max_tokens": 16},
    "trace__max_session_tokens": 72,
}


def real_config(composition: str, **dotted: Any) -> RunConfig:
    """A composition alone, with SHARED on the CPU engine."""
    options = (*TINY, *SHORT, *REAL, f"scheduler={composition}", "scheduler.max_num_batched_tokens=64")
    settings = {"trace__prompt": None, "trace__output": None, "cache__watermark": 0.0}
    return config_of(options, **{**settings, **SHARED, **dotted})


def real_run(folder: Path, config: RunConfig, trace: Trace | None = None) -> RunResult:
    return execute(config, folder, trace=trace)


def replay_config(config: RunConfig, run: Path) -> RunConfig:
    """The configuration that a user writes to replay `run`: the same, simulated, at the recorded prices."""
    raw = {**config.raw, "backend": {"name": "sim"}, "cost": {"name": "recorded", "run": str(run)}}
    return RunConfig.from_container(raw)


def replayed_run(folder: Path, config: RunConfig, run: Path) -> RunResult:
    """cost=recorded with the trace that the real run's folder holds."""
    return execute(replay_config(config, run), folder, trace=read_jsonl(run / "trace.jsonl"))
