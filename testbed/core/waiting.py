"""The waiting sequences: the queue in its policy's order, and how many have a long prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from testbed.core.interfaces import WaitingQueue
from testbed.core.limits import Limits
from testbed.core.sequence import Sequence


class Waiting:
    """Wraps the queue of a policy. yields: the policy's optional method, or None."""

    def __init__(self, queue: WaitingQueue, limits: Limits) -> None:
        self.yields: Callable[[Any, int], Sequence | None] | None = getattr(queue, "yields", None)
        self.num_seqs = 0
        self.num_long = 0  # waiting sequences with a long prefill
        self._queue, self._pass_over = queue, getattr(queue, "pass_over", queue.remove)
        self._long_from = limits.long_prefill_token_threshold or limits.max_model_len * 4 // 100

    def push(self, seq: Sequence) -> None:
        self._count(seq, 1)
        self._queue.push(seq)

    def push_back(self, seq: Sequence) -> None:
        """Requeues a sequence that was running or was passed over."""
        self._count(seq, 1)
        self._queue.push_preempted(seq)

    def head(self, now_ns: int) -> Sequence | None:
        return self._queue.head(now_ns) if self.num_seqs else None

    def remove(self, seq: Sequence, *, passes_over: bool = False) -> None:
        self._count(seq, -1)
        (self._pass_over if passes_over else self._queue.remove)(seq)

    def _count(self, seq: Sequence, change: int) -> None:
        self.num_seqs += change
        if self.is_long(seq):
            self.num_long += change

    def is_long(self, seq: Sequence) -> bool:
        """Whether the tokens left to prefill exceed `long_prefill_token_threshold` (0: 4 % of max_model_len)."""
        return seq.num_tokens - seq.num_computed_tokens > self._long_from

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def check_invariants(self) -> None:
        assert self.num_seqs == len(self._queue)
        assert self.num_long == sum([1 for seq in self._queue if self.is_long(seq)])
