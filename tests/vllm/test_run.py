"""`testbed run backend=vllm`, one step at a time and with a plan ahead, and the folders that it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not in this environment: make test-vllm")

from analysis.load import load_run
from experiments.compose import compose_config
from experiments.conform.cases import read_cases
from experiments.conform.replay import replay_case
from experiments.conform.systems import SYSTEMS
from experiments.parity import check_parity
from experiments.run import execute
from testbed.errors import ConfigError
from tests.vllm.conftest import no_veto

pytestmark = pytest.mark.vllm
ENGINE = [
    "backend=vllm", "backend.enforce_eager=true", "backend.dtype=float32", "device=cpu", "cache.block_size=32",
    "cache.num_gpu_blocks=30", "scheduler.max_num_seqs=16", "scheduler.max_num_batched_tokens=256",
    "scheduler.max_model_len=512", "cache.watermark=0.0", "trace.num_requests=24", "trace.rate=60",
    "trace.prompt={kind:constant,value:80}",
    "trace.output={kind:constant,value:50}", "trace.forced=lengths",
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


def test_a_step_that_is_planned_ahead_is_not_probed(tmp_path: Path, model: Path) -> None:
    settings = [*ENGINE, f"model.path={model}", "scheduler=vllm_v1_async", "backend.pace=probe_scaled"]
    with no_veto(), pytest.raises(ConfigError, match="of vLLM one that plans no step ahead"):
        execute(compose_config(settings), tmp_path / "run")


def test_a_platform_that_cannot_plan_ahead_says_so(tmp_path: Path, model: Path) -> None:
    config = compose_config([*ENGINE, f"model.path={model}", "scheduler=vllm_v1_async"])
    with pytest.raises(ConfigError, match="and vLLM has turned it off on this"):
        execute(config, tmp_path / "run")
