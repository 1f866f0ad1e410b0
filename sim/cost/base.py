"""The seam of all cost models, and what they share.

Rules: a price is built from the integers of a BatchShape with + - x / max min in one written order, and each component
is rounded to an integer of ns. So a price is the same on every machine.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape
from testbed.core.value import Value


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


class Captured(Value):
    """The largest steps that an engine captures as graphs: rows of decodes alone, tokens of any other; 0: none."""

    FIELDS: ClassVar = ("max_decodes", "max_tokens")
    __slots__ = FIELDS

    def __init__(self, max_decodes: int, max_tokens: int) -> None:
        self.max_decodes, self.max_tokens = max_decodes, max_tokens

    def rows(self, num_tokens: int, num_seqs: int) -> int:
        """Rows of the graph that a step is replayed in, as real/graphs.py pads; 0: it is launched kernel by kernel.

        One token of each sequence: 1, 2, 4, then multiples of 8. Other steps: multiples of 16 up to 128, of 64 up to
        512, then of 128. The largest is itself captured.
        """
        if num_tokens == num_seqs:
            most, part = self.max_decodes, 8 if num_tokens > 4 else 4 if num_tokens > 2 else 1
        else:
            most, part = self.max_tokens, 16 if num_tokens <= 128 else 64 if num_tokens <= 512 else 128
        return min(-(-num_tokens // part) * part, most) if num_tokens <= most else 0

    def rows_of(self, shape: BatchShape) -> int:
        """Rows of a step's products: its tokens, or what its graph has."""
        num_tokens = shape.num_tokens
        return self.rows(num_tokens, shape.num_decodes + len(shape.prefills)) or num_tokens


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
    return sum([pairs_doubled(chunk.start, chunk.num_tokens, window) for chunk in shape.prefills])


def decode_skew(shape: BatchShape) -> int:
    """How many more positions the decodes would attend to if all had the longest context; 0 where it is not said."""
    return max(0, shape.num_decodes * shape.longest_decode_context - shape.decode_context_tokens)
