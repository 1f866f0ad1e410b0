"""The seams: what the core asks of its neighbours. Protocols only; implementations live with their owners."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from testbed.core.plan import BatchPlan, Finished, Outcome, Spans, StepResult
from testbed.core.request import Request
from testbed.core.sequence import Sequence


class Arrive(NamedTuple):
    request: Request


class Abort(NamedTuple):
    request_id: str


Event = Arrive | Abort


class Inbox(Protocol):
    """Where requests come from: a trace, sessions, a router, a live caller. Pulled at step boundaries, never pushed."""

    @property
    def is_open(self) -> bool:
        """Whether events may still come that `next_ns` does not know of (a live caller, another replica)."""
        ...

    def due(self, now_ns: int) -> list[Event]:
        """Removes and returns the events at or before `now_ns`, in order of instant, then of arrival."""
        ...

    def next_ns(self) -> int | None:
        """The instant of the next known event; None if none is known. May change after every commit."""
        ...

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        """Tells closed loops which requests ended."""
        ...


class WaitUntil(NamedTuple):
    """Nothing to do before `until_ns`; None means until the inbox wakes the loop.

    After each commit the loop of an open inbox waits until that very instant: events of others may come with it.
    is_stuck: it goes round in circles, as far as it can tell; only an event would change that.
    """

    until_ns: int | None
    is_stuck: bool = False


class Execute(NamedTuple):
    """Run the plan. One of several steps ends early, at the first boundary at or after `wake_ns` (the next known event;
    None: there is none) and at or after any wake that the driver learns of meanwhile."""

    plan: BatchPlan
    wake_ns: int | None = None


class Resume(NamedTuple):
    """The driver's answer to a command: the time, and the result if it executed a plan."""

    now_ns: int
    result: StepResult | None = None


class Work(Protocol):
    """A plan that a backend has started. What more it offers is between a backend and its driver."""


class Backend(Protocol):
    """Executes plans. The simulator prices them, the real engine launches them."""

    def start(self, plan: BatchPlan) -> Work: ...


class Estimator(Protocol):
    """Prices for policies inside the core, in integer ns: the same object in both modes, named in the manifest."""

    @property
    def name(self) -> str: ...

    def recompute_ns(self, start: int, num_tokens: int) -> int:
        """Time to compute `num_tokens` tokens of one sequence from position `start`, in a batch of its own."""
        ...

    def swap_ns(self, num_blocks: int) -> int:
        """Time to move this many KV blocks across the link, one way."""
        ...


class Recorder(Protocol):
    """Sees everything that happens in the loop, and changes nothing."""

    def arrived(self, request: Request, now_ns: int, step: int) -> None: ...
    def aborted(self, request_id: str, now_ns: int, step: int) -> None: ...
    def committed(self, step: StepView) -> None: ...
    def ended(self, finished: list[Finished], now_ns: int) -> None: ...


class StepView:
    """What a recorder is shown of a committed step: decisions from the plan, state after the plan, result after it."""

    def __init__(
        self,
        plan: BatchPlan,
        plan_ns: int,
        end_ns: int,
        spans: Spans,
        digest: int,
        emitters: list[Sequence],
        num_running: int,
        num_waiting: int,
        num_swapped: int,
        free_gpu_blocks: int,
        free_cpu_blocks: int,
        outcomes: tuple[Outcome, ...] | None = None,
    ) -> None:
        self.plan = plan
        self.plan_ns = plan_ns
        self.end_ns = end_ns
        self.spans = spans
        self.digest = digest
        self.emitters = emitters  # one for each token
        self.num_running = num_running
        self.num_waiting = num_waiting
        self.num_swapped = num_swapped
        self.free_gpu_blocks = free_gpu_blocks  # after the plan, before its commit; evictable ones count as free
        self.free_cpu_blocks = free_cpu_blocks
        self.outcomes = outcomes

    # as recorders that are not rewritten yet ask
    num_steps = 1

    @property
    def commit_ns(self) -> int:
        return self.end_ns

    @property
    def result(self) -> StepResult:
        return StepResult((self.end_ns,), self.outcomes, self.spans)

    @property
    def emitted(self) -> list[str]:
        return [seq.request.request_id for seq in self.emitters]

    def each(self) -> Iterator[StepView]:
        yield self


def steps_of(
    plan: BatchPlan,
    plan_ns: int,
    result: StepResult,
    digests: list[int],
    emitters: list[Sequence],
    counts: tuple[int, int, int],
    free_blocks: list[int],
    free_cpu_blocks: int,
) -> Iterator[StepView]:
    """The steps of a plan of the old core, one by one, as if they had been planned so."""
    for index, spans in enumerate((result.spans, *result.later_spans)):
        one = plan
        if len(digests) > 1:
            one = plan._replace(step=plan.step + index, num_steps=1, shape=plan.shape_of(index))
            one = one._replace(admitted=()) if index else one
        end_ns = result.end_ns[index]
        yield StepView(
            one, plan_ns, end_ns, spans, digests[index], emitters, *counts, free_blocks[index], free_cpu_blocks,
            result.outcomes,
        )  # fmt: skip
        plan_ns = end_ns
