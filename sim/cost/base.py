"""The seam of all cost models, and what they share.

Rules: a price is built from the integers of a BatchShape with + - x / max min in one written order, and each component
is rounded to an integer of ns. So a price is the same on every machine, and stepping and fast forward agree to the ns.
"""

from __future__ import annotations

from typing import Protocol

from testbed.plan import BatchShape, Spans


class CostModel(Protocol):
    """Prices steps. The parts of the answer follow one another: the step lasts their sum, which is at least 1 ns."""

    def price(self, shape: BatchShape) -> Spans: ...


def total_ns(spans: Spans) -> int:
    """How long the step lasts, in ns."""
    return sum(spans)


def attention_pairs_doubled(shape: BatchShape) -> int:
    """Twice the number of (query, key) pairs of all prefill chunks: an integer, exact.

    A chunk of n tokens that starts at position s has n * (s + (n + 1) / 2) pairs.
    """
    return sum(num_tokens * (2 * start + num_tokens + 1) for start, num_tokens in shape.prefills)
