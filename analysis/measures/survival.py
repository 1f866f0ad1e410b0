"""Quantiles and means of latencies when some requests never finished.

A request that is unfinished when the run ends has a latency of *at least* what it has waited: it is right-censored. To
drop it flatters the system exactly when it is overloaded. The Kaplan-Meier estimator (Kaplan and Meier, 1958) keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from analysis.reading.frames import json_safe
from analysis.reading.rows import FloatArray, IntArray

QUANTILES: dict[str, float] = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


def km_steps(observed: FloatArray, censored: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Sorted observed values and the Kaplan-Meier distribution function at each, both `[num_observed]`.

    At equal instants an observed value precedes a censored one, as is the convention. Ties take one step each, whose
    product is the usual tied factor.
    """
    observed = np.sort(observed)
    total = observed.size + censored.size
    if not censored.size:
        return observed, np.asarray(np.arange(1, total + 1) / max(total, 1), dtype=np.float64)
    gone = np.searchsorted(np.sort(censored), observed, side="left")
    at_risk = total - np.arange(observed.size) - gone
    return observed, np.asarray(1.0 - np.cumprod(1.0 - 1.0 / at_risk), dtype=np.float64)


class Position(NamedTuple):
    """Where a quantile lies among the sorted observed values: `share` of the way from one to the next."""

    low: int
    high: int
    share: float

    def between(self, low: float, high: float) -> float:
        """The quantile from those two values: `np.quantile([low, high], share)`, to the last bit."""
        step = high - low
        return float(low + step * self.share if self.share < 0.5 else high - step * (1 - self.share))


def km_positions(num_between: IntArray, levels: Iterable[float]) -> list[Position | None]:
    """Where the quantiles at `levels` lie; None where censoring leaves a level unreached (or nothing was observed).

    num_between: how many observed values lie before the first censored one, between it and the second, ..., after the
    last; one at a censored value lies before it.

    What a censored value weighs is spread over the values after it (Efron, 1967), each of which then counts as
    F-jump * n copies; between those the quantile is linear as numpy's default, to which it is equal without censoring.
    """
    num_observed, num_censored = int(num_between.sum()), num_between.size - 1
    total = num_observed + num_censored
    if not num_observed:
        return [None for _ in levels]
    if not num_censored:
        places = [(num_observed - 1) * level for level in levels]
        return [Position(int(x), min(int(x) + 1, num_observed - 1), x - int(x)) for x in places]
    first = np.cumsum(num_between) - num_between  # index of the first observed value of each stretch
    at_risk = np.maximum(total - first - np.arange(num_between.size), 1)
    after = np.cumprod(1.0 - num_between / at_risk)  # survival at the end of each stretch
    share = 1.0 / total
    found: list[Position | None] = []
    for level in levels:
        wanted = level * (1.0 - share)
        stretch = int(np.searchsorted(1.0 - after, wanted, side="left"))
        if stretch == num_between.size:
            found.append(None)
            continue
        before, risk = (after[stretch - 1] if stretch else 1.0), int(at_risk[stretch])
        nth = math.ceil(risk * (1.0 - (1.0 - wanted) / before))
        nth = min(max(nth, 1), int(num_between[stretch]))
        index = int(first[stretch]) + nth - 1
        last_copy = (1.0 - before * (risk - nth) / risk - share) / (1.0 - share)
        beyond = (level - last_copy) * (1.0 - share) / share
        if index < num_observed - 1:
            found.append(Position(index, index + 1, min(max(beyond, 0.0), 1.0)))
        else:
            found.append(Position(index, index, 0.0) if level <= last_copy + 1e-12 else None)
    return found


def km_quantiles(observed: FloatArray, censored: FloatArray, levels: Iterable[float]) -> list[float | None]:
    """Quantiles at `levels` (see `km_positions`)."""
    before = np.searchsorted(np.sort(censored), observed, side="left")
    positions = km_positions(np.bincount(before, minlength=censored.size + 1), levels)
    ranks = sorted({rank for position in positions if position is not None for rank in position[:2]})
    values = np.partition(observed, ranks) if ranks else observed
    return [None if at is None else at.between(values[at.low], values[at.high]) for at in positions]


def distribution(observed: FloatArray, censored: FloatArray | None = None) -> dict[str, Any]:
    """Mean, P50, P90, P95, P99 and counts, JSON-safe, in the unit of the input; None is "not reached".

    With censored values the mean cannot be known: `mean` is None and `mean_at_least` is the mean with every censored
    value at its lower bound.
    """
    observed = observed[~np.isnan(observed)]
    censored = np.empty(0) if censored is None else censored[~np.isnan(censored)]
    everything = np.concatenate((observed, censored)) if censored.size else observed
    mean = float(np.mean(everything)) if everything.size else None
    return described(mean, km_quantiles(observed, censored, QUANTILES.values()), observed.size, censored.size)


def described(
    mean: float | None, quantiles: list[float | None], num_observed: int, num_censored: int
) -> dict[str, Any]:
    """What `distribution` says. mean: of all values, censored ones at their lower bound; None where there is none."""
    result: dict[str, Any] = {"mean": None}
    if mean is not None:
        result["mean_at_least" if num_censored else "mean"] = mean
    result.update(zip(QUANTILES, quantiles, strict=True))
    result |= {"count": num_observed, "num_censored": num_censored}
    safe: dict[str, Any] = json_safe(result)
    return safe
