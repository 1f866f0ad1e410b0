"""The linear cost model: its terms."""

import math
from dataclasses import fields

import pytest
from hypothesis import given

from sim.cost.base import attention_pairs_doubled
from sim.cost.config import LinearConfig
from sim.cost.linear import LinearCost
from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.errors import ConfigError
from tests.cost.shapes import prefill, shapes

NANO = LinearConfig(100e-9, 3e-9, 5e-9, 7e-9, 2e-9, 11e-9, 13e-9)  # whole ns, so sums can be checked by hand


def test_the_linear_price_is_the_sum_of_its_terms():
    cost = LinearCost(NANO)
    shape = BatchShape(2, 30, (PrefillChunk(10, 4), PrefillChunk(0, 3)), 4, 1, 2, 3)
    pairs = (4 * 10 + 10) + 6
    assert attention_pairs_doubled(shape) == 2 * pairs
    assert cost.price(shape) == Spans(swap_ns=33 + 39, forward_ns=100 + 7 * 3 + 2 * 5 + 30 * 7 + pairs * 2)


@given(shapes)
def test_linear_prices_are_positive_integers(shape):
    for config in (NANO, LinearConfig(), LinearConfig(0, 0, 0, 0, 0, 0, 0)):
        spans = LinearCost(config).price(shape)
        assert all(type(part) is int and part >= 0 for part in spans)
        assert spans.total_ns >= (not shape.is_empty)


@given(shapes)
def test_the_terms_of_a_linear_price_add_up_to_it(shape):
    for config in (NANO, LinearConfig(), LinearConfig(0, 0, 0, 0, 0, 0, 0), LinearConfig(3.3e-10, 0, 1.7e-10)):
        cost = LinearCost(config)
        parts = cost.breakdown(shape)
        assert all(type(part) is int and part >= 0 for part in parts.values())
        assert sum(parts.values()) == cost.price(shape).total_ns


def test_splitting_a_prompt_into_chunks_keeps_its_pairs():
    whole = attention_pairs_doubled(prefill(1000))
    parts = BatchShape(0, 0, (PrefillChunk(0, 300), PrefillChunk(300, 300), PrefillChunk(600, 400)), 1)
    assert attention_pairs_doubled(parts) == whole == 1000 * 1001


@pytest.mark.parametrize("window", [None, 64, 20_000])
def test_a_linear_prompt_has_the_pairs_that_its_window_leaves(window):
    pairs = sum(min(position + 1, window or position + 1) for position in range(8192))
    cost = LinearCost(LinearConfig(0, 0, 0, 0, 2e-9, 0, 0), window)
    assert cost.price(prefill(8192)) == Spans(forward_ns=2 * pairs)
    assert cost.breakdown(prefill(8192))["prefill_attention"] == 2 * pairs


def test_impossible_coefficients_are_refused():
    for name in (item.name for item in fields(LinearConfig)):
        with pytest.raises(ConfigError, match=rf"cost\.{name} is -0\.1; it must be from 0 to 1e6 seconds"):
            LinearConfig(**{name: -0.1})
    with pytest.raises(ConfigError, match=r"cost\.base_s is nan"):
        LinearConfig(math.nan)
    with pytest.raises(ConfigError, match=r"cost\.base_s is a whole number of about 401 digits; it must be from 0"):
        LinearConfig(10**400)
