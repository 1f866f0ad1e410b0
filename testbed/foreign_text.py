"""Texts that others wrote (JSON, YAML): one way to read them, and one way to show a value of theirs in a message."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_MAX_DIGITS = 4000  # Python writes no longer whole numbers


def parsed(parse: Callable[[str], T], text: str | bytes) -> T:
    """parse(text). Raises ValueError with its reason also for what is nested too deeply, or is not UTF-8 text.

    What else `parse` raises for a bad text is its own.
    """
    try:
        return parse(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None


class _Short(reprlib.Repr):
    """At most some 60 characters of each part, a few parts, two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxlong, self.maxother = 2, 60, 40, 60

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 3 * _MAX_DIGITS:
            return f"a number of {x.bit_length():,} bits"
        return super().repr_int(x, level)


shown = _Short().repr
