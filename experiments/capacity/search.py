"""The search for the highest rate that is kept: which rate comes next. It knows nothing of what is behind a rate."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple

MAX_DOUBLINGS = 10  # from the start, up or down: a thousand times
BESIDE = (0.8, 1.1, 1.25)  # rates beside the bracket that are looked at in the end: of its lower and of its upper end


class Ask(NamedTuple):
    """A rate to try. is_whole: to its end, whatever it comes to."""

    value: float
    is_whole: bool = False


class Bracket(NamedTuple):
    """kept: the highest rate found that is kept, none that failed being below it in the search; failed: the next one
    that is not. None: there is none within MAX_DOUBLINGS of the start."""

    kept: float | None
    failed: float | None


Search = Generator[Ask, bool, Bracket]


def search(start: float, tolerance: float, *, looks_beside: bool) -> Search:
    """Doubles or halves from the start until the edge is between two rates, then bisects (by the geometric mean) until
    they are within `tolerance` of each other. It is sent whether the rate asked for was kept.

    looks_beside: afterwards the upper end and rates beside the bracket are tried as a whole, which shows what fails
    there, and whether a rate is kept above one that is not.
    """
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
    if looks_beside:
        if failed is not None:
            yield Ask(failed, True)
        if kept is not None and failed is not None:
            for factor in BESIDE:
                yield Ask(rounded(factor * (kept if factor < 1 else failed)), True)
    return Bracket(kept, failed)


def _bracket(start: float) -> Search:
    is_kept = yield Ask(start)
    value, factor = start, 2.0 if is_kept else 0.5
    for _ in range(MAX_DOUBLINGS):
        before, value = value, rounded(value * factor)
        if (yield Ask(value)) != is_kept:
            return Bracket(before, value) if is_kept else Bracket(value, before)
    return Bracket(value, None) if is_kept else Bracket(None, value)


def rounded(value: float) -> float:
    """A rate that can be typed: five significant digits."""
    return float(f"{value:.5g}")
