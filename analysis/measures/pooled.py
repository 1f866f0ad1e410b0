"""The distribution of more values than fit in memory, such as the gaps between all tokens of a run: exact.

The values are gone through twice. The first time they are counted in narrow buckets, which tells in which ones the
quantiles lie; the second time the values of those few buckets are kept, each once, with how often it comes. What is
censored is kept whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.measures.survival import QUANTILES, described, km_positions
from analysis.reading.rows import FloatArray, IntArray, exact_sum

_SHIFT = 42  # of a float64's bits: 10 of the fraction stay, so a bucket is 1/1024 wide, relative to its values
_FIRST = (int(np.array(2.0**-40).view(np.int64)) >> _SHIFT) - 1
_NUM_BUCKETS = (103 << (52 - _SHIFT)) + 2
Values = NDArray[Any]  # int64, of ns, or float64, of seconds; not negative


class Pool:
    """One distribution: `count` for all values, then `settle`, then `keep` for all values again, then `described`."""

    def __init__(self, censored: FloatArray, unit: float = 1.0) -> None:
        """censored: what unfinished values have reached. unit: what a value is divided by to be told."""
        self._bounds = np.sort(censored[~np.isnan(censored)])
        self._unit = unit
        self._in_bucket = np.zeros(_NUM_BUCKETS, dtype=np.int64)
        self._num_between = np.zeros(self._bounds.size + 1, dtype=np.int64)
        self._total: float = 0
        self._kept: Values = np.empty(0, dtype=np.int64)
        self._num_kept = np.empty(0, dtype=np.int64)  # of each value of `_kept`

    def count(self, values: Values) -> None:
        buckets = _bucket(values)
        low = int(buckets.min(initial=_NUM_BUCKETS))
        counts = np.bincount(buckets - low)
        self._in_bucket[low : low + counts.size] += counts
        self._num_between += _stretches(self._bounds, values)
        self._total += exact_sum(values) if values.dtype.kind == "i" else math.fsum(values)

    def settle(self) -> None:
        """Which buckets are wanted."""
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
        """As `survival.distribution`."""
        num, num_censored = int(self._num_between.sum()), self._bounds.size
        at_rank = {rank: value / self._unit for rank, value in self._values_at_ranks()}
        quantiles = [None if at is None else at.between(at_rank[at.low], at_rank[at.high]) for at in self._positions]
        size = num + num_censored
        mean = (self._total + math.fsum(self._bounds)) / size / self._unit if size else None
        return described(mean, quantiles, num, num_censored)

    def _values_at_ranks(self) -> Iterator[tuple[int, float]]:
        """(rank, value) of those that the quantiles lie between."""
        wanted = np.where(self._is_wanted, self._in_bucket, 0)
        kept_before = np.cumsum(wanted) - wanted
        last = np.cumsum(self._num_kept)
        for rank, bucket in self._bucket_of.items():
            among = rank - int(self._until[bucket] - self._in_bucket[bucket]) + int(kept_before[bucket])
            yield rank, self._kept[np.searchsorted(last, among, side="right")].item()


def pooled_distributions(
    pools: Mapping[str, Pool], passes: Callable[[], Iterator[tuple[str, Iterable[Values]]]]
) -> dict[str, dict[str, Any]]:
    """`described` of each pool. passes: goes through (pool's name, its next values) of all, from the start."""
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
    """How many values lie before the first of the sorted bounds (or at it), up to the second, ..., after the last."""
    if not bounds.size:
        return np.array([values.size])
    return np.bincount(np.searchsorted(bounds, values, side="left"), minlength=bounds.size + 1)


def _bucket(values: Values) -> IntArray:
    """The bucket of each value `[num_values]`, ascending with it."""
    bits: IntArray = (values.astype(np.float64).view(np.int64) >> _SHIFT) - _FIRST
    return np.clip(bits, 0, _NUM_BUCKETS - 1, out=bits)
