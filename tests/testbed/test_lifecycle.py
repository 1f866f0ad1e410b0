"""How requests end: stops, lengths, aborts in every state, refusals. Whatever happens, nothing stays held."""

from __future__ import annotations

import pytest

from testbed.blocks.config import KVRules
from testbed.core.outcome import FinishReason, Outcome, StepResult
from testbed.core.request import SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.core.step import Step
from testbed.errors import RequestError
from tests.testbed.core_kit import make_limits, make_request, make_scheduler
from tests.testbed.stepping import add, assert_nothing_held, drain, ignored, preempted, scheduled, step

EOS = 99


# --- stops ---


def outputs(scheduler: Scheduler, drawn: list[int]) -> tuple[list[int], FinishReason]:
    """Runs the only request on the given samples; returns its output and why it ended."""
    for token in drawn:
        _, finished = step(scheduler, {0: token})
        if finished:
            assert_nothing_held(scheduler)
            return list(finished[0].output_token_ids), finished[0].reason
    raise AssertionError("it did not end")


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(), ([5, 6, EOS], FinishReason.STOP)),
        (SamplingParams(stop_token_ids=(6,)), ([5, 6], FinishReason.STOP)),
        (SamplingParams(max_tokens=2), ([5, 6], FinishReason.LENGTH)),
        (SamplingParams(max_tokens=3), ([5, 6, EOS], FinishReason.STOP)),  # both at once: the stop is the reason
        (SamplingParams(ignore_eos=True, max_tokens=4), ([5, 6, EOS, 7], FinishReason.LENGTH)),
        (SamplingParams(ignore_eos=True, stop_token_ids=(7,)), ([5, 6, EOS, 7], FinishReason.STOP)),
        (SamplingParams(ignore_eos=True), ([5, 6, EOS, 7, 8], FinishReason.LENGTH)),  # at the model's length
    ],
)
def test_a_sampled_output_ends_with_a_stop_token_or_at_its_length(
    sampling: SamplingParams, expected: tuple[list[int], FinishReason]
) -> None:
    scheduler = make_scheduler(limits=make_limits(model_len=8), eos_token_id=EOS)
    add(scheduler, make_request("a", 3, None, sampling=sampling))
    assert outputs(scheduler, [5, 6, EOS, 7, 8, 9, 10]) == expected


def test_a_forced_output_is_emitted_to_its_end_whatever_it_holds() -> None:
    scheduler = make_scheduler(eos_token_id=EOS)
    add(scheduler, make_request("a", 3, [1, EOS, 2], sampling=SamplingParams(max_tokens=1, stop_token_ids=(1,))))
    (finished,) = drain(scheduler)
    assert (list(finished.output_token_ids), finished.reason) == ([1, EOS, 2], FinishReason.LENGTH)


@pytest.mark.parametrize("composition", ["prefill_first", "decode_first", "unified"])
@pytest.mark.parametrize(("model_len", "expected"), [(10, 5), (8, 3), (6, 1), (5, 1)])
def test_a_forced_output_is_cut_at_the_models_length(composition: str, model_len: int, expected: int) -> None:
    scheduler = make_scheduler(composition, limits=make_limits(model_len=model_len))
    add(scheduler, make_request("a", 5, [1, 2, 3, 4, 5]))
    (finished,) = drain(scheduler)
    assert list(finished.output_token_ids) == [1, 2, 3, 4, 5][:expected]
    assert finished.reason is FinishReason.LENGTH


def test_what_the_backend_stopped_is_stopped() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 3, None))
    scheduler.plan(0)
    (finished,) = scheduler.commit(StepResult(1, (Outcome(0, (5,), FinishReason.STOP),)), 1)
    assert (finished.reason, list(finished.output_token_ids)) == (FinishReason.STOP, [5])


# --- refusals ---


@pytest.mark.parametrize("composition", ["prefill_first", "decode_first", "unified"])
def test_a_prompt_longer_than_the_model_is_ignored_in_the_next_step(composition: str) -> None:
    scheduler = make_scheduler(composition, limits=make_limits(model_len=8))
    add(scheduler, make_request("a", 8, 1), make_request("long", 9, 1))
    plan, finished = step(scheduler)
    assert (scheduled(plan), ignored(plan)) == ({"a": 8}, ["long"])
    assert {item.request.request_id: item.reason for item in finished} == {
        "long": FinishReason.IGNORED,
        "a": FinishReason.LENGTH,
    }
    assert plan.ignored[0].reason == "prompt of 9 tokens exceeds max_model_len (8)"
    assert_nothing_held(scheduler)


def test_many_that_can_never_run_end_in_one_step_and_none_is_copied_for_the_next() -> None:
    class Refusing:
        def compose(self, step: Step) -> None:
            ended, reports = step.leaving.ended, step.leaving.ignored
            while (seq := step.head()) is not None:
                step.ignore(seq, "refused")
            assert step.leaving.ended is ended
            assert step.leaving.ignored is reports

    scheduler = make_scheduler(Refusing(), limits=make_limits(model_len=8))
    add(scheduler, *[make_request(f"r{i}", 9 if i % 2 else 4, 1) for i in range(8)])
    plan, finished = step(scheduler)
    assert ignored(plan) == ["r1", "r3", "r5", "r7", "r0", "r2", "r4", "r6"]
    assert [item.request.request_id for item in finished] == ignored(plan)
    assert_nothing_held(scheduler)


def test_an_id_may_be_used_again_only_once_its_request_ended() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 3, 1))
    with pytest.raises(RequestError, match="'a' is in use"):
        add(scheduler, make_request("a", 5, 1))
    assert scheduler.num_waiting == 1
    drain(scheduler)
    add(scheduler, make_request("a", 5, 1))
    assert scheduled(step(scheduler)[0]) == {"a": 5}


def test_an_id_is_in_use_while_its_refusal_is_not_yet_reported() -> None:
    scheduler = make_scheduler(limits=make_limits(model_len=4))
    add(scheduler, make_request("long", 9, 1))
    with pytest.raises(RequestError):
        add(scheduler, make_request("long", 2, 1))


# --- aborts ---


def waiting() -> Scheduler:
    scheduler = make_scheduler(limits=make_limits(seqs=1))
    add(scheduler, make_request("other", 4, 3), make_request("a", 4, 3))
    step(scheduler)
    return scheduler


def never_planned() -> Scheduler:
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 4, 3), make_request("other", 4, 3))
    return scheduler


def decoding() -> Scheduler:
    scheduler = never_planned()
    step(scheduler)
    return scheduler


def part_way_through_its_prompt() -> Scheduler:
    scheduler = make_scheduler(limits=make_limits(budget=3))
    add(scheduler, make_request("a", 9, 3), make_request("other", 4, 3))
    step(scheduler)
    return scheduler


def sharing_blocks() -> Scheduler:
    scheduler = make_scheduler(rules=KVRules("chunk", hits_visible="allocation"))
    add(scheduler, make_request("a", range(9), 3), make_request("other", range(9), 3))
    step(scheduler)
    return scheduler


def preempted_and_waiting() -> Scheduler:
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    add(scheduler, make_request("other", 4, 6), make_request("a", 4, 6))
    step(scheduler)
    plan, _ = step(scheduler)
    assert preempted(plan) == ["a"]
    return scheduler


def rejected() -> Scheduler:
    scheduler = make_scheduler(limits=make_limits(model_len=8))
    add(scheduler, make_request("a", 9, 1), make_request("other", 4, 3))
    return scheduler


@pytest.mark.parametrize(
    "state",
    [never_planned, waiting, decoding, part_way_through_its_prompt, sharing_blocks, preempted_and_waiting, rejected],
)
def test_an_abort_in_any_state_frees_everything_and_touches_nobody_else(state) -> None:  # type: ignore[no-untyped-def]
    scheduler = state()
    num_output = next(seq.num_output_tokens for seq in scheduler.unfinished() if seq.request.request_id == "a")
    finished = scheduler.abort("a", 0)
    assert finished is not None
    assert (finished.reason, finished.num_output_tokens) == (FinishReason.ABORT, num_output)
    scheduler.check_invariants()
    assert scheduler.abort("a", 0) is None, "it is gone"
    assert [item.request.request_id for item in drain(scheduler)] == ["other"]
    assert_nothing_held(scheduler)


def test_aborting_all_leaves_an_idle_scheduler() -> None:
    scheduler = decoding()
    scheduler.abort("a", 0)
    scheduler.abort("other", 0)
    assert_nothing_held(scheduler)


def test_an_unknown_id_is_not_aborted() -> None:
    assert make_scheduler().abort("nobody", 0) is None


def test_an_abort_while_a_plan_is_in_flight_ends_at_once_and_the_row_is_dropped() -> None:
    scheduler = never_planned()
    free = scheduler.blocks.num_free_blocks
    scheduler.abort("other", 0)
    plan = scheduler.plan(0)
    assert [name for name, _ in plan.num_scheduled] == ["a"]
    finished = scheduler.abort("a", 0)
    assert finished is not None
    assert (finished.reason, scheduler.has_work, scheduler.blocks.num_free_blocks) == (FinishReason.ABORT, False, free)
    assert scheduler.commit(StepResult(1), 1) == []
    assert scheduler.emitters == []


def test_an_outcome_may_end_a_sequence_without_a_token_and_say_why() -> None:
    """As where a client left while its token was drawn, and the loop has not heard of that."""
    scheduler = make_scheduler("unified")
    add(scheduler, make_request("a", 4, None), make_request("b", 4, None))
    scheduler.plan(0)
    left, stays = Outcome(0, (0,), FinishReason.ABORT, dropped=True), Outcome(1, (7,))
    (finished,) = scheduler.commit(StepResult(1, (left, stays)), 1)
    assert (finished.reason, finished.message, finished.num_output_tokens) == (FinishReason.ABORT, "aborted", 0)
    assert [seq.request_id for seq in scheduler.emitters] == ["b"]
    assert scheduler.abort("a", 2) is None, "it has ended"
    scheduler.check_invariants()


def test_one_plan_is_in_flight() -> None:
    scheduler = never_planned()
    plan = scheduler.plan(0)
    with pytest.raises(AssertionError, match="commit before planning more"):
        scheduler.plan(0)
    scheduler.commit(StepResult(1), 1)
    with pytest.raises(AssertionError, match="nothing is in flight"):
        scheduler.commit(StepResult(1), 1)
    with pytest.raises(AssertionError, match="valid until it is committed"):
        _ = plan.scheduled


@pytest.mark.parametrize("composition", ["prefill_first", "decode_first", "unified"])
@pytest.mark.parametrize("block_size", [1, 512])
def test_extreme_block_sizes_serve_to_the_end(composition: str, block_size: int) -> None:
    scheduler = make_scheduler(composition, block_size=block_size, num_blocks=3 * 512 // block_size)
    add(scheduler, make_request("a", 60, 3), make_request("b", list(range(60)), 3), make_request("c", range(50), 3))
    finished = drain(scheduler)
    assert sorted((item.request.request_id, item.num_output_tokens) for item in finished) == [
        ("a", 3),
        ("b", 3),
        ("c", 3),
    ]
    assert_nothing_held(scheduler)
