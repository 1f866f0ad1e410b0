"""What tests of `testbed fidelity` share: a run of the simulator that stands for a measured one, and the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from analysis.load import Run
from experiments import simulate
from experiments.cli import main
from experiments.configuration.compose import compose_from
from experiments.wiring.traces import build_trace
from testbed.traces.serialize import write_jsonl

TRACE = {"name": "synthetic", "num_requests": 60, "rate": 10, "seed": 5,
         "prompt": {"kind": "uniform", "min_tokens": 50, "max_tokens": 600},
         "output": {"kind": "uniform", "min_tokens": 5, "max_tokens": 80}}  # fmt: skip
FEW = {**TRACE, "num_requests": 24}
ENGINE = {"model": "qwen3_0.6b", "scheduler": "vllm_v1", "cache": {"num_gpu_blocks": 3000}}
GIVEN_NS, PLANTED_NS = 500_000, 550_000
FILE = ["model=qwen3_0.6b", "device=h100", "scheduler=vllm_v1", "cache.num_gpu_blocks=3000"]


def ran(folder: Path, overhead_ns: int = GIVEN_NS, **settings) -> Run:
    device = {"name": "h100", "step_overhead_ns": overhead_ns}
    return simulate(settings.pop("trace", TRACE), folder=folder, device=device, **{**ENGINE, **settings})


def fidelity(*arguments: object) -> int:
    return main(["fidelity", *map(str, arguments)])


def result(folder: Path) -> dict:
    return json.loads((folder / "fidelity.json").read_text())


def compared(tmp_path: Path, *arguments: object) -> dict:
    """What the command finds; its outputs are in `out`."""
    assert fidelity(*arguments, "--out", tmp_path / "out") == 0
    return result(tmp_path / "out")


def error_line(say, *arguments: object) -> str:
    return say("fidelity", *map(str, arguments)).error()


def copied(run: Run, folder: Path) -> Path:
    """The run's folder with the trace in it, as a real run has it."""
    shutil.copytree(run.path, folder)
    write_jsonl(build_trace(compose_from(run.config, [])), folder / "trace.jsonl")
    return folder
