"""The interface of all cost models, and the arithmetic that they share.

Rules: a step time is computed from the integers of a BatchShape with + - x / max min, in the order of the code, and
each component is rounded to whole ns. So a step time is the same on every machine.
"""

from __future__ import annotations

from operator import index
from typing import Any, ClassVar, Protocol

from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape
from testbed.core.value import Value
from testbed.errors import ConfigError
from testbed.foreign_text import shown


class CostModel(Protocol):
    """Predicts step times. The spans of a step follow one another: it lasts their sum, in the simulator at least 1 ns.

    A user's own model needs only `price`; those of this package are `Itemised` too.
    """

    def price(self, shape: BatchShape) -> Spans: ...


class Itemised(Protocol):
    """A cost model that itemises the time of a step."""

    def breakdown(self, shape: BatchShape) -> dict[str, int]:
        """Returns the ns of each operator; their sum is exactly that of the spans of `price(shape)`."""
        ...


def priced(cost: CostModel, shape: BatchShape) -> Spans:
    """Returns the price of a step. Raises ConfigError if a user's cost model returns an invalid value."""
    model: Any = cost  # a user's may return anything
    price = model.price(shape)
    return price if isinstance(price, Spans) and _is_whole(price) else _checked(type(cost).__name__, price)


def _checked(model: str, price: Any) -> Spans:
    """Returns a cost model's result as Spans of Python integers, as numpy's are not exact. Raises ConfigError."""
    try:
        schedule_ns, prepare_ns, swap_ns, forward_ns, sample_ns = map(index, price)
    except (TypeError, ValueError):
        given = tuple(price) if isinstance(price, Spans | tuple) else price
        raise ConfigError(
            f"cost: {model} returned {shown(given)} for a step; it must be testbed.core.outcome.Spans, five whole "
            "numbers of ns"
        ) from None
    whole = Spans(schedule_ns, prepare_ns, swap_ns, forward_ns, sample_ns)
    for name in Spans.FIELDS:
        if getattr(whole, name) < 0:
            raise ConfigError(f"cost: {model} returned {name}={getattr(whole, name)}; a span is 0 ns or more")
    return whole


def _is_whole(spans: Spans) -> bool:
    """Whether all spans are Python integers and none is negative."""
    is_positive = spans.schedule_ns >= 0 and spans.prepare_ns >= 0 and spans.swap_ns >= 0
    return is_positive and spans.forward_ns >= 0 and spans.sample_ns >= 0 and isinstance(spans.total_ns, int)


class Captured(Value):
    """The largest steps that an engine captures as CUDA graphs: rows of steps with one token of each sequence
    (max_decodes), tokens of any other (max_tokens); 0: none."""

    FIELDS: ClassVar = ("max_decodes", "max_tokens")
    __slots__ = FIELDS

    def __init__(self, max_decodes: int, max_tokens: int) -> None:
        self.max_decodes, self.max_tokens = max_decodes, max_tokens

    def rows(self, num_tokens: int, num_seqs: int) -> int:
        """Returns the rows of the graph that replays a step, padded as in real/graphs.py; 0: the step is eager.

        Sizes for one token of each sequence: 1, 2, 4, then multiples of 8. For other steps: multiples of 16 up to 128,
        of 64 up to 512, then of 128. The bound itself is always a size.
        """
        if num_tokens == num_seqs:
            most, part = self.max_decodes, 8 if num_tokens > 4 else 4 if num_tokens > 2 else 1
        else:
            most, part = self.max_tokens, 16 if num_tokens <= 128 else 64 if num_tokens <= 512 else 128
        return min(-(-num_tokens // part) * part, most) if num_tokens <= most else 0

    def rows_of(self, shape: BatchShape) -> int:
        """Returns the rows of a step's GEMMs: those of its graph if it is captured, else its tokens."""
        num_tokens = shape.num_tokens
        return self.rows(num_tokens, shape.num_decodes + len(shape.prefills)) or num_tokens


def to_ns(time: float) -> int:
    """Returns a non-negative time, rounded to whole ns; halves are rounded up."""
    return int(time + 0.5)


def pairs_doubled(start: int, num_tokens: int, window: int | None = None) -> int:
    """Returns twice the exact number of (query, key) pairs of a prefill chunk: the sum of min(start + i + 1, window)
    over its tokens i. Without a window the number of pairs is num_tokens * (start + (num_tokens + 1) / 2).

    start: at most window - 1, as in the shapes of plans.
    """
    if window is None or start + num_tokens <= window:
        return num_tokens * (2 * start + num_tokens + 1)
    growing = window - start  # tokens that see everything before them
    return growing * (2 * start + growing + 1) + 2 * (num_tokens - growing) * window


def attention_pairs_doubled(shape: BatchShape, window: int | None = None) -> int:
    """Returns twice the number of (query, key) pairs of all prefill chunks."""
    return sum([pairs_doubled(chunk.start, chunk.num_tokens, window) for chunk in shape.prefills])


def decode_skew(shape: BatchShape) -> int:
    """Returns how many more positions decodes would attend to if all had the longest context; 0 if it is not known."""
    return max(0, shape.num_decodes * shape.longest_decode_context - shape.decode_context_tokens)
