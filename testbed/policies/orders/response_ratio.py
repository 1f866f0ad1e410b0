"""Highest response ratio next: the same wait counts more for a short job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mypy_extensions import mypyc_attr

from testbed.checks import require_whole
from testbed.core.sequence import Sequence
from testbed.foreign_text import Unchecked
from testbed.lazy_heap import LazyHeap, Rank
from testbed.policies.context import LengthOracle, PolicyContext

RATIO_BITS: Final = 24  # fractional bits of wait [ns] / service [tokens]


@mypyc_attr(allow_interpreted_subclasses=True)
class HighestResponseRatioNext:
    """Serves the largest (wait + service) / service (Brinch Hansen 1971), service = prompt + predicted output tokens.

    The wait counts from arrival. Without a prediction, service is the prompt. As service is in tokens, wait / service
    is compared: the time of a token is the same factor for all.

    The ratios of waiting sequences change with time, at different rates. So that `head` does not have to look at all of
    them, sizes are grouped into geometric classes (`classes_per_doubling` = 4: steps of 2^(1/4)), which are first come,
    first served; the head is the best of the classes' heads. So the ratio served is at least 2^(-1/4), 84 %, of the
    best. Costs: push, remove O(log n) amortised; head O(classes), at most 4 * log2(largest job); iteration by class.
    """

    asks = ("oracle",)

    def __init__(self, classes_per_doubling: Unchecked = 4) -> None:
        self._power = require_whole("scheduler.queue_order.classes_per_doubling", classes_per_doubling, 1, 1024)
        self._oracle: LengthOracle | None = None
        self._classes: dict[int, LazyHeap[int, Sequence]] = {}  # by class number; without empty ones
        self._services: dict[int, int] = {}  # in tokens, by id of the waiting sequences

    def bind(self, context: PolicyContext) -> None:
        self._oracle = context.oracle

    def push(self, seq: Sequence) -> None:
        service = self._services[seq.seq_id] = self._service(seq)
        group = self._classes.setdefault(self._class(service), LazyHeap())
        group.put(seq.seq_id, (seq.request.arrival_ns, seq.seq_id), seq)

    def push_preempted(self, seq: Sequence) -> None:
        self.push(seq)

    def head(self, now_ns: int) -> Sequence | None:
        best: tuple[Rank, Sequence] | None = None
        for group in self._classes.values():
            seq = group.first()
            assert seq is not None
            rank = self._rank(seq, self._services[seq.seq_id], now_ns)
            if best is None or rank < best[0]:
                best = rank, seq
        return None if best is None else best[1]

    def remove(self, seq: Sequence) -> None:
        number = self._class(self._services.pop(seq.seq_id))
        group = self._classes[number]
        group.remove(seq.seq_id)
        if not group:
            del self._classes[number]

    def rank(self, seq: Sequence, now_ns: int) -> Rank:
        return self._rank(seq, self._service(seq), now_ns)

    def __len__(self) -> int:
        return len(self._services)

    def __iter__(self) -> Iterator[Sequence]:
        for group in self._classes.values():
            yield from group

    def _class(self, service: int) -> int:
        """floor(classes_per_doubling * log2(service)), exactly."""
        return int(service**self._power).bit_length() - 1

    def _service(self, seq: Sequence) -> int:
        assert self._oracle is not None, "bind comes before the first push"
        return seq.num_prompt_tokens + (self._oracle.predict(seq) or 0)

    def _rank(self, seq: Sequence, service: int, now_ns: int) -> Rank:
        wait_ns = now_ns - seq.request.arrival_ns
        return -((wait_ns << RATIO_BITS) // service), seq.seq_id
