"""What queue orders are told of service: the same with plans ahead, in groups, after preemptions and aborts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import testbed.policies.orders as orders
from testbed.core.outcome import StepResult
from testbed.core.sampling import SamplingParams
from testbed.core.scheduler import Scheduler
from tests.testbed.core_kit import make_limits, make_request, make_scheduler

# prompt, output and number of sequences of each request
SIZES = st.lists(st.tuples(st.integers(1, 24), st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=8)


def tight(queue: Any, num_plans: int, budget: int) -> Scheduler:
    """Of a pool that holds the largest request, but not two of them: somebody is preempted."""
    limits = make_limits(seqs=6, budget=budget, plans=num_plans)
    return make_scheduler(queue=queue, limits=limits, num_blocks=28, num_cpu_blocks=0, caching=False)


def played(scheduler: Scheduler, num_plans: int, aborts: dict[int, str]) -> None:
    """Steps until nothing is left, `num_plans` in flight; aborts: request ids by the instant at which they go."""
    now_ns = in_flight = 0
    while scheduler.has_work or in_flight:
        now_ns += 1
        if now_ns in aborts:
            scheduler.abort(aborts[now_ns], now_ns)
        is_empty = scheduler.plan(now_ns).is_empty
        in_flight += not is_empty
        if in_flight == num_plans or (is_empty and in_flight):
            scheduler.commit(StepResult(now_ns), now_ns)
            in_flight -= 1
        scheduler.check_invariants()


@given(sizes=SIZES, num_plans=st.integers(1, 2), budget=st.integers(6, 40))
def test_a_tenant_is_charged_for_each_prompt_once_and_for_each_token(
    sizes: list[tuple[int, int, int]], num_plans: int, budget: int
) -> None:
    queue = orders.VirtualTokenCounter()
    scheduler = tight(queue, num_plans, budget)
    for index, (prompt, output, n) in enumerate(sizes):
        sampling = SamplingParams(max_tokens=output, n=n)
        scheduler.add(make_request(f"r{index}", prompt, output, tenant="t", sampling=sampling))
    played(scheduler, num_plans, {})
    assert queue.counter("t") == sum(prompt + 2 * n * output for prompt, output, n in sizes)


@pytest.mark.parametrize("order", [orders.VirtualTokenCounter, orders.MultiLevelFeedbackQueue])
@given(sizes=SIZES, num_plans=st.integers(1, 2), budget=st.integers(6, 40), data=st.data())
def test_nothing_is_kept_of_requests_that_have_ended(
    order: Any, sizes: list[tuple[int, int, int]], num_plans: int, budget: int, data: st.DataObject
) -> None:
    queue = order()
    scheduler = tight(queue, num_plans, budget)
    for index, (prompt, output, n) in enumerate(sizes):
        scheduler.add(make_request(f"r{index}", prompt, output, sampling=SamplingParams(max_tokens=output, n=n)))
    ids = st.sampled_from([f"r{index}" for index in range(len(sizes))])
    played(scheduler, num_plans, data.draw(st.dictionaries(st.integers(1, 30), ids)))
    by_request = ("_levels", "_used", "_served_ns", "_advanced")
    assert not any(getattr(queue, name, None) for name in by_request)
    assert not queue._meter._reached
    assert len(queue) == 0


def test_a_tenant_is_not_charged_for_a_prompt_that_a_step_passes_over() -> None:
    queue, limits = orders.VirtualTokenCounter(), make_limits(threshold=4, partial=3)  # one of them longer than 4
    scheduler = make_scheduler("decode_first", queue=queue, limits=limits)
    for name, prompt in (("b0", 8), ("a0", 20), ("a1", 3), ("b1", 3)):
        scheduler.add(make_request(name, prompt, 9, tenant=name[0]))
    plan = scheduler.plan(0)
    assert [admission.request_id for admission in plan.admitted] == ["b0", "a1", "b1"], "a is at 0 as a0 is passed over"
    assert (queue.counter("a"), queue.counter("b"), scheduler.num_waiting) == (3, 11, 1)
