"""The protocols between the core and its neighbours: request sources, backends, policies. No implementations.

A user's own policy is a class with the methods of one of these protocols, named by `_target_`. Optional methods are
listed below and in docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol, TypeVar

from testbed.core.commands import Event
from testbed.core.outcome import Finished
from testbed.core.plan import BatchPlan, BatchShape, PreemptionMode
from testbed.core.sequence import Sequence

Work = TypeVar("Work", covariant=True)

# --- where requests come from ---


class Inbox(Protocol):
    """A source of requests: a trace, sessions, a router, a live caller. The loop pulls from it at step boundaries."""

    @property
    def is_open(self) -> bool:
        """Whether events may still arrive that `next_ns` does not report (from a live caller, another replica)."""
        ...

    def due(self, now_ns: int) -> list[Event]:
        """Removes and returns the events at or before `now_ns`, ordered by instant, then by arrival."""
        ...

    def next_ns(self) -> int | None:
        """The instant of the next known event; None if none is known. May change after every commit."""
        ...

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        """Reports the requests that ended, so that sessions and closed loops can send their next ones."""
        ...


# --- the loop and its driver ---


class Backend(Protocol[Work]):
    """Executes plans for a driver. Work is the type of a started plan, which only the backend's driver reads: the
    simulator prices a plan (sim.backend.SimWork), the real engine launches it on the device (real.driver.Work).
    """

    def start(self, plan: BatchPlan) -> Work:
        """Starts a plan, in the order of the steps. At most `Limits.max_num_plans` plans are in flight."""
        ...


# --- policies ---


class WaitingQueue(Protocol):
    """The waiting sequences in a policy's order."""

    def push(self, seq: Sequence) -> None:
        """Adds a new sequence."""
        ...

    def push_preempted(self, seq: Sequence) -> None:
        """Adds a sequence that was running, or that was in the queue and was passed over by a step (`Step.defer`)."""
        ...

    def head(self, now_ns: int) -> Sequence | None:
        """Returns the sequence to admit next, which stays in the queue."""
        ...

    def remove(self, seq: Sequence) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Sequence]: ...

    # Optional methods, looked up once, when the scheduler is built; `bind` of any policy, `served` and `left` of any
    # but eviction; of the `parts`, too, in which a policy made of others lists these:
    #   bind(context: PolicyContext)       receives the block manager (for prefix lookups), the length oracle, the seed
    #   rank(seq, now_ns) -> Any           a sort key, also for running sequences; the smallest is served first
    #   served(seq, num_tokens, num_emitted, now_ns)  called after each step for each live sequence of its batch and for
    #                                      each new member of a group (num_tokens 0). `seq.num_computed_tokens` includes
    #                                      num_tokens, and the `seq.num_in_flight_tokens` of plans in flight
    #   pass_over(seq)                     called instead of `remove` for a head that a step passes over; push_preempted
    #                                      brings it back before the step is over
    #   left(seq, now_ns)                  called when a sequence has ended for any reason, while `seq.members` has it
    #   yields(running, now_ns) -> Sequence | None    the running sequence to preempt for the head now, if any


class AdmissionPolicy(Protocol):
    """Decides whether a waiting sequence that fits may start. Optional: `bind(context: PolicyContext)`, `now_ns: int`,
    which is set to the instant of each step before the step is decided."""

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        """Whether `seq`, the head of the queue, may join the running sequences (in running order) in this step.

        Called only if the block manager has room for it. A head that is rejected while nothing runs ends as ignored.
        """
        ...


class PreemptionChoice(Protocol):
    """Decides how a victim's KV is given up. Optional: `bind(context: PolicyContext)`, `now_ns` as for admissions."""

    def mode(self, seq: Sequence, num_blocks: int) -> PreemptionMode:
        """Returns how to preempt the victim, whose group holds `num_blocks` distinct GPU blocks.

        The answer is a preference: a victim that cannot be swapped is recomputed. Several beams can only be swapped.
        """
        ...


class VictimChoice(Protocol):
    """Chooses the sequence to preempt when a running sequence cannot grow."""

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        """Returns one of the running sequences. running: by id, in running order; never empty."""
        ...

    # Optional methods and attributes, looked up once, when the scheduler is built:
    #   bind(context: PolicyContext)       receives the block manager, the limits, the length oracle
    #   bind_queue(queue: WaitingQueue)    receives the queue, to read ranks
    #   now_ns: int                        set to the instant of each step before the step is decided


class Estimator(Protocol):
    """Predicted times in integer ns, for policies, in simulator and engine alike; the manifest names it."""

    def step_ns(self, shape: BatchShape) -> int:
        """Time of a step of this shape, as a composition may ask of what it could schedule."""
        ...

    def recompute_ns(self, start: int, num_tokens: int) -> int:
        """Time to compute `num_tokens` tokens of one sequence from position `start` on, in a batch of its own."""
        ...

    def swap_ns(self, num_blocks: int) -> int:
        """Time to move this many KV blocks across the link, one way."""
        ...
