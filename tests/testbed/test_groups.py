"""Requests of several sequences: they part at the prompt's end, are scheduled together, and end one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from testbed.blocks.config import KVRules
from testbed.plan import BlockedBy, FinishReason, Outcome, PreemptionMode, StepResult
from testbed.policies.preemption import Auto, Recompute, Swap
from testbed.request import SamplingParams
from testbed.scheduler import Scheduler
from testbed.sequence import SequenceState
from tests.testbed.core_kit import (
    ALL_COMPOSITIONS,
    add,
    drain,
    make_limits,
    make_request,
    make_scheduler,
    rows,
    step,
    step_with,
)

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def out(seq_id: int, *tokens: int, forks: tuple[int, ...] = (), dropped: bool = False) -> Outcome:
    return Outcome(seq_id, tokens, None, forks, dropped)


def members(scheduler: Scheduler) -> dict[int, list[int]]:
    """Output tokens by sequence id."""
    return {seq.seq_id: list(seq.output_token_ids) for seq in scheduler.unfinished()}


def assert_nothing_held(scheduler: Scheduler) -> None:
    assert not scheduler.has_work
    assert scheduler.num_running == scheduler.num_waiting == scheduler.num_swapped == 0
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_gpu_blocks
    assert scheduler.blocks.num_free_cpu_blocks == scheduler.blocks.num_cpu_blocks
    assert not scheduler.blocks._tables
    assert not scheduler.blocks._prefixes._chains
    scheduler.check_invariants()


# --- parallel samples ---


@pytest.mark.parametrize("composition", ALL_COMPOSITIONS)
def test_a_forced_output_is_emitted_by_every_member(composition: str) -> None:
    scheduler = make_scheduler(composition)
    add(scheduler, make_request("a", 5, [11, 12, 13], sampling=SamplingParams(n=3)))
    seen = []
    while scheduler.has_work:
        plan, finished = step(scheduler)
        seen.append((rows(plan), plan.shape.num_samples, scheduler.emitted, scheduler.num_running))
    three = [("a", 1)] * 3
    assert seen == [
        ([("a", 5)], 1, ["a"] * 3, 3),  # one row, of which three sequences part
        (three, 3, ["a"] * 3, 3),
        (three, 3, ["a"] * 3, 0),
    ]
    (done,) = finished
    assert [list(output) for output in done.outputs] == [[11, 12, 13]] * 3
    assert (done.reason, done.num_output_tokens, list(done.output_token_ids)) == (LENGTH, 9, [11, 12, 13])
    assert_nothing_held(scheduler)


@pytest.mark.parametrize("composition", ALL_COMPOSITIONS)
def test_members_part_with_the_first_tokens_that_were_drawn(composition: str) -> None:
    scheduler = make_scheduler(composition)
    add(scheduler, make_request("a", 5, None, sampling=SamplingParams(n=3, max_tokens=2)))
    plan = scheduler.plan(0)
    (row,) = plan.scheduled
    assert (row.num_samples, row.group_id, row.samples, row.forced) == (3, 0, True, False)
    assert scheduler.commit(StepResult((1,), (out(0, 7, forks=(8, 9)),)), 1) == []
    assert members(scheduler) == {0: [7], 1: [8], 2: [9]}
    plan = scheduler.plan(0)
    assert [(row.seq_id, row.group_id, row.num_samples, list(row.tokens)) for row in plan.scheduled] == [
        (0, 0, 1, [7]),
        (1, 0, 1, [8]),
        (2, 0, 1, [9]),
    ]
    (done,) = scheduler.commit(StepResult((1,), (out(0, 1), out(1, 2), out(2, 3))), 1)
    assert [list(output) for output in done.outputs] == [[7, 1], [8, 2], [9, 3]]
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
    assert len(done.outputs) == 3, "which of them is best is for those who know probabilities"


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
    assert [list(output) for output in done.outputs] == [[8, 99], [7, 17, 27, 99], [9, 19, 29, 39]]
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
    assert [list(output) for output in done.outputs] == [[99], [8, 99], [9, 19, 29]]
    assert_nothing_held(scheduler)


def test_members_that_end_with_their_first_token() -> None:
    scheduler = make_scheduler(eos_token_id=99)
    add(scheduler, make_request("a", 6, None, sampling=SamplingParams(n=3, max_tokens=5)))
    _, finished = step_with(scheduler, out(0, 99, forks=(99, 99)))
    assert [(item.reason, len(item.outputs)) for item in finished] == [(STOP, 3)]
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


def beams(width: int = 2, num_tokens: int = 3, **options: object) -> Scheduler:
    scheduler = make_scheduler(**options)  # type: ignore[arg-type]
    add(scheduler, make_request("a", 6, None, sampling=SamplingParams(beam_width=width, max_tokens=num_tokens)))
    return scheduler


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
    assert [list(output) for output in done.outputs] == [[5, 8, 3, 1], [5, 8, 4, 2]]
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
    assert [list(output) for output in done.outputs] == [[5, 99], [6, 7, 1], [6, 8, 2]]


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


def parted() -> Scheduler:
    scheduler = make_scheduler()
    add(scheduler, make_request("other", 4, 3), make_request("a", 6, 3, sampling=SamplingParams(n=3)))
    step(scheduler)
    return scheduler


def copied() -> Scheduler:
    scheduler = parted()
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


@pytest.mark.parametrize("state", [waiting, prefilling, parted, copied, swapped, partly_finished, dissolved])
def test_an_abort_ends_every_member_and_touches_nobody_else(state: Callable[[], Scheduler]) -> None:
    scheduler = state()
    seqs = [seq for seq in scheduler.unfinished() if seq.request.request_id == "a"]
    outputs = [list(seq.output_token_ids) for seq in seqs]
    ended = [list(seq.output_token_ids) for seq in seqs[0].group.finished]  # type: ignore[union-attr]
    finished = scheduler.abort("a")
    scheduler.check_invariants()
    assert finished is not None
    assert finished.reason is FinishReason.ABORT
    assert [list(output) for output in finished.outputs] == ended + outputs
    assert all(seq.state is SequenceState.FINISHED for seq in seqs)
    assert scheduler.abort("a") is None
    assert [item.request.request_id for item in drain(scheduler)] == ["other"]
    assert_nothing_held(scheduler)


# --- preemption ---


def pressed(preemption: Auto | Recompute | Swap, num_cpu_blocks: int = 8, **sampling: int) -> Scheduler:
    """A pool of 6 blocks of 4. `a` needs its third block at position 8, so do the group's two sequences.

    step   a computes   blocks of a   group computes   blocks of the group   free
      1      0 to 7          2            0 to 5               2               2
      2         8            3               6                 3 (a copy)      0
      3         9            3               7                 3               0
      4        10            3               8      2 wanted, none free: the group, admitted last, goes
    """
    scheduler = make_scheduler(
        "prefill_first", num_blocks=6, block_size=4, num_cpu_blocks=num_cpu_blocks, caching=False, preemption=preemption
    )
    add(scheduler, make_request("a", 8, 5))
    add(scheduler, make_request("g", 6, 5 if not sampling else None, sampling=SamplingParams(**sampling or {"n": 2})))  # type: ignore[arg-type]
    return scheduler


def test_a_group_is_swapped_as_one_and_its_shared_blocks_move_once() -> None:
    scheduler = pressed(Auto())
    for free in (2, 0, 0):
        plan, _ = step(scheduler)
        assert (plan.preempted, scheduler.free_gpu_blocks) == ((), free)
    plan, _ = step(scheduler)
    assert [(item.seq_id, item.mode, item.num_computed_tokens) for item in plan.preempted] == [
        (1, PreemptionMode.SWAP, 8),
        (2, PreemptionMode.SWAP, 8),
    ]
    assert rows(plan) == [("a", 1)]
    assert len(plan.swap_out) == plan.shape.num_blocks_swapped_out == 3, "the prompt's block, its last and the copy"
    assert len({source for source, _ in plan.swap_out}) == len({target for _, target in plan.swap_out}) == 3
    assert (scheduler.free_gpu_blocks, scheduler.free_cpu_blocks, scheduler.num_swapped) == (3, 5, 1)
    plan, finished = step(scheduler)  # a's last; 3 blocks and one to grow for each are 5, and 3 are free
    assert (rows(plan), plan.swap_in, [item.request.request_id for item in finished]) == ([("a", 1)], (), ["a"])
    plan, _ = step(scheduler)
    assert (rows(plan), plan.swapped_in) == ([("g", 1)] * 2, ("g",))
    assert {source for source, _ in plan.swap_in} == {0, 1, 2}
    assert (len(plan.swap_in), scheduler.free_gpu_blocks, scheduler.free_cpu_blocks) == (3, 1, 8)
    _, (done,) = step(scheduler)
    assert (len(done.outputs), done.num_output_tokens) == (2, 10)
    assert_nothing_held(scheduler)


def test_a_swapped_group_shares_again_what_it_shared() -> None:
    scheduler = pressed(Auto())
    seen = []
    while scheduler.has_work:
        step(scheduler)
        group = [seq for seq in scheduler.unfinished() if seq.request.request_id == "g"]
        if len(group) == 2 and group[0].state is SequenceState.RUNNING:
            first, second = (scheduler.blocks.table(seq.seq_id) for seq in group)
            seen.append([one == other for one, other in zip(first, second, strict=True)])
    # before: the last block is shared until it is written to; after it: a third block each
    assert seen == [[True, True], [True, False], [True, False], [True, False, False]]


def test_recompute_dissolves_parted_samples_into_sequences_that_all_finish() -> None:
    scheduler = pressed(Recompute())
    for _ in range(3):
        step(scheduler)
    plan, _ = step(scheduler)
    assert [(item.seq_id, item.mode) for item in plan.preempted] == [
        (2, PreemptionMode.RECOMPUTE),
        (1, PreemptionMode.RECOMPUTE),
    ]
    assert scheduler.num_waiting == 2
    # 9 tokens known are 3 blocks: the 3 that are free take one of the two, the first
    plan, _ = step(scheduler)
    assert (rows(plan), [item.seq_id for item in plan.admitted]) == ([("g", 9)], [1])
    assert plan.admitted[0].is_resumed
    assert plan.blocked_by is BlockedBy.KV_BLOCKS
    plan, finished = step(scheduler)  # a and g's first sequence end
    assert rows(plan) == [("a", 1), ("g", 1)]
    assert [item.request.request_id for item in finished] == ["a"]
    assert rows(step(scheduler)[0]) == [("g", 9)]
    plan, (done,) = step(scheduler)
    assert rows(plan) == [("g", 1)]
    assert [list(output) for output in done.outputs] == [list(done.request.forced_output or ())] * 2
    assert_nothing_held(scheduler)


def test_drawn_samples_that_were_dissolved_keep_what_they_drew() -> None:
    scheduler = pressed(Recompute(), n=2, max_tokens=5)
    finished = []
    while scheduler.has_work:
        plan = scheduler.plan(0)
        drawn = [row for row in plan.scheduled if row.samples and not row.forced]
        outcomes = [
            out(row.seq_id, 100 * row.seq_id + row.start + row.num_tokens, forks=(206,) * (row.num_samples - 1))
            for row in drawn
        ]

        finished += scheduler.commit(StepResult((1,), tuple(outcomes)), 1)
        scheduler.check_invariants()
    done = next(item for item in finished if item.request.request_id == "g")
    assert sorted(map(list, done.outputs)) == [[106, 107, 108, 109, 110], [206, 207, 208, 209, 210]]


def test_a_full_cpu_pool_dissolves_samples() -> None:
    scheduler = pressed(Swap(), num_cpu_blocks=2)
    modes = []
    while scheduler.has_work:
        plan, _ = step(scheduler)
        modes += [item.mode for item in plan.preempted]
    assert modes == [PreemptionMode.RECOMPUTE] * 2


def run_beams(scheduler: Scheduler) -> list[tuple[str, FinishReason, str]]:
    finished = []
    for _ in range(4):
        plan = scheduler.plan(0)
        drawn = [row for row in plan.scheduled if row.samples and not row.forced]
        outcomes = tuple(out(row.seq_id, 1, forks=(2,) * (row.num_samples - 1)) for row in drawn)

        scheduler.check_invariants()
        finished += scheduler.commit(StepResult((1,), outcomes), 1)
        scheduler.check_invariants()
    return [(item.request.request_id, item.reason, item.message) for item in finished]


@pytest.mark.parametrize("preemption", [Auto(), Recompute(), Swap()], ids=["auto", "recompute", "swap"])
def test_beams_without_room_on_the_cpu_end_as_ignored(preemption: Auto | Recompute | Swap) -> None:
    scheduler = pressed(preemption, num_cpu_blocks=2, beam_width=2, max_tokens=9)
    ((request_id, reason, message),) = run_beams(scheduler)
    assert (request_id, reason) == ("g", FinishReason.IGNORED)
    assert "2 beams were preempted, which cannot be recomputed" in message
    assert "CPU pool of 2 blocks" in message
    assert "raise cache.num_cpu_blocks" in message
    assert [item.request.request_id for item in drain(scheduler)] == ["a"]
    assert_nothing_held(scheduler)


def test_beams_are_swapped_even_where_recompute_is_wished() -> None:
    scheduler = pressed(Recompute(), beam_width=2, max_tokens=9)
    assert run_beams(scheduler) == []
    assert scheduler.num_swapped == 1


def test_beams_that_have_not_parted_are_recomputed() -> None:
    """2 blocks each after the second step; position 4 of a takes one of g's."""
    rules = KVRules(allocate="chunk")
    limits = make_limits(budget=4)
    scheduler = make_scheduler("unified", num_blocks=4, block_size=2, caching=False, limits=limits, rules=rules)
    add(scheduler, make_request("a", 3, 4))
    add(scheduler, make_request("g", 5, None, sampling=SamplingParams(beam_width=2, max_tokens=2)))
    assert [rows(step(scheduler)[0]) for _ in range(2)] == [[("a", 3), ("g", 1)], [("a", 1), ("g", 3)]]
    plan, _ = step(scheduler)
    assert [(item.request_id, item.mode, item.num_computed_tokens) for item in plan.preempted] == [
        ("g", PreemptionMode.RECOMPUTE, 4)
    ]
    assert [rows(step(scheduler)[0]) for _ in range(2)] == [[("a", 1)], [("g", 4)]]
    step_with(scheduler, out(1, 5, forks=(6,)))
    _, (done,) = step_with(scheduler, out(1, 7), out(2, 8))
    assert [list(output) for output in done.outputs] == [[5, 7], [6, 8]]
    assert_nothing_held(scheduler)
