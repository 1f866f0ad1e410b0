"""Requests of several sequences: they part at the prompt's end, are scheduled together, and end one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from testbed.core.outcome import FinishReason, Outcome, StepResult
from testbed.core.plan import BlockedBy
from testbed.core.request import SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.core.state import SequenceState
from testbed.policies.preemption import Recompute
from tests.testbed.core_kit import ALL_COMPOSITIONS, make_limits, make_request, make_scheduler
from tests.testbed.groups_kit import LENGTH, STOP, beams, members, out, outputs_of
from tests.testbed.stepping import add, assert_nothing_held, drain, rows, step, step_with

# --- parallel samples ---


@pytest.mark.parametrize("composition", ALL_COMPOSITIONS)
def test_a_forced_output_is_emitted_by_every_member(composition: str) -> None:
    scheduler = make_scheduler(composition)
    add(scheduler, make_request("a", 5, [11, 12, 13], sampling=SamplingParams(n=3)))
    seen = []
    while scheduler.has_work:
        plan, finished = step(scheduler)
        emitted = [seq.request_id for seq in scheduler.emitters]
        seen.append((rows(plan), plan.shape.num_samples, emitted, scheduler.num_running))
    three = [("a", 1)] * 3
    assert seen == [
        ([("a", 5)], 1, ["a"] * 3, 3),  # one row, of which three sequences part
        (three, 3, ["a"] * 3, 3),
        (three, 3, ["a"] * 3, 0),
    ]
    (done,) = finished
    assert outputs_of(done) == [[11, 12, 13]] * 3
    assert (done.reason, done.num_output_tokens, list(done.output_token_ids)) == (LENGTH, 9, [11, 12, 13])
    assert_nothing_held(scheduler)


@pytest.mark.parametrize("composition", ALL_COMPOSITIONS)
def test_members_part_with_the_first_tokens_that_were_drawn(composition: str) -> None:
    scheduler = make_scheduler(composition)
    add(scheduler, make_request("a", 5, None, sampling=SamplingParams(n=3, max_tokens=2)))
    plan = scheduler.plan(0)
    (row,) = plan.scheduled
    assert (row.num_samples, row.group_id, row.samples, row.forced) == (3, 0, True, False)
    assert scheduler.commit(StepResult(1, (out(0, 7, forks=(8, 9)),)), 1) == []
    assert members(scheduler) == {0: [7], 1: [8], 2: [9]}
    plan = scheduler.plan(0)
    assert [(row.seq_id, row.group_id, row.num_samples, list(row.tokens)) for row in plan.scheduled] == [
        (0, 0, 1, [7]),
        (1, 0, 1, [8]),
        (2, 0, 1, [9]),
    ]
    (done,) = scheduler.commit(StepResult(1, (out(0, 1), out(1, 2), out(2, 3))), 1)
    assert outputs_of(done) == [[7, 1], [8, 2], [9, 3]]
    assert_nothing_held(scheduler)


def test_ids_of_members_do_not_depend_on_what_arrives_between() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 5, 2, sampling=SamplingParams(n=3)), make_request("b", 5, 2))
    step(scheduler)
    assert [(seq.request.request_id, seq.seq_id) for seq in scheduler.unfinished()] == [
        ("a", 0),
        ("a", 1),
        ("a", 2),
        ("b", 3),
    ]


def test_best_of_draws_more_than_are_wanted() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 5, None, sampling=SamplingParams(n=1, best_of=3, max_tokens=2)))
    step_with(scheduler, out(0, 7, forks=(8, 9)))
    assert members(scheduler) == {0: [7], 1: [8], 2: [9]}
    _, (done,) = step_with(scheduler, out(0, 1), out(1, 2), out(2, 3))
    assert len(outputs_of(done)) == 3, "which of them is best is for those who know probabilities"


def test_a_prompt_in_chunks_parts_with_its_last_one() -> None:
    scheduler = make_scheduler(limits=make_limits(budget=3))
    add(scheduler, make_request("a", 7, 2, sampling=SamplingParams(n=3)))
    assert [rows(step(scheduler)[0]) for _ in range(4)] == [[("a", 3)], [("a", 3)], [("a", 1)], [("a", 1)] * 3]
    assert_nothing_held(scheduler)


@pytest.mark.parametrize("composition", ALL_COMPOSITIONS)
def test_a_group_is_charged_for_all_its_members_before_they_part(composition: str) -> None:
    scheduler = make_scheduler(composition, limits=make_limits(seqs=4))
    add(scheduler, make_request("a", 3, 2, sampling=SamplingParams(n=3)), make_request("b", 3, 2))
    add(scheduler, make_request("c", 3, 2))
    plan, _ = step(scheduler)
    assert (rows(plan), plan.blocked_by) == ([("a", 3), ("b", 3)], BlockedBy.MAX_NUM_SEQS)
    drain(scheduler)


def test_members_end_one_by_one_and_the_request_with_the_last() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    sampling = SamplingParams(n=3, max_tokens=4, stop_token_ids=(99,))
    add(scheduler, make_request("a", 6, None, sampling=sampling))
    _, finished = step_with(scheduler, out(0, 7, forks=(8, 9)))
    assert (finished, scheduler.num_running) == ([], 3)
    plan, finished = step_with(scheduler, out(0, 17), out(1, 99), out(2, 19))  # 2 copies: blocks 0, and 1 to 3
    assert (finished, scheduler.num_running, scheduler.blocks.num_free_blocks) == ([], 2, 8 - 3)
    plan, finished = step_with(scheduler, out(0, 27), out(2, 29))
    assert (rows(plan), finished) == ([("a", 1)] * 2, [])
    plan, finished = step_with(scheduler, out(0, 99), out(2, 39))  # both end: one by its stop, one by its length
    (done,) = finished
    assert outputs_of(done) == [[8, 99], [7, 17, 27, 99], [9, 19, 29, 39]]
    assert (done.num_output_tokens, list(done.output_token_ids)) == (10, [8, 99])
    assert done.reason is LENGTH, "that of the last to end"
    assert_nothing_held(scheduler)


def test_the_first_member_may_end_first() -> None:
    scheduler = make_scheduler()
    sampling = SamplingParams(n=3, max_tokens=3, stop_token_ids=(99,))
    add(scheduler, make_request("a", 6, None, sampling=sampling))
    step_with(scheduler, out(0, 99, forks=(8, 9)))
    assert members(scheduler) == {1: [8], 2: [9]}
    step_with(scheduler, out(1, 99), out(2, 19))
    assert members(scheduler) == {2: [9, 19]}
    _, (done,) = step_with(scheduler, out(2, 29))
    assert outputs_of(done) == [[99], [8, 99], [9, 19, 29]]
    assert_nothing_held(scheduler)


def test_members_that_end_with_their_first_token() -> None:
    scheduler = make_scheduler(eos_token_id=99)
    add(scheduler, make_request("a", 6, None, sampling=SamplingParams(n=3, max_tokens=5)))
    _, finished = step_with(scheduler, out(0, 99, forks=(99, 99)))
    assert [(item.reason, len(outputs_of(item))) for item in finished] == [(STOP, 3)]
    assert_nothing_held(scheduler)


def test_a_backend_stops_a_member_with_its_first_token() -> None:
    scheduler = make_scheduler(eos_token_id=99)
    add(scheduler, make_request("a", 5, None, sampling=SamplingParams(n=4, max_tokens=3)))
    drawn = Outcome(0, (7,), forks=(8, 9, 99), fork_stops=(STOP, None, None))
    step_with(scheduler, drawn)
    assert members(scheduler) == {0: [7], 2: [9]}
    _, finished = step_with(scheduler, out(0, 5), out(2, 6))
    _, finished = step_with(scheduler, out(0, 5), out(2, 6))
    assert [(list(one.token_ids), one.reason) for one in finished[0].completions] == [
        ([8], STOP), ([99], STOP), ([7, 5, 5], LENGTH), ([9, 6, 6], LENGTH),
    ]  # fmt: skip
    assert_nothing_held(scheduler)


@pytest.mark.parametrize("composition", ALL_COMPOSITIONS)
def test_more_sequences_than_may_run_are_ignored(composition: str) -> None:
    scheduler = make_scheduler(composition, limits=make_limits(seqs=2))
    add(scheduler, make_request("a", 3, 2, sampling=SamplingParams(n=3)), make_request("b", 3, 2))
    by_id = {item.request.request_id: item for item in drain(scheduler)}
    assert by_id["a"].reason is FinishReason.IGNORED
    assert "max_num_seqs" in by_id["a"].message
    assert by_id["b"].reason is LENGTH


# --- beams ---


def test_beams_fork_and_are_dropped_as_the_search_says() -> None:
    scheduler = beams(num_tokens=4, num_blocks=10, block_size=4)
    plan, _ = step_with(scheduler, out(0, 5, forks=(6,)))
    assert plan.has_beams
    assert members(scheduler) == {0: [5], 1: [6]}
    # beam 0 goes on twice, beam 1 is lost. The new one comes after those that are there
    plan, _ = step_with(scheduler, out(0, 7, forks=(8,)), out(1, dropped=True))
    assert members(scheduler) == {0: [5, 7], 2: [5, 8]}
    # beam 2 goes on twice, in new sequences; both that were there end
    _, finished = step_with(scheduler, out(0, dropped=True), out(2, forks=(3, 4), dropped=True))
    assert finished == []
    assert members(scheduler) == {3: [5, 8, 3], 4: [5, 8, 4]}
    _, (done,) = step_with(scheduler, out(3, 1), out(4, 2))
    assert outputs_of(done) == [[5, 8, 3, 1], [5, 8, 4, 2]]
    assert (done.reason, done.num_output_tokens) == (LENGTH, 8)
    assert_nothing_held(scheduler)


def test_beams_copy_what_they_share_and_free_what_they_lose() -> None:
    scheduler = beams(num_tokens=5, num_blocks=10, block_size=4)
    plan, _ = step_with(scheduler, out(0, 5, forks=(6,)))  # 6 tokens: blocks 0 and 1
    assert (plan.copies, scheduler.free_gpu_blocks) == ((), 8)
    plan, _ = step_with(scheduler, out(0, 7, forks=(8,)), out(1, dropped=True))  # position 6: beam 0 copies 1 to 2
    assert (plan.copies, scheduler.free_gpu_blocks) == (((1, 2),), 7)
    assert scheduler.blocks.num_free_blocks == 8, "beam 1 had block 1 for itself"
    plan, _ = step_with(scheduler, out(0, 9), out(2, 10))  # position 7: beams 0 and 2 share block 2; one copies it
    assert (plan.copies, scheduler.free_gpu_blocks) == (((2, 1),), 7)
    plan, _ = step_with(scheduler, out(0, 11), out(2, 12))  # position 8: a block each
    assert (plan.copies, scheduler.free_gpu_blocks) == ((), 5)


def test_a_group_of_beams_is_charged_for_its_width_however_few_are_alive() -> None:
    scheduler = make_scheduler(limits=make_limits(seqs=3))
    add(scheduler, make_request("a", 6, None, sampling=SamplingParams(beam_width=3, max_tokens=9)))
    step_with(scheduler, out(0, 5, forks=(6,)))
    add(scheduler, make_request("b", 6, 1))
    plan, _ = step_with(scheduler, out(0, 7), out(1, 8))
    assert (rows(plan), plan.blocked_by) == ([("a", 1)] * 2, BlockedBy.MAX_NUM_SEQS)


def test_a_beam_that_stops_ends_and_the_others_go_on() -> None:
    scheduler = make_scheduler(eos_token_id=99)
    add(scheduler, make_request("a", 6, None, sampling=SamplingParams(beam_width=2, max_tokens=3)))
    step_with(scheduler, out(0, 5, forks=(6,)))
    _, finished = step_with(scheduler, out(0, 99), out(1, 7, forks=(8,)))
    assert finished == []
    assert members(scheduler) == {1: [6, 7], 2: [6, 8]}
    _, (done,) = step_with(scheduler, out(1, 1), out(2, 2))
    assert outputs_of(done) == [[5, 99], [6, 7, 1], [6, 8, 2]]


# --- abort ---


def waiting() -> Scheduler:
    scheduler = make_scheduler(limits=make_limits(seqs=3))
    add(scheduler, make_request("other", 4, 3), make_request("a", 4, 3, sampling=SamplingParams(n=3)))
    step(scheduler)
    return scheduler


def prefilling() -> Scheduler:
    scheduler = make_scheduler(limits=make_limits(budget=6))
    add(scheduler, make_request("other", 4, 3), make_request("a", 8, 3, sampling=SamplingParams(n=3)))
    step(scheduler)
    return scheduler


def forked() -> Scheduler:
    scheduler = make_scheduler()
    add(scheduler, make_request("other", 4, 3), make_request("a", 6, 3, sampling=SamplingParams(n=3)))
    step(scheduler)
    return scheduler


def copied() -> Scheduler:
    scheduler = forked()
    step(scheduler)
    return scheduler


def swapped() -> Scheduler:
    scheduler = make_scheduler("prefill_first", num_blocks=6, num_cpu_blocks=4)
    add(scheduler, make_request("other", 8, 5), make_request("a", 6, 9, sampling=SamplingParams(n=2)))
    while not scheduler.num_swapped:
        step(scheduler)
    return scheduler


def partly_finished() -> Scheduler:
    scheduler = make_scheduler()
    sampling = SamplingParams(n=3, max_tokens=5, stop_token_ids=(99,))
    add(scheduler, make_request("a", 6, None, sampling=sampling), make_request("other", 4, 5))
    step_with(scheduler, out(0, 7, forks=(8, 9)))
    step_with(scheduler, out(0, 7), out(1, 99), out(2, 9))
    return scheduler


def dissolved() -> Scheduler:
    scheduler = make_scheduler("prefill_first", num_blocks=6, preemption=Recompute())
    add(scheduler, make_request("other", 8, 5), make_request("a", 6, 9, sampling=SamplingParams(n=2)))
    while not scheduler.num_waiting:
        step(scheduler)
    return scheduler


@pytest.mark.parametrize("state", [waiting, prefilling, forked, copied, swapped, partly_finished, dissolved])
def test_an_abort_ends_every_member_and_touches_nobody_else(state: Callable[[], Scheduler]) -> None:
    scheduler = state()
    seqs = [seq for seq in scheduler.unfinished() if seq.request.request_id == "a"]
    outputs = [list(seq.output_token_ids) for seq in seqs]
    ended = [list(seq.output_token_ids) for seq in seqs[0].group.finished]  # type: ignore[union-attr]
    finished = scheduler.abort("a", 0)
    scheduler.check_invariants()
    assert finished is not None
    assert finished.reason is FinishReason.ABORT
    assert outputs_of(finished) == ended + outputs
    assert all(seq.state is SequenceState.FINISHED for seq in seqs)
    assert scheduler.abort("a", 0) is None
    assert [item.request.request_id for item in drain(scheduler)] == ["other"]
    assert_nothing_held(scheduler)
