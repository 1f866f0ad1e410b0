"""First come, first served: the basic queue order. Other orders, some of them built on it, are in `orders/`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from mypy_extensions import mypyc_attr

from testbed.core.sequence import Sequence


@mypyc_attr(allow_interpreted_subclasses=True)
class FCFS:
    """First come, first served; a preempted sequence goes back to the front."""

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
