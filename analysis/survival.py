"""Quantiles and means of latencies when some requests never finished.

A request that is unfinished when the run ends has a latency of *at least* what it has waited: it is right-censored. To
drop it flatters the system exactly when it is overloaded. The Kaplan-Meier estimator (Kaplan and Meier, 1958) keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from analysis.frames import json_safe
from analysis.rows import FloatArray

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


def km_quantiles(observed: FloatArray, censored: FloatArray, levels: Iterable[float]) -> list[float | None]:
    """Quantiles at `levels`; None where censoring leaves the level unreached (or nothing was observed).

    What a censored value weighs is spread over the values after it (Efron, 1967), each of which then counts as
    F-jump * n copies; between those the quantile is linear as numpy's default, to which it is equal without censoring.
    """
    wanted = list(levels)
    if not observed.size:
        return [None] * len(wanted)
    if not censored.size:
        return [float(value) for value in np.quantile(observed, wanted)]
    values, cdf = km_steps(observed, censored)
    share = 1.0 / (observed.size + censored.size)
    first_copy, last_copy = np.append(0.0, cdf[:-1]) / (1.0 - share), (cdf - share) / (1.0 - share)
    position = np.column_stack((first_copy, last_copy)).ravel()
    reached = position[-1] + 1e-12
    return [float(np.interp(q, position, np.repeat(values, 2))) if q <= reached else None for q in wanted]


def distribution(observed: FloatArray, censored: FloatArray | None = None) -> dict[str, Any]:
    """Mean, P50, P90, P95, P99 and counts, JSON-safe, in the unit of the input; None is "not reached".

    With censored values the mean cannot be known: `mean` is None and `mean_at_least` is the mean with every censored
    value at its lower bound.
    """
    observed = observed[~np.isnan(observed)]
    censored = np.empty(0) if censored is None else censored[~np.isnan(censored)]
    everything = np.concatenate((observed, censored)) if censored.size else observed
    result: dict[str, Any] = {"mean": None}
    if everything.size:
        key = "mean_at_least" if censored.size else "mean"
        result[key] = float(np.mean(everything))
    result.update(zip(QUANTILES, km_quantiles(observed, censored, QUANTILES.values()), strict=True))
    result["count"] = int(observed.size)
    result["num_censored"] = int(censored.size)
    safe: dict[str, Any] = json_safe(result)
    return safe
