"""Queue orders by a key that does not change while a sequence waits: one queue class, and functions for its keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from operator import index
from typing import Any

from mypy_extensions import mypyc_attr

from testbed.checks import MAX_SEED, require, require_whole_or_null
from testbed.core.sequence import Sequence
from testbed.foreign_text import Unchecked
from testbed.lazy_heap import LazyHeap, Rank
from testbed.policies.context import PolicyContext
from testbed.streams import draw

NS_PER_S = 1_000_000_000
NO_DEADLINE = 1 << 63  # in ns; later than any deadline


@mypyc_attr(allow_interpreted_subclasses=True)
class KeyedQueue:
    """The waiting sequences by a key; a preempted one is queued by its key too, as in vLLM V1's priority queue.

    key: returns the sort key of a sequence, waiting or running; its last number must make it unique. It is called once
    when the sequence is queued. bind: receives the policy context before the first call of `key`. preemptive: a running
    sequence yields to the head if the first number of its key is larger; the rest of a key only breaks ties.
    goes_by, asks: what the key goes by, and asks of the context; see docs/extending.md.
    Costs: push, remove O(log n), head O(1), all amortised; iteration, in the order of service, O(n log n).
    """

    def __init__(
        self,
        key: Callable[[Sequence], Rank],
        bind: Callable[[PolicyContext], None] | None = None,
        preemptive: bool = False,
        goes_by: str = "",
        asks: tuple[str, ...] = (),
    ) -> None:
        self._key: Callable[[Sequence], Any] = key  # Any: a user's own may return anything, which `rank` checks
        self._bind = bind
        self.is_preemptive = preemptive
        self.goes_by, self.asks = goes_by, asks
        self._heap: LazyHeap[int, Sequence] = LazyHeap()

    def bind(self, context: PolicyContext) -> None:
        if self._bind is not None:
            self._bind(context)

    def push(self, seq: Sequence) -> None:
        self._heap.put(seq.seq_id, self.rank(seq, 0), seq)

    def push_preempted(self, seq: Sequence) -> None:
        self.push(seq)

    def head(self, now_ns: int) -> Sequence | None:
        return self._heap.first()

    def remove(self, seq: Sequence) -> None:
        self._heap.remove(seq.seq_id)

    def rank(self, seq: Sequence, now_ns: int) -> Rank:
        """Returns the key. Raises TypeError unless it is a tuple of whole numbers: NaN has no order, and results of
        float operations may differ between machines."""
        rank, must = self._key(seq), "it must be a tuple of whole numbers"
        if not isinstance(rank, tuple):
            raise TypeError(f"the key of a {type(self).__name__} is {rank!r}; {must}")
        try:
            return tuple([index(number) for number in rank])
        except TypeError as error:
            raise TypeError(f"the key of a {type(self).__name__} is {rank!r}; {must}: {error}") from None

    def yields(self, running: Iterable[Sequence], now_ns: int) -> Sequence | None:
        """Returns the running sequence that ranks last, if the head ranks strictly before it."""
        rank = self._heap.first_rank() if self.is_preemptive else None
        if rank is None:
            return None
        last = max(running, key=lambda seq: self.rank(seq, now_ns), default=None)
        return last if last is not None and self.rank(last, now_ns)[0] > rank[0] else None

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._heap)


def lcfs() -> KeyedQueue:
    """Last come, first served."""
    return KeyedQueue(lambda seq: (-seq.seq_id,))


def random_order(seed: Unchecked = None) -> KeyedQueue:
    """A fixed random order: each request has one place. seed: None takes the run's seed."""
    place = _Place(seed)
    return KeyedQueue(place.key, bind=place.bind)


class _Place:
    """A hash of seed and request id: the same place under every policy and for every order of calls.

    Sequence ids would not work: under another policy, a session's next turn may arrive at another time and get another.
    """

    def __init__(self, seed: Unchecked) -> None:
        self._own_seed = require_whole_or_null("scheduler.queue_order.seed", seed, 0, MAX_SEED)
        self._seed = self._own_seed

    def bind(self, context: PolicyContext) -> None:
        self._seed = context.seed if self._own_seed is None else self._own_seed

    def key(self, seq: Sequence) -> Rank:
        assert self._seed is not None, "bind comes before the first push"
        return draw(self._seed, "queue_order", seq.request_id), seq.seq_id


def priority(ageing_per_s: Unchecked = 0.0, preemptive: bool = False) -> KeyedQueue:
    """Lowest `request.priority` first, then earliest arrival (vLLM V1's rule).

    ageing_per_s: by how much each second since arrival lowers a priority. All requests age equally, so the order of two
    never changes and the key is static: priority * 10^9 + ageing_per_s * arrival_ns, in exact integers. With ageing
    above 0, no request starves: one that arrives (p - q) / ageing_per_s seconds after a request of priority p goes
    behind it, if its own priority is q or higher. preemptive: with ageing, the larger aged priority yields.
    """
    is_good = isinstance(ageing_per_s, int | float) and ageing_per_s >= 0
    require("scheduler.queue_order.ageing_per_s", ageing_per_s, is_good, "a finite number of at least 0")
    ageing = Fraction(str(ageing_per_s))  # as it is written: 0.1 is a tenth
    per_level, per_ns = NS_PER_S * ageing.denominator, ageing.numerator

    def key(seq: Sequence) -> Rank:
        request = seq.request
        return request.priority * per_level + request.arrival_ns * per_ns, request.arrival_ns, seq.seq_id

    return KeyedQueue(key, preemptive=preemptive, goes_by="priority")


def earliest_deadline(preemptive: bool = False) -> KeyedQueue:
    """Earliest `request.deadline_ns` first, then earliest arrival; requests without a deadline come last."""
    return KeyedQueue(_by_deadline, preemptive=preemptive, goes_by="deadline")


def _by_deadline(seq: Sequence) -> Rank:
    request = seq.request
    return NO_DEADLINE if request.deadline_ns is None else request.deadline_ns, request.arrival_ns, seq.seq_id
