"""Quantiles and means of latencies if some requests never finished.

A request that is unfinished when the run ends has a latency of *at least* the time it has waited: it is right-censored.
Dropping it would flatter the system exactly when it is overloaded. The Kaplan-Meier estimator (Kaplan and Meier, 1958)
takes it into account.

`distribution` is for values that fit in memory. `Pool` is for more values, such as the gaps between all tokens of a
run, and is exact too. It reads the values twice: the first pass counts them in narrow buckets, which shows the buckets
that contain the quantiles; the second pass keeps the distinct values of those few buckets, with their frequencies.
Censored values are all kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from analysis.reading.rows import FloatArray, IntArray, exact_sum

QUANTILES: dict[str, float] = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


def km_steps(observed: FloatArray, censored: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Sorted observed values and the Kaplan-Meier distribution function at each, both `[num_observed]`.

    By convention an observed value precedes an equal censored one. Tied values take one step each; the product of these
    steps is the usual factor for ties.
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
        """The quantile between the two values; equal to `np.quantile([low, high], share)` to the last bit."""
        step = high - low
        return float(low + step * self.share if self.share < 0.5 else high - step * (1 - self.share))


def km_positions(num_between: IntArray, levels: Iterable[float]) -> list[Position | None]:
    """The positions of the quantiles at `levels`; None if a level is not reached due to censoring, or without values.

    num_between: the number of observed values before the first censored one, between it and the second, ..., after the
    last; an observed value that equals a censored one counts as before it.

    The weight of a censored value is spread over the values after it (Efron, 1967): each of these then counts as
    F-jump * n copies. Between them the quantile is linear; without censoring it equals numpy's default.
    """
    num_observed, num_censored = int(num_between.sum()), num_between.size - 1
    total = num_observed + num_censored
    if not num_observed:
        return [None for _ in levels]
    if not num_censored:
        places = [(num_observed - 1) * level for level in levels]
        return [Position(int(x), min(int(x) + 1, num_observed - 1), x - int(x)) for x in places]
    first = np.cumsum(num_between) - num_between  # index of the first observed value between two censored ones
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
    """The quantiles at `levels` (see `km_positions`)."""
    before = np.searchsorted(np.sort(censored), observed, side="left")
    positions = km_positions(np.bincount(before, minlength=censored.size + 1), levels)
    ranks = sorted({rank for position in positions if position is not None for rank in position[:2]})
    values = np.partition(observed, ranks) if ranks else observed
    return [None if at is None else at.between(values[at.low], values[at.high]) for at in positions]


def distribution(observed: FloatArray, censored: FloatArray | None = None) -> dict[str, Any]:
    """Mean, P50, P90, P95, P99 and counts, JSON-safe, in the unit of the input; None means "not reached".

    With censored values the mean is unknown: `mean` is None, and `mean_at_least` is the mean with every censored value
    at its lower bound.
    """
    observed = observed[~np.isnan(observed)]
    censored = np.empty(0) if censored is None else censored[~np.isnan(censored)]
    everything = np.concatenate((observed, censored)) if censored.size else observed
    mean = float(np.mean(everything)) if everything.size else None
    return described(mean, km_quantiles(observed, censored, QUANTILES.values()), observed.size, censored.size)


def described(
    mean: float | None, quantiles: list[float | None], num_observed: int, num_censored: int
) -> dict[str, Any]:
    """The result of `distribution`. mean: of all values, censored ones at their lower bound; None without values."""
    result: dict[str, Any] = {"mean": None}
    if mean is not None:
        result["mean_at_least" if num_censored else "mean"] = mean
    counts = {"count": num_observed, "num_censored": num_censored}
    return result | dict(zip(QUANTILES, quantiles, strict=True)) | counts


# --- more values than fit in memory ---

_SHIFT = 42  # drops bits of a float64 such that 10 of the fraction stay: a bucket's relative width is 1/1024
_FIRST = (int(np.array(2.0**-40).view(np.int64)) >> _SHIFT) - 1
_NUM_BUCKETS = (103 << (52 - _SHIFT)) + 2
Values = NDArray[Any]  # int64 (ns) or float64 (seconds); not negative


class Pool:
    """A distribution in two passes: `count` all values, call `settle`, `keep` all values, then call `described`."""

    def __init__(self, censored: FloatArray, unit: float = 1.0) -> None:
        """censored: lower bounds of the censored values. unit: the divisor of all values in the result."""
        self._bounds = np.sort(censored[~np.isnan(censored)])
        self._unit = unit
        self._in_bucket = np.zeros(_NUM_BUCKETS, dtype=np.int64)
        self._num_between = np.zeros(self._bounds.size + 1, dtype=np.int64)
        self._total: float = 0
        self._kept: Values = np.empty(0, dtype=np.int64)
        self._num_kept = np.empty(0, dtype=np.int64)  # frequency of each value of `_kept`

    def count(self, values: Values) -> None:
        buckets = _bucket(values)
        low = int(buckets.min(initial=_NUM_BUCKETS))
        counts = np.bincount(buckets - low)
        self._in_bucket[low : low + counts.size] += counts
        self._num_between += _stretches(self._bounds, values)
        self._total += exact_sum(values) if values.dtype.kind == "i" else math.fsum(values)

    def settle(self) -> None:
        """Determines the buckets that contain the quantiles."""
        self._positions = km_positions(self._num_between, QUANTILES.values())
        self._until = np.cumsum(self._in_bucket)
        self._is_wanted = np.zeros(_NUM_BUCKETS, dtype=np.bool_)
        ranks = sorted({rank for at in self._positions if at is not None for rank in at[:2]})
        self._bucket_of = {rank: int(np.searchsorted(self._until, rank, side="right")) for rank in ranks}
        self._is_wanted[list(self._bucket_of.values())] = True

    def keep(self, values: Values) -> None:
        more, num = np.unique(values[self._is_wanted[_bucket(values)]], return_counts=True)
        self._kept, where = np.unique(np.concatenate((self._kept.astype(more.dtype), more)), return_inverse=True)
        weights = np.concatenate((self._num_kept, num))
        self._num_kept = np.bincount(where, weights=weights, minlength=self._kept.size).astype(np.int64)

    def described(self) -> dict[str, Any]:
        """The same result as that of `distribution`."""
        num, num_censored = int(self._num_between.sum()), self._bounds.size
        at_rank = {rank: value / self._unit for rank, value in self._values_at_ranks()}
        quantiles = [None if at is None else at.between(at_rank[at.low], at_rank[at.high]) for at in self._positions]
        size = num + num_censored
        mean = (self._total + math.fsum(self._bounds)) / size / self._unit if size else None
        return described(mean, quantiles, num, num_censored)

    def _values_at_ranks(self) -> Iterator[tuple[int, float]]:
        """(rank, value) for each observed value that a quantile lies between."""
        wanted = np.where(self._is_wanted, self._in_bucket, 0)
        kept_before = np.cumsum(wanted) - wanted
        last = np.cumsum(self._num_kept)
        for rank, bucket in self._bucket_of.items():
            among = rank - int(self._until[bucket] - self._in_bucket[bucket]) + int(kept_before[bucket])
            yield rank, self._kept[np.searchsorted(last, among, side="right")].item()


def pooled_distributions(
    pools: Mapping[str, Pool], passes: Callable[[], Iterator[tuple[str, Iterable[Values]]]]
) -> dict[str, dict[str, Any]]:
    """`described` of each pool. passes: each call iterates over all (pool's name, its next values) from the start."""
    for name, parts in passes():
        for values in parts:
            pools[name].count(values)
    for pool in pools.values():
        pool.settle()
    for name, parts in passes():
        for values in parts:
            pools[name].keep(values)
    return {name: pool.described() for name, pool in pools.items()}


def _stretches(bounds: FloatArray, values: Values) -> IntArray:
    """The number of values up to the first of the sorted bounds (inclusive), up to the second, ..., after the last."""
    if not bounds.size:
        return np.array([values.size])
    return np.bincount(np.searchsorted(bounds, values, side="left"), minlength=bounds.size + 1)


def _bucket(values: Values) -> IntArray:
    """The bucket of each value `[num_values]`; larger values never have lower buckets."""
    bits: IntArray = (values.astype(np.float64).view(np.int64) >> _SHIFT) - _FIRST
    return np.clip(bits, 0, _NUM_BUCKETS - 1, out=bits)
