"""Queue orders: in which order waiting sequences are looked at."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from testbed.core.sequence import Sequence


class WaitingQueue(Protocol):
    """The waiting sequences in a policy's order. A user's own class with these methods plugs in by `_target_`."""

    def push(self, seq: Sequence) -> None:
        """A new sequence."""
        ...

    def push_preempted(self, seq: Sequence) -> None:
        """A sequence that was running."""
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
    #   served(seq, num_tokens, num_emitted, now_ns)  after each step, for each sequence that was in it
    #   left(seq, now_ns)                  the sequence finished or was aborted, wherever it was
    #   yields(running, now_ns) -> Sequence | None    which running sequence should make room for the head now
    #   is_time_dependent: bool            False: without arrivals and ends the order stays, so that steps may be fast
    #                                      forwarded while sequences wait; a class that does not say it is stepped


class FCFS:
    """First come, first served; a preempted sequence goes back to the front."""

    is_time_dependent = False

    def __init__(self) -> None:
        self._queue: OrderedDict[int, Sequence] = OrderedDict()

    def push(self, seq: Sequence) -> None:
        self._queue[seq.seq_id] = seq

    def push_preempted(self, seq: Sequence) -> None:
        self._queue[seq.seq_id] = seq
        self._queue.move_to_end(seq.seq_id, last=False)

    def head(self, now_ns: int) -> Sequence | None:
        return next(iter(self._queue.values())) if self._queue else None

    def remove(self, seq: Sequence) -> None:
        del self._queue[seq.seq_id]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue.values())
