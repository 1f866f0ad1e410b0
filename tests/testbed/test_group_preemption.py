"""Groups that are preempted: swapped as one, recomputed, or dissolved into sequences."""

from __future__ import annotations

import pytest

from testbed.blocks.config import KVRules
from testbed.core.outcome import FinishReason, StepResult
from testbed.core.plan import BlockedBy, PreemptionMode
from testbed.core.request import SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.core.state import SequenceState
from testbed.policies.compositions.prefill_first import PrefillFirst
from testbed.policies.preemption import Auto, Recompute, Swap
from tests.testbed.core_kit import make_limits, make_request, make_scheduler
from tests.testbed.groups_kit import out, outputs_of
from tests.testbed.stepping import add, assert_nothing_held, commit, drain, preempted, rows, step, step_with, steps


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
    assert (len(outputs_of(done)), done.num_output_tokens) == (2, 10)
    assert_nothing_held(scheduler)


def test_a_swapped_group_shares_again_what_it_shared() -> None:
    scheduler = pressed(Auto())
    seen = []
    for _ in steps(scheduler):
        group = [seq for seq in scheduler.unfinished() if seq.request.request_id == "g"]
        if len(group) == 2 and group[0].state is SequenceState.RUNNING:
            first, second = (seq.block_table for seq in group)
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
    assert outputs_of(done) == [list(done.request.forced_output or ())] * 2
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

        finished += scheduler.commit(StepResult(1, tuple(outcomes)), 1)
        scheduler.check_invariants()
    done = next(item for item in finished if item.request.request_id == "g")
    assert sorted(outputs_of(done)) == [[106, 107, 108, 109, 110], [206, 207, 208, 209, 210]]


def test_a_full_cpu_pool_dissolves_samples() -> None:
    scheduler = pressed(Swap(), num_cpu_blocks=2)
    modes = []
    for plan, _ in steps(scheduler):
        modes += [item.mode for item in plan.preempted]
    assert modes == [PreemptionMode.RECOMPUTE] * 2


def test_a_request_of_which_a_sample_is_rejected_is_not_complete() -> None:
    """Recomputed, one of the two has 6 tokens by then, and no step of 5; the other goes on to its end."""
    scheduler = make_scheduler(
        PrefillFirst(ignores_oversize_resumed=True), num_blocks=6, block_size=2, caching=False, preemption=Recompute(),
        limits=make_limits(budget=5),
    )  # fmt: skip
    add(scheduler, make_request("a", 5, 3))
    add(scheduler, make_request("g", 4, 6, sampling=SamplingParams(n=2)))
    _, group = drain(scheduler)
    assert [(len(one.token_ids), one.reason) for one in group.completions] == [
        (2, FinishReason.IGNORED),
        (6, FinishReason.LENGTH),
    ]
    assert (group.reason, group.num_output_tokens) == (FinishReason.IGNORED, 8)
    assert group.message.startswith("6 tokens to prefill exceed max_num_batched_tokens (5)")
    assert_nothing_held(scheduler)


def run_beams(scheduler: Scheduler) -> list[tuple[str, FinishReason, str]]:
    finished = []
    for _ in range(4):
        plan = scheduler.plan(0)
        drawn = [row for row in plan.scheduled if row.samples and not row.forced]
        outcomes = tuple(out(row.seq_id, 1, forks=(2,) * (row.num_samples - 1)) for row in drawn)

        scheduler.check_invariants()
        finished += scheduler.commit(StepResult(1, outcomes), 1)
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
    assert outputs_of(done) == [[5, 7], [6, 8]]
    assert_nothing_held(scheduler)


def test_a_prefill_that_was_to_end_with_a_step_in_flight_is_unfinished_again_when_it_is_swapped_out() -> None:
    scheduler = make_scheduler(num_blocks=5, num_cpu_blocks=8, limits=make_limits(budget=8, plans=2), preemption=Swap())
    add(scheduler, make_request("a", 2, 12))
    scheduler.plan(0)
    add(scheduler, make_request("b", 13, 2, sampling=SamplingParams(temperature=1.0, n=2)))
    plans = []
    while scheduler.has_work:
        plans.append(scheduler.plan(0))
        commit(scheduler)
    assert [rows(plan) for plan in plans[:3]] == [[("a", 1), ("b", 7)], [("a", 1), ("b", 6)], [("a", 1)]]
    assert preempted(plans[2]) == ["b"]
    assert [dict(rows(plan))["b"] for plan in plans[3:] if "b" in dict(rows(plan))] == [6, 1]
