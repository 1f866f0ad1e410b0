"""The answer to whether a sequence may have blocks."""

from __future__ import annotations

from enum import Enum, auto


class Verdict(Enum):
    """May it be admitted, or swapped: now, later, or never?"""

    OK = auto()
    LATER = auto()
    NEVER = auto()
