"""The seam of all cost models, and what they share.

Rules: a price is built from the integers of a BatchShape with + - x / max min in one written order, and each component
is rounded to an integer of ns. So a price is the same on every machine.
"""

from __future__ import annotations

from typing import Protocol

from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape


class CostModel(Protocol):
    """Prices steps. The parts of the answer follow one another: the step lasts their sum, which is at least 1 ns.

    `price` is all that a user's own model needs; ours are `Itemised` too.
    """

    def price(self, shape: BatchShape) -> Spans: ...


class Itemised(Protocol):
    """A cost model that says where the time of a step goes."""

    def breakdown(self, shape: BatchShape) -> dict[str, int]:
        """The ns of each operator; their sum is exactly that of the spans of `price(shape)`."""
        ...


def to_ns(time: float) -> int:
    """A time that is not negative, rounded: halves go up."""
    return int(time + 0.5)


def pairs_doubled(start: int, num_tokens: int, window: int | None = None) -> int:
    """Twice the number of (query, key) pairs of a prefill chunk, exact: the sum of min(start + i + 1, window) over its
    tokens i. Without a window that is num_tokens * (start + (num_tokens + 1) / 2).

    start: at most window - 1, as planned shapes have it.
    """
    if window is None or start + num_tokens <= window:
        return num_tokens * (2 * start + num_tokens + 1)
    growing = window - start  # tokens that still see everything before them
    return growing * (2 * start + growing + 1) + 2 * (num_tokens - growing) * window


def attention_pairs_doubled(shape: BatchShape, window: int | None = None) -> int:
    """Twice the number of (query, key) pairs of all prefill chunks."""
    return sum([pairs_doubled(start, num_tokens, window) for start, num_tokens in shape.prefills])


def decode_skew(shape: BatchShape) -> int:
    """How many more positions the decodes would attend to if all had the longest context; 0 where it is not said."""
    return max(0, shape.num_decodes * shape.longest_decode_context - shape.decode_context_tokens)
