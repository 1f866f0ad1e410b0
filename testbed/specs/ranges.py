"""Bounds of the numbers of models, devices and measurements that keep every step time finite. Knows none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from testbed.foreign_text import number

MAX_SIZE = 2**31 - 1  # of a model's dimension, in elements, layers, tokens: products of a few are finite
MAX_PART_NS = 10**15  # of a given time, 11 days: the factors in a step leave it finite


class Expected(NamedTuple):
    """A condition on a field's value. text: for messages, as in "it must be <text>". holds: checks a value."""

    text: str
    holds: Callable[[Any], bool]


FACTOR = Expected("a number above 0, at most 1e12", lambda value: number(0, 1e12)(value) and value > 0)
