"""A user's own policies, in a file outside the package. docs/extending.md runs them; a test keeps that true."""

from __future__ import annotations

from collections.abc import Iterator

from sim.cost.base import CostModel
from testbed.plan import BatchShape, Spans
from testbed.sequence import Sequence


class ShortestPromptFirst:
    """A queue order: the waiting sequence with the fewest prompt tokens first, ties by arrival."""

    def __init__(self) -> None:
        self._waiting: dict[int, Sequence] = {}

    def push(self, seq: Sequence) -> None:
        self._waiting[seq.seq_id] = seq

    def push_preempted(self, seq: Sequence) -> None:
        self.push(seq)

    def head(self, now_ns: int) -> Sequence | None:
        return min(self._waiting.values(), key=lambda seq: (seq.num_prompt_tokens, seq.seq_id), default=None)

    def remove(self, seq: Sequence) -> None:
        del self._waiting[seq.seq_id]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())


class LeastProgress:
    """A victim choice: preempt the sequence that has emitted least, the newest among equals."""

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        return min(running.values(), key=lambda seq: (seq.num_output_tokens, -seq.seq_id))


class SlowPrefill:
    """A cost model: a fixed price a step, and `per_prefill_token_us` for every prefilled token."""

    def __init__(self, base_us: int = 5_000, per_prefill_token_us: int = 100) -> None:
        self.base_us = base_us
        self.per_prefill_token_us = per_prefill_token_us

    def price(self, shape: BatchShape) -> Spans:
        return Spans(forward_ns=1_000 * (self.base_us + self.per_prefill_token_us * shape.num_prefill_tokens))


_: CostModel = SlowPrefill()  # a type checker confirms that it fits
