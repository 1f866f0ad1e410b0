"""Writes a comparison in a few words and numbers, for sentences, table cells and labels of bars.

Changes are in percent; changes of shares, such as SLO attainment, are in percentage points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from analysis import format as fmt
from analysis.comparison.compare import Comparison, Metric
from analysis.comparison.effects import Effect
from analysis.naming import factor_name, level_text

_UNLIKE_BY = 0.05  # of the baseline, and of what is several times as much


def no_more_than(verdicts: Collection[str], margin: float) -> str:
    """What differences without a claim do not exceed: "the noise", "±2 %", or either."""
    said = ["the noise"] * (not {"inside the noise", "inside the engine's noise"}.isdisjoint(verdicts))
    said += [f"±{margin * 100:g} %"] * ("equivalent" in verdicts)
    return " or ".join(said) or "the noise"


def change_text(comparison: Comparison) -> str:
    """The change: "−23 %", "−2.1 points", or "from 3.1 req/s to 0 req/s" to and from 0; "" without an estimate."""
    estimate, write = comparison.estimate, comparison.metric.write
    if estimate is None:
        return ""
    if comparison.verdict == "identical":
        return fmt.points(0.0) if comparison.metric.is_share else f"0{fmt.SPACE}%"
    if estimate.scale == "log_ratio":
        return _written(comparison)[0]
    if comparison.metric.is_share:
        return fmt.points(estimate.value)
    base = comparison.base or 0.0
    return f"from {write(base)} to {write(base + estimate.value)}"


def reached_text(comparison: Comparison) -> str:
    """The change and the arm's mean: "−23 %, to 1.2 s"; the change of the arms' means in its place, if that `is_unlike`
    the other; only the change if this has the mean already, or none is."""
    said, value, base = change_text(comparison), comparison.value, comparison.base
    if value is None or said.startswith("from "):
        return said
    if base and is_unlike(comparison, base):
        written = _written(comparison, 100 * (value / base - 1))
        return f"{written[0]}, of the means {written[-1]}"
    return f"{said}, to {comparison.metric.write(value)}"


def is_unlike(comparison: Comparison, base: float | None) -> bool:
    """Whether a change over replicates differs by more than _UNLIKE_BY from that of the means, or has the other sign:
    it is a mean of ratios, in which a small value counts as much as a large one. base: the baseline's mean."""
    estimate, value = comparison.estimate, comparison.value
    if estimate is None or estimate.scale != "log_ratio" or estimate.is_within_trace:
        return False
    if not value or not base:
        return False
    ratio, of_means = math.exp(estimate.value), value / base
    is_opposed = comparison.is_claim and (ratio - 1) * (of_means - 1) < 0
    return is_opposed or abs(ratio - of_means) > _UNLIKE_BY * max(1.0, ratio)


def difference_text(metric: Metric, difference: float) -> str:
    return fmt.points(difference) if metric.is_share else metric.write(difference)


def bounds_text(comparison: Comparison) -> str:
    """The 95 % interval: "[−28, −18]" in percent or points, "by [low, high]" for other differences; "" without one."""
    estimate = comparison.estimate
    if estimate is None or not has_bounds(comparison):
        return ""
    if estimate.scale == "difference":
        low, high = (difference_text(comparison.metric, end) for end in (estimate.low, estimate.high))
        if comparison.metric.is_share:
            return f"[{low.removesuffix(fmt.POINTS)},{fmt.SPACE}{high.removesuffix(fmt.POINTS)}]"
        low, high = (f"+{text}" if end > 0 else text for text, end in ((low, estimate.low), (high, estimate.high)))
        return f"by [{low}, {high}]"
    low, high = (end.removesuffix(f"{fmt.SPACE}%") for end in _written(comparison)[1:])
    return f"[{low},{fmt.SPACE}{high}]"


def has_bounds(comparison: Comparison) -> bool:
    """Whether the change has an interval that says something."""
    return comparison.verdict not in ("identical", "unknown")


def _written(comparison: Comparison, *others: float) -> list[str]:
    """A relative change, its interval if it has one, and other changes (%), in one notation: percent or factors."""
    assert comparison.estimate is not None
    return fmt.changes([*comparison.estimate.percent()[: 3 if has_bounds(comparison) else 1], *others])


def interval_text(comparison: Comparison) -> str:
    """The change and its interval, "−23 % [−28, −18]"; "" without both."""
    return " ".join(text for text in (change_text(comparison), bounds_text(comparison)) if text)


def correction_text(comparison: Comparison) -> str:
    """The corrected p-value of a change that is undecided; else ""."""
    return f"corrected p = {comparison.p_corrected:.2g}" if comparison.verdict == "undecided" else ""


def verdict_text(comparison: Comparison, margin: float) -> str:
    """The verdict in words for a table cell."""
    estimate = comparison.estimate
    if comparison.is_alike and estimate is not None:
        return f"the same in all {estimate.num} replicates"
    if corrected := correction_text(comparison):
        return f"undecided ({corrected})"
    if comparison.is_claim:
        return comparison.claim
    unknown = "not comparable" if estimate is None else "no interval"
    of = " of the baseline's" if comparison.metric.is_share else ""  # to distinguish it from points
    words = {"equivalent": f"equivalent (±{margin * 100:g}{fmt.SPACE}%{of})", "unknown": unknown}
    return words.get(comparison.verdict, comparison.verdict)


def undecided(rows: Sequence[tuple[str, Comparison]]) -> list[str]:
    """A sentence on the largest change that is undecided, if any is. rows: with the names of what they compare."""
    those = [(name, row) for name, row in rows if row.verdict == "undecided"]
    if not those:
        return []
    name, row = max(those, key=lambda item: item[1].size)
    are = f"and {fmt.count(len(those) - 1, 'other change')} are" if len(those) > 1 else "is"
    told = f"{row.metric.label} of {name} ({interval_text(row)}, {correction_text(row)})"
    return [f"{told[0].upper()}{told[1:]} {are} undecided: more replicates or longer traces would tell."]


def step_text(effect: Effect) -> str:
    """The change of the factor: "prefix caching on instead of off"."""
    level, base = (level_text(effect.factor, one) for one in (effect.level, effect.base_level))
    return f"{factor_name(effect.factor)} {level} instead of {base}"


def cells_text(effect: Effect, told: Callable[[Comparison], str]) -> str:
    """An interaction: "goodput is worse with prefix caching on (−2.6 %) and better with prefix caching off (+13 %)"."""
    words = {"unknown": "without an interval"}
    texts = [f"{end.claim or words.get(end.verdict, end.verdict)} with {end.arm} ({told(end)})" for end in effect.ends]
    return f"{effect.comparison.metric.label} is {' and '.join(texts)}"


def winner_text(winner: Any) -> str:
    """The table cell for sim_winner or real_winner of a row of `fidelity.ranking_agreement`."""
    return winner or "several" if isinstance(winner, str) else fmt.NOTHING
