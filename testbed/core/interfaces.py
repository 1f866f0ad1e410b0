"""The seams: what the core asks of its neighbours. Protocols only; implementations live with their owners."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from testbed.core.plan import BatchPlan, Finished, StepResult
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


class StepView(NamedTuple):
    """What a recorder is shown of a committed plan: decisions from the plan, state after the plan, result after it.

    A plan may have been several steps: then all of them had the same batch, and what differs is given for each.
    """

    plan: BatchPlan
    plan_ns: int
    result: StepResult  # has the end of each executed step
    digests: list[int]  # after each step
    emitters: list[Sequence]  # emitted a token in each step; the same list for as long as they are the same
    num_running: int
    num_waiting: int
    num_swapped: int
    free_blocks: list[int]  # GPU blocks after the plan of each step, before its commit; evictable ones count as free
    free_cpu_blocks: int

    @property
    def num_steps(self) -> int:
        return len(self.result.end_ns)

    @property
    def commit_ns(self) -> int:
        return self.result.end_ns[-1]

    @property
    def digest(self) -> int:
        return self.digests[-1]

    @property
    def free_gpu_blocks(self) -> int:
        return self.free_blocks[-1]

    @property
    def emitted(self) -> list[str]:
        """Ids of the requests that emitted a token in the last step."""
        return [seq.request.request_id for seq in self.emitters]

    def each(self) -> Iterator[StepView]:
        """The steps one by one, as if they had been planned so."""
        if self.num_steps == 1:
            yield self
            return
        result, start_ns = self.result, self.plan_ns
        for index, spans in enumerate((result.spans, *result.later_spans)):
            end_ns = result.end_ns[index]
            plan = self.plan._replace(step=self.plan.step + index, num_steps=1, shape=self.plan.shape_of(index))
            yield self._replace(
                plan=plan._replace(admitted=()) if index else plan,  # the first step admits
                plan_ns=start_ns,
                result=StepResult((end_ns,), result.outcomes, spans),
                digests=[self.digests[index]],
                free_blocks=[self.free_blocks[index]],
            )
            start_ns = end_ns
