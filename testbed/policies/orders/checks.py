"""Checks of the queue orders' parameters."""

from __future__ import annotations

import math
from collections.abc import Collection

from testbed.errors import ConfigError
from testbed.foreign_text import Unchecked

PLACE = "scheduler.queue_order"


def whole(name: str, value: Unchecked, least: int) -> int:
    """The value, if it is a whole number of at least `least`. Raises ConfigError."""
    if not isinstance(value, int) or value < least:
        raise ConfigError(f"{PLACE}.{name} is {value!r}; it must be a whole number of at least {least}")
    return value


def not_negative(name: str, value: Unchecked) -> Unchecked:
    """The value, if it is finite and 0 or above. Raises ConfigError."""
    if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
        raise ConfigError(f"{PLACE}.{name} is {value!r}; it must be a finite number of at least 0")
    return value


def one_of(name: str, value: Unchecked, choices: Collection[str]) -> str:
    """The value, if it is one of the choices. Raises ConfigError."""
    if value not in choices:
        raise ConfigError(f"{PLACE}.{name} is {value!r}; choose one of {', '.join(choices)}")
    return str(value)
