"""`testbed run backend=vllm`, one step at a time and with a plan ahead, and the folders that it leaves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not in this environment: make test-vllm")

from analysis.load import load, load_run
from experiments.configuration.compose import compose_config
from experiments.conform.cases import read_cases
from experiments.conform.replay import replay_case
from experiments.conform.systems import SYSTEMS
from experiments.runs.parity import check_parity
from experiments.runs.run import execute
from testbed.errors import ConfigError
from tests.vllm.conftest import no_veto

pytestmark = pytest.mark.vllm
ENGINE = [
    "backend=vllm", "backend.enforce_eager=true", "backend.dtype=float32", "device=cpu", "cache.block_size=32",
    "cache.num_gpu_blocks=30", "scheduler.max_num_seqs=16", "scheduler.max_num_batched_tokens=256",
    "scheduler.max_model_len=512", "cache.watermark=0.0", "trace.num_requests=24", "trace.rate=60",
    "trace.prompt={kind:constant,value:80}", "trace.output={kind:constant,value:50}", "trace.forced=lengths",
]  # fmt: skip


PACES = ["real_time", "as_fast_as_possible", "probe_scaled"]
PACED = [("vllm_v1", pace) for pace in PACES] + [("vllm_v1_async", pace) for pace in PACES[:2]]


@pytest.mark.parametrize(("scheduler", "pace"), PACED)
def test_our_scheduler_leaves_a_run_whose_tape_replays(tmp_path: Path, model: Path, scheduler: str, pace: str) -> None:
    config = compose_config([*ENGINE, f"model.path={model}", f"scheduler={scheduler}", f"backend.pace={pace}"])
    with no_veto():
        result = execute(config, tmp_path / "run")
    assert (result.status, result.exit_status) == ("complete", 0)
    run = load_run(result.folder)
    assert (run.requests["num_output_tokens"] == 50).all()
    assert run.requests["num_preemptions"].sum() > 0
    assert run.manifest["async_scheduling"] == (scheduler == "vllm_v1_async")
    report = check_parity(result.folder)
    assert report.divergence is None, report.divergence
    assert report.num_steps == run.manifest["num_steps"]
    spans = run.steps[["schedule_ns", "prepare_ns", "forward_ns", "sample_ns"]]
    assert (spans.min() >= 0).all()
    took_ns = run.steps["end_ns"].max() - run.steps["start_ns"].min()
    assert spans["forward_ns"].sum() <= took_ns, "a device computes one step at a time"


@pytest.mark.parametrize(("scheduler", "pace"), PACED)
def test_vllms_own_scheduler_leaves_a_run_that_conforms(tmp_path: Path, model: Path, scheduler: str, pace: str) -> None:
    settings = [*ENGINE, f"model.path={model}", f"scheduler={scheduler}", "backend.decides=vllm"]
    config = compose_config([*settings, f"backend.pace={pace}"])
    with no_veto():
        result = execute(config, tmp_path / "run")
    assert (result.status, result.exit_status) == ("complete", 0)
    run = load_run(result.folder)
    assert (run.requests["num_output_tokens"] == 50).all()
    assert (run.manifest["replay"]["probe"] is not None) == (pace == "probe_scaled")
    assert (run.requests["first_scheduled_ns"] >= run.requests["arrival_ns"]).all()
    (case,) = read_cases(result.folder / "case.jsonl")
    assert sum(len(step["preempted"]) for step in case.steps) > 0
    system = SYSTEMS[case.system]
    assert system.preset == scheduler
    mismatch = replay_case(case, system, system.preset)
    assert mismatch is None, mismatch


def test_one_command_gives_the_ablation_in_three_columns(tmp_path: Path, model: Path) -> None:
    """Two policies, simulated, on our engine and in vLLM, from one trace; points of a sweep follow one another."""
    shared = [item for item in ENGINE if not item.startswith("backend")]
    command = [sys.executable, "-m", "experiments", "run", "-m", "backend=sim,real,vllm", "scheduler=vllm_v1,sarathi",
               f"model.path={model}", "cache.num_cpu_blocks=0", *shared,
               f"hydra.sweep.dir={tmp_path / 'three'}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = load(tmp_path / "three").runs
    assert {(run.manifest["backend"], run.manifest["scheduler"]) for run in runs} == {
        (backend, scheduler) for backend in ("sim", "real", "vllm") for scheduler in ("vllm_v1", "sarathi")
    }
    assert len({run.manifest["trace"]["fingerprint"] for run in runs}) == 1
    assert all((run.requests["num_output_tokens"] == 50).all() for run in runs)


def test_a_prompt_that_is_too_long_is_ignored_as_in_the_simulator(tmp_path: Path, model: Path) -> None:
    shared = [
        *ENGINE[3:], f"model.path={model}", "cache.num_cpu_blocks=0", "allow_ignored=true", "trace.num_requests=8",
        "trace.prompt={kind:lognormal,value:470,sigma:0.3,max_tokens:700}",
    ]  # fmt: skip
    reasons = []
    for backend in (["backend=sim", "device=cpu"], ENGINE[:3]):
        result = execute(compose_config([*backend, *shared]), tmp_path / backend[0])
        assert (result.status, result.exit_status) == ("complete", 0), result.message
        reasons.append(load_run(result.folder).requests.sort_values("request_id")["finish_reason"].tolist())
    assert reasons[0] == reasons[1]
    assert {"ignored", "length"} == set(reasons[0])


def test_a_step_that_is_planned_ahead_is_not_probed(tmp_path: Path, model: Path) -> None:
    settings = [*ENGINE, f"model.path={model}", "scheduler=vllm_v1_async", "backend.pace=probe_scaled"]
    with no_veto(), pytest.raises(ConfigError, match="of vLLM one that plans no step ahead"):
        execute(compose_config(settings), tmp_path / "run")


def test_a_platform_that_cannot_plan_ahead_says_so(tmp_path: Path, model: Path) -> None:
    config = compose_config([*ENGINE, f"model.path={model}", "scheduler=vllm_v1_async"])
    with pytest.raises(ConfigError, match="and vLLM has turned it off on this"):
        execute(config, tmp_path / "run")


def test_the_bench_of_the_observer_says_what_it_adds_to_a_step() -> None:
    command = [sys.executable, "-m", "experiments", "bench", "observer", "--running", "2", "--steps", "10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"\| 2 \| (\d+) \| (\d+) \((\d+) … (\d+)\) \|", done.stdout)
    assert found is not None, done.stdout
    own_us, added_us, low_us, high_us = map(int, found.groups())
    assert own_us > 0
    assert 0 < low_us <= added_us <= high_us
