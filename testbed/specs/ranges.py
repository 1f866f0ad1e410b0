"""What a number of a model, a device or a measurement may be, so that a price stays finite. Knows none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from testbed.foreign_text import number

MAX_SIZE = 2**31 - 1  # of a dimension of a model, in elements, layers, tokens: products of a few are finite prices
MAX_PART_NS = 10**15  # of a time that is given, 11 days: what a step multiplies it by leaves it finite


class Expected(NamedTuple):
    """What a value of a field must be."""

    text: str
    holds: Callable[[Any], bool]


FACTOR = Expected("a number above 0, at most 1e12", lambda value: number(0, 1e12)(value) and value > 0)
