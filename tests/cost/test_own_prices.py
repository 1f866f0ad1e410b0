"""What a user's cost model returns is checked at once: whole numbers of ns, numpy's too, and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.backend import SimBackend, SimWork
from testbed.compiled import current
from testbed.core.outcome import Spans
from testbed.core.plan import BatchPlan, BatchShape, PrefillChunk
from testbed.errors import ConfigError
from testbed.made_rows import MadeRows

DECODES = BatchShape(3, 300, (), 3)
CHUNK = BatchShape(0, 0, (PrefillChunk(0, 64),), 0)
GOOD = Spans(1, 2, 3, 4, 5)


class Returns:
    """Gives the same answer for every step."""

    def __init__(self, price: Any) -> None:
        self._price = price

    def price(self, shape: BatchShape) -> Any:
        return self._price


class ReturnsSpans:
    """Makes spans of these numbers."""

    def __init__(self, *numbers: Any) -> None:
        self._numbers = numbers

    def price(self, shape: BatchShape) -> Spans:
        return Spans(*self._numbers)


def start(model: Any, shape: BatchShape) -> SimWork:
    return SimBackend(model).start(BatchPlan(0, shape, MadeRows(())))


@pytest.mark.parametrize("shape", [DECODES, CHUNK])
@pytest.mark.parametrize(
    ("price", "message"),
    [
        ((1, 2, 3, 1000.0, 5), r"Returns returned \(1, 2, 3, 1000.0, 5\) .* five whole numbers of ns"),
        ((0, 5, 0, np.float64(3), 7), "five whole numbers"),
        ((1, 2), r"returned \(1, 2\) for a step; it must be testbed.core.outcome.Spans"),
        (None, "returned None"),
        (7, "returned 7"),
        (GOOD.replace(swap_ns=-1), "returned swap_ns=-1; a span is 0 ns or more"),
    ],
)
def test_other_prices_are_refused(shape: BatchShape, price: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(Returns(price), shape)


@pytest.mark.parametrize("numbers", [(1, 2, 3, 1000.0, 5), (0, 5, 0, np.float64(3), 7), (1, 2.5, 3, 4, 5)])
def test_spans_of_other_numbers_are_refused(numbers: tuple[Any, ...]) -> None:
    """By the class itself where it is compiled."""
    with pytest.raises((ConfigError, TypeError), match=r"five whole numbers of ns|int object expected; got"):
        start(ReturnsSpans(*numbers), DECODES)


@pytest.mark.parametrize("price", [GOOD, tuple(GOOD), tuple(map(np.int64, GOOD)), list(GOOD)])
@pytest.mark.parametrize("shape", [DECODES, CHUNK])
def test_whole_numbers_of_any_kind_become_exact_ones(price: Any, shape: BatchShape) -> None:
    expect_exact(start(Returns(price), shape))


@pytest.mark.skipif(current().mode == "compiled", reason="compiled spans take Python's integers alone, and say so")
def test_numpy_s_whole_numbers_in_spans_become_exact_ones() -> None:
    expect_exact(start(ReturnsSpans(*map(np.int64, GOOD)), DECODES))


def expect_exact(work: SimWork) -> None:
    assert work.duration_ns == 15
    assert type(work.duration_ns) is int
    assert type(work.spans) is Spans
    assert all(type(ns) is int for ns in work.spans)
