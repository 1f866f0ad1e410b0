"""The seams: what the core asks of its neighbours, and what it is told by them. Implementations live with their owners.

A policy of a user's own is a class with the methods of one of these protocols, named by `_target_`; what more each may
have stands in docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol

from testbed.core.commands import Event
from testbed.core.outcome import Finished
from testbed.core.plan import BatchPlan, PreemptionMode
from testbed.core.sequence import Sequence

# --- where requests come from ---


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


# --- the loop and its driver ---


class Work(Protocol):
    """A plan that a backend has started. What more it offers is between a backend and its driver."""


class Backend(Protocol):
    """Executes plans. The simulator prices them, the real engine launches them."""

    def start(self, plan: BatchPlan) -> Work: ...


# --- policies ---


class WaitingQueue(Protocol):
    """The waiting sequences in a policy's order."""

    def push(self, seq: Sequence) -> None:
        """A new sequence."""
        ...

    def push_preempted(self, seq: Sequence) -> None:
        """A sequence that was running, or that was in the queue and was passed over by a step (`Step.defer`)."""
        ...

    def head(self, now_ns: int) -> Sequence | None:
        """The sequence to admit next; it stays in the queue."""
        ...

    def remove(self, seq: Sequence) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Sequence]: ...

    # A class may also have any of these; they are looked for once, when the scheduler is built:
    #   bind(context: PolicyContext)       gets the block manager to look hits up in, the length oracle, the seed
    #   rank(seq, now_ns) -> Any           a sort key, also of running sequences: smaller is served first
    #   served(seq, num_tokens, num_emitted, now_ns)  after each step, for each live sequence that was in it, and for
    #                                      each that parted from one (num_tokens 0). `seq.num_computed_tokens` counts
    #                                      num_tokens already, and `seq.num_in_flight_tokens` of the plans after it
    #   left(seq, now_ns)                  the sequence finished or was aborted, wherever it was; `seq.members` has it
    #   yields(running, now_ns) -> Sequence | None    which running sequence should make room for the head now


class AdmissionPolicy(Protocol):
    """Whether a waiting sequence whose blocks are there may start. It may have `bind(context: PolicyContext)`."""

    def allows(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        """Whether `seq`, the head of the queue, may join the running sequences (in order of admission) in this step.

        Asked only if the block manager has room for it now. A head that is refused while nothing runs ends as ignored.
        """
        ...


class PreemptionChoice(Protocol):
    """How a victim's KV is given up. It may have `bind(context: PolicyContext)`."""

    def mode(self, seq: Sequence, num_blocks: int) -> PreemptionMode:
        """How to preempt the victim, whose group holds `num_blocks` distinct GPU blocks.

        It is a wish: where the CPU pool has no room, the mechanism recomputes; a group of several beams it cannot.
        """
        ...


class VictimChoice(Protocol):
    """Who is preempted when a running sequence cannot grow."""

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        """One of the running sequences, given by id in order of admission; never empty."""
        ...

    # A class may also have any of these; they are looked for once, when the scheduler is built:
    #   bind(context: PolicyContext)       gets the block manager, the limits, the length oracle
    #   bind_queue(queue: WaitingQueue)    gets the queue, to ask for ranks
    #   now_ns: int                        set to the instant of each step before it is decided


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
