"""Checks of settings: the one way to reject a value, with a one-line error that has key, value and what was expected.

All packages check their settings with these functions. Values from users' files are checked by testbed/foreign_text.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from testbed.errors import ConfigError, TestbedError
from testbed.foreign_text import Unchecked, nearest, shortened, shown

MAX_WHOLE = 2**31 - 1  # of a setting: compiled code computes with 64 bits, into which a product of two still fits
MAX_SEED = 2**63 - 1  # fits an int64 column of tables
_WORDS = {"None": "null", "True": "true", "False": "false"}  # as the files and the command line have them


def require(
    key: str, value: Unchecked, condition: bool, expected: str, error: type[TestbedError] = ConfigError
) -> None:
    """Raises `error` unless the condition holds. Infinity and NaN are always rejected.

    key: as the user typed it. expected: as in "it must be at least 1".
    """
    if not condition or (isinstance(value, float) and not math.isfinite(value)):
        said = shortened(value) if isinstance(value, int) else shown(value)
        raise error(f"{key} is {_WORDS.get(said, said)}; it must be {expected}")


def require_whole(key: str, value: Unchecked, least: int, most: int | None = None, *, also: str = "") -> int:
    """Returns the value. Raises ConfigError unless it is a whole number from `least` to `most` (None: to MAX_WHOLE,
    which only who exceeds it is told). also: for the message, other values that the caller allows."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    kind, of = ("", "") if is_whole else ("a whole number ", "of ")
    if most is None and is_whole and value > MAX_WHOLE:
        most = MAX_WHOLE
    expected = f"{kind}{of}at least {least}" if most is None else f"{kind}from {least} to {most:,}"
    require(key, value, is_whole and least <= value and (most is None or value <= most), expected + also)
    return int(value)


def require_whole_or_null(key: str, value: Unchecked, least: int, most: int | None = None) -> int | None:
    """Like require_whole, but also allows null (None)."""
    return None if value is None else require_whole(key, value, least, most, also=", or null")


def require_type(key: str, value: Unchecked, annotation: Any) -> None:
    """Raises ConfigError for a value that clearly has another type than a field's. Whole numbers count as numbers."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    kinds = tuple(get_origin(kind) or kind for kind in kinds)
    if float in kinds and isinstance(value, int) and abs(value) > sys.float_info.max:
        require(key, value, False, "a number that fits a float")
    if not any(_is_of(value, kind) for kind in kinds):
        require(key, value, False, " or ".join(_KINDS.get(kind, "a list") for kind in kinds))


_KINDS: dict[type, str] = {
    float: "a number", int: "a whole number", str: "a string", bool: "true or false", NoneType: "null"
}  # fmt: skip


def _is_of(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind in _KINDS:
        return isinstance(value, int | float if kind is float else kind)
    return isinstance(value, list | tuple)


def choose(key: str, value: Unchecked, choices: Collection[str]) -> str:
    """Returns the value. Raises ConfigError, with the nearest valid name, if it is not among the choices."""
    if value not in choices:
        raise ConfigError(f"{key} is {shown(value)}; {nearest(str(value), choices)}choose one of {', '.join(choices)}")
    return str(value)
