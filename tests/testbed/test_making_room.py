"""A queue order may say that a running sequence yields to the head of the queue."""

from __future__ import annotations

import pytest

from testbed.core.interfaces import WaitingQueue
from testbed.core.outcome import StepResult
from testbed.core.plan import BlockedBy, PreemptionMode
from testbed.core.scheduler import Scheduler
from testbed.policies import orders
from testbed.policies.context import PolicyContext, bind
from testbed.policies.oracle import Perfect
from testbed.policies.preemption import Swap
from testbed.policies.victim import LowestPriority
from tests.testbed.core_kit import make_blocks, make_limits, make_request, make_scheduler
from tests.testbed.stepping import add, drain, preempted, rows, step

MIXED = ["unified", "decode_first", "prefill_first", "iteration_level"]


def by_priority(composition: str, *, preemptive: bool = True, **options: object) -> Scheduler:
    options.setdefault("caching", False)
    return make_scheduler(
        composition, queue=orders.priority(preemptive=preemptive), victims=LowestPriority(), **options  # type: ignore[arg-type]
    )  # fmt: skip


def ends(scheduler: Scheduler) -> list[str]:
    return [item.request.request_id for item in drain(scheduler)]


@pytest.mark.parametrize("composition", MIXED)
def test_a_more_urgent_request_takes_a_running_ones_place_in_the_same_step(composition: str) -> None:
    scheduler = by_priority(composition, limits=make_limits(seqs=1))
    add(scheduler, make_request("a", 4, 4, priority=5))
    step(scheduler)
    add(scheduler, make_request("b", 3, 2, priority=1))
    plan, _ = step(scheduler)  # a, if it was scheduled, gives its share back
    assert (preempted(plan), rows(plan)) == (["a"], [("b", 3)])
    assert [(item.mode, item.num_computed_tokens) for item in plan.preempted] == [(PreemptionMode.RECOMPUTE, 4)]
    plan, finished = step(scheduler)
    assert (rows(plan), plan.blocked_by) == ([("b", 1)], BlockedBy.MAX_NUM_SEQS)
    assert [item.request.request_id for item in finished] == ["b"]
    plan, _ = step(scheduler)
    assert (rows(plan), plan.admitted[0].is_resumed) == ([("a", 5)], True)  # its 4 and the one that it emitted
    assert ends(scheduler) == ["a"]


@pytest.mark.parametrize("composition", MIXED)
@pytest.mark.parametrize(("priority", "preemptive"), [(5, True), (6, True), (1, False)])
def test_nobody_yields_to_an_equal_or_a_lesser_one_or_where_the_order_is_not_preemptive(
    composition: str, priority: int, preemptive: bool
) -> None:
    scheduler = by_priority(composition, preemptive=preemptive, limits=make_limits(seqs=1))
    add(scheduler, make_request("a", 4, 4, priority=5))
    step(scheduler)
    add(scheduler, make_request("b", 3, 2, priority=priority))
    plan, _ = step(scheduler)
    assert (preempted(plan), rows(plan), plan.blocked_by) == ([], [("a", 1)], BlockedBy.MAX_NUM_SEQS)
    assert ends(scheduler) == ["a", "b"]


@pytest.mark.parametrize("composition", MIXED)
def test_the_least_urgent_one_yields_its_blocks(composition: str) -> None:
    """6 blocks of 4: a has 3 and c 2; b needs 3. Of the two the least urgent one goes, and that is enough."""
    scheduler = by_priority(composition, num_blocks=6, block_size=4)
    add(scheduler, make_request("a", 9, 3, priority=7), make_request("c", 5, 3, priority=4))
    step(scheduler)
    add(scheduler, make_request("b", 9, 2, priority=1))
    plan, _ = step(scheduler)
    assert preempted(plan) == ["a"]
    assert ("b", 9) in rows(plan)
    assert ("a", 1) not in rows(plan)
    assert sorted(ends(scheduler)) == ["a", "b", "c"]


@pytest.mark.parametrize("composition", MIXED)
def test_who_takes_several_places_takes_those_of_the_least_urgent(composition: str) -> None:
    """6 blocks of 4, 2 each: b wants 4, so that two go, and the third goes on."""
    scheduler = by_priority(composition, num_blocks=6, block_size=4)
    add(scheduler, *(make_request(name, 5, 3, priority=p) for name, p in (("x", 7), ("y", 9), ("z", 8))))
    step(scheduler)
    add(scheduler, make_request("b", 13, 1, priority=1))
    plan, _ = step(scheduler)
    assert preempted(plan) == ["y", "z"]
    assert ("b", 13) in rows(plan)
    assert sorted(ends(scheduler)) == ["x", "y", "z"]


@pytest.mark.parametrize("composition", MIXED)
def test_shortest_remaining_time_takes_the_place_of_a_long_job(composition: str) -> None:
    blocks, limits = make_blocks(caching=False), make_limits(seqs=1)
    queue: WaitingQueue = orders.shortest_remaining(preemptive=True)
    context = PolicyContext(blocks, limits, Perfect(), None, 0)
    for policy in (context.oracle, queue):
        bind(policy, context)
    scheduler = make_scheduler(composition, blocks=blocks, limits=limits, queue=queue)
    add(scheduler, make_request("long", 4, 20))
    for _ in range(3):
        step(scheduler)  # 17 tokens to emit, and one known one to compute
    add(scheduler, make_request("same", 8, 10))  # 8 + 10 = 18: not less
    assert preempted(step(scheduler)[0]) == []
    add(scheduler, make_request("short", 3, 4))  # 7
    plan, _ = step(scheduler)
    assert (preempted(plan), rows(plan)) == (["long"], [("short", 3)])
    # the long one has 20 - 4 tokens to emit and 8 known ones to compute again: 24, more than 18
    assert ends(scheduler) == ["short", "same", "long"]


@pytest.mark.parametrize("composition", ["prefill_first", "decode_first", "unified", "iteration_level"])
def test_a_place_that_is_made_by_swap_is_taken_too(composition: str) -> None:
    scheduler = by_priority(composition, limits=make_limits(seqs=1), num_cpu_blocks=9, preemption=Swap())
    add(scheduler, make_request("a", 4, 9, priority=5))
    step(scheduler)
    add(scheduler, make_request("b", 3, 2, priority=1))
    plan, _ = step(scheduler)
    assert [item.mode for item in plan.preempted] == [PreemptionMode.SWAP]
    assert rows(plan) == [("b", 3)]
    assert ends(scheduler) == ["b", "a"]


def test_who_ends_with_what_is_in_flight_makes_no_room() -> None:
    """Of a its last token is on its way when b comes: b waits for it, instead of taking a place that is free anyway."""
    scheduler = by_priority("unified", limits=make_limits(seqs=1, plans=2))
    add(scheduler, make_request("a", 4, 1, priority=5))
    scheduler.plan(1)
    add(scheduler, make_request("b", 3, 1, priority=1))
    assert scheduler.plan(2).is_empty
    assert [item.request.request_id for item in scheduler.commit(StepResult(3), 3)] == ["a"]
    plan = scheduler.plan(4)
    assert (rows(plan), preempted(plan)) == ([("b", 3)], [])
