"""What a user's cost model returns is checked at once: whole numbers of ns, numpy's too, and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.backend import SimBackend
from testbed.core.outcome import Spans
from testbed.core.plan import BatchPlan, BatchShape, PrefillChunk
from testbed.errors import ConfigError

DECODES = BatchShape(3, 300, (), 3)
CHUNK = BatchShape(0, 0, (PrefillChunk(0, 64),), 0)
GOOD = Spans(1, 2, 3, 4, 5)


class Returns:
    """Gives the same answer for every step."""

    def __init__(self, price: Any) -> None:
        self._price = price

    def price(self, shape: BatchShape) -> Any:
        return self._price


class ReturnsRuns(Returns):
    def __init__(self, priced: Any) -> None:
        super().__init__(GOOD)
        self._priced = priced

    def price_decodes(self, shape: BatchShape, num_steps: int) -> Any:
        return self._priced


def start(model: Any, shape: BatchShape, num_steps: int) -> Any:
    return SimBackend(model).start(BatchPlan(0, num_steps, shape, tuple, None))


@pytest.mark.parametrize("shape", [DECODES, CHUNK])
@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize(
    ("price", "message"),
    [
        (GOOD._replace(forward_ns=1000.0), r"Returns returned \(1, 2, 3, 1000.0, 5\) .* five whole numbers of ns"),
        (Spans(0, 5, 0, np.float64(3), 7), "five whole numbers"),
        ((1, 2), r"returned \(1, 2\) for a step; it must be testbed.core.outcome.Spans"),
        (None, "returned None"),
        (7, "returned 7"),
        (GOOD._replace(swap_ns=-1), "returned swap_ns=-1; a span is 0 ns or more"),
    ],
)
def test_other_prices_are_refused(shape: BatchShape, num_steps: int, price: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(Returns(price), shape, num_steps)


@pytest.mark.parametrize("price", [GOOD, tuple(GOOD), Spans(*map(np.int64, GOOD)), list(GOOD)])
@pytest.mark.parametrize(("shape", "num_steps"), [(DECODES, 1), (DECODES, 3), (CHUNK, 3)])
def test_whole_numbers_of_any_kind_become_exact_ones(price: Any, shape: BatchShape, num_steps: int) -> None:
    work = start(Returns(price), shape, num_steps)
    assert list(work.durations_ns) == [15] * num_steps
    assert all(type(ns) is int for ns in work.durations_ns)
    assert all(type(one) is Spans and all(type(ns) is int for ns in one) for one in work.spans)


@pytest.mark.parametrize(
    ("priced", "message"),
    [
        ([GOOD, GOOD], r"ReturnsRuns.price_decodes returned \[.*it must be \(Spans of the first step, .* 2 steps\)"),
        ((GOOD, [4]), "forward_ns of each of the 2 steps"),
        ((GOOD, [4, 4.5]), "five whole numbers"),
        ((GOOD, [4, -5]), "forward_ns=-5"),
        ((GOOD._replace(sample_ns=-1), [4, 4]), "sample_ns=-1"),
    ],
)
def test_runs_of_decodes_likewise(priced: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(ReturnsRuns(priced), DECODES, 2)


def test_numpy_s_whole_numbers_in_a_run() -> None:
    work = start(ReturnsRuns((GOOD, np.array([4, 6]))), DECODES, 2)
    assert list(work.durations_ns) == [15, 17]
    assert all(type(ns) is int for ns in work.durations_ns)
