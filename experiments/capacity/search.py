"""The search for the highest rate that keeps the SLO: which rate to try next. It does not know how a rate is tried."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple

MAX_DOUBLINGS = 10  # from the start, up or down: a factor of about a thousand
BESIDE = (0.8, 1.1, 1.25)  # tried at the end: the bracket's lower end times 0.8, its upper end times the others


class Ask(NamedTuple):
    """A rate to try. is_whole: the run may not be stopped early."""

    value: float
    is_whole: bool = False


class Bracket(NamedTuple):
    """The result of a search. kept: the highest rate found that keeps the SLO, with no failing rate found below it.
    failed: the lowest rate above it that fails. None: there is none within MAX_DOUBLINGS of the start."""

    kept: float | None
    failed: float | None


Search = Generator[Ask, bool, Bracket]


def search(start: float, tolerance: float) -> Search:
    """Doubles or halves from the start until the limit is between two rates, then bisects (by the geometric mean) until
    these are within `tolerance` of each other. The caller sends whether the yielded rate keeps the SLO."""
    bracket = yield from _bracket(start)
    kept, failed = bracket
    while kept is not None and failed is not None and failed > kept * (1 + tolerance):
        middle = rounded(math.sqrt(kept * failed))
        if not kept < middle < failed:
            break
        if (yield Ask(middle)):
            kept = middle
        else:
            failed = middle
    return Bracket(kept, failed)


def beside(bracket: Bracket) -> list[Ask]:
    """Rates next to the bracket, for the figure and because a rate above a failing one may keep the SLO."""
    kept, failed = bracket
    if kept is None or failed is None:
        return []
    return [Ask(rounded(factor * (kept if factor < 1 else failed)), True) for factor in BESIDE]


def _bracket(start: float) -> Search:
    is_kept = yield Ask(start)
    value, factor = start, 2.0 if is_kept else 0.5
    for _ in range(MAX_DOUBLINGS):
        before, value = value, rounded(value * factor)
        if (yield Ask(value)) != is_kept:
            return Bracket(before, value) if is_kept else Bracket(value, before)
    return Bracket(value, None) if is_kept else Bracket(None, value)


def rounded(value: float) -> float:
    """The rate with five significant digits, so that it is easy to type."""
    return float(f"{value:.5g}")
