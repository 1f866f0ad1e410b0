"""Steps a core that was built by hand, and reads its plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from testbed.core.outcome import Finished, Outcome, StepResult
from testbed.core.plan import BatchPlan
from testbed.core.request import Request
from testbed.core.scheduler import Scheduler


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)


def scheduled(plan: BatchPlan) -> dict[str, int]:
    """Tokens by request id, in the order scheduled."""
    return dict(plan.num_scheduled)


def rows(plan: BatchPlan) -> list[tuple[str, int]]:
    """(request id, tokens) of each row, in the order scheduled: a group's sequences have a row each."""
    return plan.num_scheduled


def preempted(plan: BatchPlan) -> list[str]:
    return [item.request_id for item in plan.preempted]


def ignored(plan: BatchPlan) -> list[str]:
    return [item.request_id for item in plan.ignored]


def cached(plan: BatchPlan) -> dict[str, int]:
    """Prefix tokens found, of those admitted."""
    return {item.request_id: item.num_cached_tokens for item in plan.admitted}


def commit(scheduler: Scheduler, tokens: dict[int, int] | None = None) -> list[Finished]:
    """Commits the plan in flight; `tokens` are those sampled, by seq_id, for rows that are not forced."""
    outcomes = None if tokens is None else tuple(Outcome(seq_id, (token,)) for seq_id, token in tokens.items())
    scheduler.check_invariants()
    finished = scheduler.commit(StepResult(1, outcomes), 1)
    scheduler.check_invariants()
    return finished


def step_with(scheduler: Scheduler, *outcomes: Outcome) -> tuple[BatchPlan, list[Finished]]:
    """A step of which these outcomes come, one for each row that is not forced, in the order scheduled."""
    plan = scheduler.plan(0)
    scheduler.check_invariants()
    finished = scheduler.commit(StepResult(1, outcomes), 1)
    scheduler.check_invariants()
    return plan, finished


def step(scheduler: Scheduler, tokens: dict[int, int] | None = None) -> tuple[BatchPlan, list[Finished]]:
    plan = scheduler.plan(0)
    return plan, commit(scheduler, tokens)


def steps(scheduler: Scheduler) -> Iterator[tuple[BatchPlan, list[Finished]]]:
    """Each step until nothing is left: its plan, to be looked at before the next one, and what ended with it."""
    while scheduler.has_work:
        yield step(scheduler)


def assert_nothing_held(scheduler: Scheduler) -> None:
    assert not scheduler.has_work
    assert scheduler.unfinished() == []
    assert scheduler.num_running == scheduler.num_waiting == scheduler.num_swapped == 0
    assert scheduler.plan(0).is_empty
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_gpu_blocks
    assert scheduler.blocks.num_free_cpu_blocks == scheduler.blocks.num_cpu_blocks
    scheduler.check_invariants()


def drain(scheduler: Scheduler, max_steps: int = 10_000) -> list[Finished]:
    """Steps until nothing is left; every request must be forced."""
    finished: list[Finished] = []
    for _ in range(max_steps):
        if not scheduler.has_work:
            return finished
        plan = scheduler.plan(0)
        assert not plan.is_empty, "nothing can be scheduled"
        finished += commit(scheduler)
    raise AssertionError(f"work is left after {max_steps} steps")


@contextmanager
def in_flight(scheduler: Scheduler) -> Iterator[BatchPlan]:
    """A plan whose rows may be looked at; committed on leaving."""
    yield scheduler.plan(0)
    commit(scheduler)
