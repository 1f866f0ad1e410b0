"""The result of a test whether a sequence gets blocks."""

from __future__ import annotations

from enum import Enum, auto


class Verdict(Enum):
    """Whether a sequence can be admitted or swapped: now, later, or never."""

    OK = auto()
    LATER = auto()
    NEVER = auto()
