"""A queue that is arranged as a whole once per step while it is short, and is first come, first served otherwise."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from mypy_extensions import mypyc_attr

from testbed.checks import require_whole
from testbed.core.sequence import Sequence
from testbed.foreign_text import Unchecked
from testbed.policies.queue_order import FCFS


class Arrangement(Protocol):
    """An order of all waiting sequences at one instant. Optional methods: as of a queue."""

    def arrange(self, waiting: list[Sequence]) -> list[Sequence]:
        """Returns the sequences, which are given in the order of `FCFS`, in the order in which to serve them."""
        ...


@mypyc_attr(allow_interpreted_subclasses=True)
class WindowedQueue:
    """Sequences in the order of an arrangement if at most `max_waiting` wait; else first come, first served.

    The first `head` of a step decides between the two and makes the order, which is then kept: admissions take from it
    without new lookups. A step is identified by its instant; a newly queued sequence also causes a new arrangement.
    Costs: one arrangement of at most `max_waiting` sequences per step; push, remove, head are otherwise O(1). Iteration
    is first come, first served. There is no `rank`: the cached tokens of a running sequence do not define its place.
    """

    def __init__(self, arrangement: Arrangement, max_waiting: Unchecked) -> None:
        self._arrangement = arrangement
        self.parts = (arrangement,)
        self._max_waiting = require_whole("scheduler.queue_order.max_waiting", max_waiting, 0)
        self._waiting = FCFS()
        self._order: OrderedDict[int, Sequence] | None = None  # None: first come, first served
        self._arranged_ns: int | None = None  # None: to be arranged

    def push(self, seq: Sequence) -> None:
        self._waiting.push(seq)
        self._arranged_ns = None

    def push_preempted(self, seq: Sequence) -> None:
        self._waiting.push_preempted(seq)
        self._arranged_ns = None

    def head(self, now_ns: int) -> Sequence | None:
        if self._arranged_ns != now_ns:
            self._arrange()
            self._arranged_ns = now_ns
        if self._order is None:
            return self._waiting.head(now_ns)
        return next(iter(self._order.values()), None)

    def remove(self, seq: Sequence) -> None:
        self._waiting.remove(seq)
        if self._order is not None:
            self._order.pop(seq.seq_id, None)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def _arrange(self) -> None:
        if len(self._waiting) > self._max_waiting:
            self._order = None
        else:
            order = self._arrangement.arrange(list(self._waiting))
            self._order = OrderedDict((seq.seq_id, seq) for seq in order)
