"""A sequence that runs alone and finds no room to go on: it goes back to the queue, and ends where that is hopeless."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from testbed.blocks.config import KVRules
from testbed.core.outcome import StepResult
from testbed.core.running import Running
from testbed.core.scheduler import Scheduler
from testbed.core.sequence import Sequence
from testbed.policies.orders.keyed import lcfs
from tests.testbed.core_kit import make_blocks, make_limits, make_request, make_scheduler

RULES = KVRules(allocate="whole", growth_test="one_per_sequence")  # a chunk wants a free block, needed or not


def make_lone() -> Scheduler:
    """`a` has 7 tokens: both blocks of the pool, and none is free when it wants to go on after 4."""
    lone = make_scheduler(
        "decode_first",
        blocks=make_blocks(num_blocks=2, caching=False, rules=RULES),
        limits=make_limits(budget=4),
        queue=lcfs(),
    )
    lone.add(make_request("a", 7))
    return lone


def step(scheduler: Scheduler) -> str:
    """What happened in it."""
    plan = scheduler.plan(0)
    finished = scheduler.commit(StepResult(1), 1)
    scheduler.check_invariants()
    said = [
        *(f"{one.request_id} preempted" for one in plan.preempted),
        *(f"{name} runs" for name, _ in plan.num_scheduled),
    ]
    return ", ".join([*said, *(f"{one.request.request_id} {one.reason}" for one in finished)])


def test_the_third_time_at_the_same_place_it_ends() -> None:
    lone = make_lone()
    assert [step(lone) for _ in range(6)] == ["a runs", "a preempted"] * 2 + ["a runs", "a ignored"]
    assert not lone.has_work


def got_a_token(lone: Scheduler) -> None:
    lone.add(make_request("b", 1))


def was_aborted(lone: Scheduler) -> None:
    lone.add(make_request("b", 1))
    lone.abort("b", 1)


def was_ignored(lone: Scheduler) -> None:
    lone.add(make_request("b", 90))  # never fits


@pytest.mark.parametrize("other", [got_a_token, was_aborted, was_ignored])
def test_the_count_begins_anew_when_somebody_gets_on(other: Callable[[Scheduler], None]) -> None:
    lone = make_lone()
    for _ in range(4):
        step(lone)
    other(lone)
    said = []
    while lone.has_work:
        said.append(step(lone))
    of_a = [words.partition(",")[0] for words in said if words.startswith("a ")]
    assert of_a == ["a runs", "a preempted"] * 2 + ["a runs", "a ignored"]


def test_another_place_is_another_count() -> None:
    running, seq = Running(), Sequence(0, make_request("a", 7), 64)
    found = []
    for num_computed in (1, 2, 1, 2, 3, 1):
        seq.num_computed_tokens = num_computed
        found.append(running.finds_no_room(seq))
    assert found == [False] * 5 + [True]
