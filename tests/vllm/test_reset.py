"""A reset of the prefix cache while requests run, inside vLLM: they are computed again, and say what they would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not in this environment: make test-vllm")

from analysis.load import load_run
from experiments.conform.cases import read_cases
from experiments.conform.replay import replay_case
from experiments.conform.systems import SYSTEMS
from experiments.observe.importing import import_log
from experiments.runs.parity import check_parity
from tests.vllm.conftest import no_veto

pytestmark = pytest.mark.vllm
PAUSES = {"a reset": None, "a pause that keeps requests and clears the cache": "keep"}


@pytest.mark.parametrize("how", PAUSES)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_outputs_after_a_reset_equal_those_without(
    tmp_path: Path, start: Callable[..., Any], prompts: list[list[int]], num_tokens: list[int],
    stock: list[list[int]], is_async: bool, how: str,
) -> None:  # fmt: skip
    """The second of three resets finds the KV of all blocks spoiled, as other weights would have it."""
    import vllm

    settings = {"out": str(tmp_path / "run"), "device": "cpu"}
    with no_veto():
        llm = start(
            num_gpu_blocks_override=120, scheduler_cls="real.vllm.TestbedScheduler", async_scheduling=is_async,
            additional_config={"testbed": settings},
        )  # fmt: skip
    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    for i, prompt in enumerate(prompts):
        params = vllm.SamplingParams(temperature=0, max_tokens=num_tokens[i], ignore_eos=True, detokenize=False)
        engine.add_request(f"r{i}", {"prompt_token_ids": prompt}, params)
    outputs, num_steps = dict[str, list[int]](), 0
    while engine.has_unfinished_requests():
        for one in engine.step():
            if one.finished:
                outputs[one.request_id] = list(one.outputs[0].token_ids)
        num_steps += 1
        if num_steps in (5, 25, 60):
            assert not core.reset_prefix_cache(), "requests run"
            reset(core, how)
            if num_steps == 25:
                spoil(core)
            core.resume_scheduler()
    assert [i for i, output in enumerate(stock) if outputs[f"r{i}"] != output] == []
    assert core.reset_prefix_cache(), "nothing runs"
    engine.engine_core.shutdown()
    run = load_run(tmp_path / "run")
    assert run.requests["num_preemptions"].sum() >= 30
    report = check_parity(tmp_path / "run")
    assert report.divergence is None, report.divergence
    assert report.num_steps == run.manifest["num_steps"]
    assert (tmp_path / "run" / "tape.jsonl").read_text().count('"kind":"reset_prefixes"') == 4


@pytest.mark.parametrize("mode", ["sync", "async", "async, in a pause"])
def test_a_log_with_resets_conforms_unless_a_step_was_in_flight(
    tmp_path: Path, start: Callable[..., Any], prompts: list[list[int]], num_tokens: list[int], mode: str
) -> None:
    import vllm
    from vllm.v1.core.sched.interface import PauseState

    is_async = mode != "sync"

    log = tmp_path / "log.jsonl"
    with no_veto():
        llm = start(
            num_gpu_blocks_override=41, async_scheduling=is_async,
            scheduler_cls=f"real.vllm.Observed{'Async' if is_async else ''}Scheduler",
            additional_config={"testbed": {"observe": str(log)}},
        )  # fmt: skip
    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    num_steps, left = 0, list(range(len(prompts)))
    while left or engine.has_unfinished_requests():
        for i in left[: 3 if num_steps % 7 == 0 else 0]:
            params = vllm.SamplingParams(temperature=0, max_tokens=num_tokens[i], ignore_eos=True, detokenize=False)
            engine.add_request(f"r{i}", {"prompt_token_ids": prompts[i]}, params)
            left.remove(i)
        engine.step()
        num_steps += 1
        if num_steps in (10, 11, 45):
            assert not core.reset_prefix_cache(), "requests run"
            if mode == "async, in a pause":  # as a served engine has it: what is in flight comes first
                core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
                while core.batch_queue:
                    engine.step()
            assert core.reset_prefix_cache(reset_running_requests=True)
            core.resume_scheduler()
    assert core.reset_prefix_cache(), "nothing runs"
    engine.engine_core.shutdown()
    said = "\n".join(import_log(log, tmp_path / "run"))
    if mode == "async":
        assert "lost its KV to a reset 3 times with a step in flight" in said
        assert not (tmp_path / "run" / "case.jsonl").exists()
        return
    (case,) = read_cases(tmp_path / "run" / "case.jsonl")
    assert len(case.resets) == 4
    assert sum(len(step["preempted"]) for step in case.steps) > 15
    mismatch = replay_case(case, SYSTEMS[case.system], SYSTEMS[case.system].preset)
    assert mismatch is None, mismatch


def reset(core: Any, how: str) -> None:
    if PAUSES[how] is None:
        assert core.reset_prefix_cache(reset_running_requests=True)
    else:
        core.pause_scheduler(mode=PAUSES[how], clear_cache=True)


def spoil(core: Any) -> None:
    """Nothing that lies in the KV cache is worth anything."""
    for cache in core.model_executor.driver_worker.worker.model_runner.kv_caches:
        cache.fill_(3.0)
