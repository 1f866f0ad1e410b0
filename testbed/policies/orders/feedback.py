"""Multi-level feedback queue with skip-join, after FastServe (Wu et al. 2023), counted in tokens instead of time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from mypy_extensions import mypyc_attr

from testbed.checks import require, require_whole
from testbed.core.sequence import Sequence
from testbed.foreign_text import Unchecked
from testbed.lazy_heap import LazyHeap, Rank
from testbed.policies.orders.keyed import NS_PER_S
from testbed.policies.orders.meter import PromptMeter


@mypyc_attr(allow_interpreted_subclasses=True)
class MultiLevelFeedbackQueue:
    """Serves sequences by level, in order of arrival within a level. Little service so far means a high level; output
    lengths are not needed.

    Service is `input_weight` for each prompt token computed and `output_weight` for each token emitted; recomputation
    does not count. Level i has a quantum of `quantum` * `ratio`^i. Rules:

    - skip-join: a new sequence joins the first level whose quantum covers its prompt (else the last level);
    - demotion: a sequence that has used up the quantum of its level moves one level down and gets a new quantum;
    - promotion: one that has waited `promote_after_s` since it was last served (or arrived) moves to the top. The rest
      of its prompt then does not count, as otherwise it would be demoted before its first token. None: never;
    - a running sequence yields to a head of a higher level (`yields`), the youngest of the lowest level first.

    The sequences of one request share its level until the last of them ends.

    Costs: push, remove O(log n), head O(1) and O(log n) for each promotion, amortised; served O(1). Iteration is in
    the order of service, without the promotions that are due.
    """

    def __init__(
        self,
        num_levels: Unchecked = 8,
        quantum: Unchecked = 512,
        ratio: Unchecked = 2,
        input_weight: Unchecked = 1,
        output_weight: Unchecked = 16,
        promote_after_s: Unchecked = 3.0,
    ) -> None:
        self._input_weight = require_whole("scheduler.queue_order.input_weight", input_weight, 0)
        self._output_weight = require_whole("scheduler.queue_order.output_weight", output_weight, 1)
        require_whole("scheduler.queue_order.quantum", quantum, 1)
        require_whole("scheduler.queue_order.ratio", ratio, 2)
        require_whole("scheduler.queue_order.num_levels", num_levels, 1, 64)
        self._quanta = [quantum * ratio**level for level in range(num_levels)]
        self._promote_after_ns: int | None = None
        if promote_after_s is not None:
            is_good = isinstance(promote_after_s, int | float) and promote_after_s >= 0
            require("scheduler.queue_order.promote_after_s", promote_after_s, is_good, "0 s or above, or null")
            self._promote_after_ns = round(promote_after_s * NS_PER_S)
        # by request, so that the sequences of one request share its level and its quantum
        self._levels: dict[str, int] = {}
        self._service: dict[str, int] = {}  # service since it entered its level; absent: 0
        self._served_ns: dict[str, int] = {}  # when it was last served; absent: never
        self._meter = PromptMeter()
        self._heap: LazyHeap[int, Sequence] = LazyHeap()
        self._starving: LazyHeap[int, Sequence] = LazyHeap()  # those below the top level, by when they were last served

    def level(self, seq: Sequence) -> int:
        """Returns the level of the request; 0 is the top. A new request joins its first level."""
        request_id = seq.request_id
        if request_id not in self._levels:
            need = self._input_weight * seq.num_prompt_tokens
            self._levels[request_id] = min(bisect_left(self._quanta, need), len(self._quanta) - 1)
        return self._levels[request_id]

    def push(self, seq: Sequence) -> None:
        level = self.level(seq)
        self._heap.put(seq.seq_id, (level, seq.seq_id), seq)
        if level and self._promote_after_ns is not None:
            since_ns = self._served_ns.get(seq.request_id, seq.request.arrival_ns)
            self._starving.put(seq.seq_id, (since_ns, seq.seq_id), seq)

    def push_preempted(self, seq: Sequence) -> None:
        self.push(seq)

    def head(self, now_ns: int) -> Sequence | None:
        self._promote(now_ns)
        return self._heap.first()

    def remove(self, seq: Sequence) -> None:
        self._heap.remove(seq.seq_id)
        if seq.seq_id in self._starving:
            self._starving.remove(seq.seq_id)

    def served(self, seq: Sequence, num_tokens: int, num_emitted: int, now_ns: int) -> None:
        request_id, level = seq.request_id, self.level(seq)
        num_new = self._meter.count(seq, num_tokens, num_emitted)
        service = self._input_weight * num_new + self._output_weight * num_emitted
        self._served_ns[request_id] = now_ns
        self._service[request_id] = self._service.get(request_id, 0) + service
        if self._service[request_id] >= self._quanta[level]:
            self._service[request_id] = 0
            self._move(seq, min(level + 1, len(self._quanta) - 1))

    def left(self, seq: Sequence, now_ns: int) -> None:
        if len(seq.members) > 1:  # others of its request go on
            return
        for known in (self._levels, self._service, self._served_ns):
            known.pop(seq.request_id, None)
        self._meter.forget(seq)

    def rank(self, seq: Sequence, now_ns: int) -> Rank:
        return self.level(seq), seq.seq_id

    def yields(self, running: Iterable[Sequence], now_ns: int) -> Sequence | None:
        self._promote(now_ns)
        first = self._heap.first_rank()
        last = max(running, key=lambda seq: self.rank(seq, now_ns), default=None)
        if first is None or last is None or self.level(last) <= first[0]:
            return None
        return last

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._heap)

    def _promote(self, now_ns: int) -> None:
        while (oldest := self._starving.first_rank()) is not None:
            assert self._promote_after_ns is not None
            if oldest[0] + self._promote_after_ns > now_ns:
                return
            seq = self._starving.first()
            assert seq is not None
            self._service[seq.request_id] = -self._input_weight * self._meter.missing(seq)
            self._move(seq, 0)

    def _move(self, seq: Sequence, level: int) -> None:
        """Changes the level of a request, and the places of those of its sequences that wait."""
        self._levels[seq.request_id] = level
        for one in seq.members:
            if one.seq_id in self._heap:
                self.remove(one)
                self.push(one)
