"""The distribution of more values than fit in memory, such as the gaps between all tokens of a run: exact.

The values are gone through twice. The first time they are counted in narrow buckets, which tells in which ones the
quantiles lie; the second time the values of those few buckets are kept, each once, with how often it comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from analysis.rows import FloatArray, IntArray, exact_sum
from analysis.survival import QUANTILES, described, km_positions

_SHIFT = 40  # of a float64's bits: 12 of the fraction stay, so a bucket is 1/4096 wide, relative to its values
_FIRST = (int(np.array(1.0).view(np.int64)) >> _SHIFT) - 1
_NUM_BUCKETS = (63 << (52 - _SHIFT)) + 2


def pooled_distribution(passes: Callable[[], Iterator[IntArray]], censored_ns: FloatArray) -> dict[str, object]:
    """`survival.distribution` in seconds, of whole ns. passes: goes through all observed values, from the start."""
    bounds = np.sort(censored_ns[~np.isnan(censored_ns)])
    in_bucket = np.zeros(_NUM_BUCKETS, dtype=np.int64)
    num_between = np.zeros(bounds.size + 1, dtype=np.int64)
    total_ns = 0
    for values in passes():
        buckets = _bucket(values)
        low = int(buckets.min(initial=_NUM_BUCKETS))
        counts = np.bincount(buckets - low)
        in_bucket[low : low + counts.size] += counts
        num_between += _stretches(bounds, values)
        total_ns += exact_sum(values)
    num = int(num_between.sum())
    positions = km_positions(num_between, QUANTILES.values())
    ranks = sorted({rank for position in positions if position is not None for rank in position[:2]})
    values_at = _values_at(passes, in_bucket, ranks)
    quantiles = [
        None if at is None else at.between(values_at[at.low] / 1e9, values_at[at.high] / 1e9) for at in positions
    ]
    size = num + bounds.size
    mean = (total_ns + math.fsum(bounds)) / size / 1e9 if size else None
    return described(mean, quantiles, num, bounds.size)


def _stretches(bounds: FloatArray, values: IntArray) -> IntArray:
    """How many values lie before the first of the sorted bounds (or at it), up to the second, ..., after the last."""
    if not bounds.size:
        return np.array([values.size])
    return np.bincount(np.searchsorted(bounds, values, side="left"), minlength=bounds.size + 1)


def _bucket(values: IntArray) -> IntArray:
    """The bucket of each value `[num_values]`, ascending with it."""
    bits: IntArray = (values.astype(np.float64).view(np.int64) >> _SHIFT) - _FIRST
    return np.clip(bits, 0, _NUM_BUCKETS - 1, out=bits)


def _values_at(passes: Callable[[], Iterator[IntArray]], in_bucket: IntArray, ranks: list[int]) -> dict[int, int]:
    """The values that come at `ranks` in ascending order."""
    if not ranks:
        return {}
    until = np.cumsum(in_bucket)
    is_wanted = np.zeros(in_bucket.size, dtype=np.bool_)
    is_wanted[np.searchsorted(until, ranks, side="right")] = True
    values, counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    for batch in passes():
        more, num = np.unique(batch[is_wanted[_bucket(batch)]], return_counts=True)
        values, where = np.unique(np.concatenate((values, more)), return_inverse=True)
        counts = np.bincount(where, weights=np.concatenate((counts, num)), minlength=values.size).astype(np.int64)
    # ranks among what was kept: less what lies in buckets that were not
    kept_before = np.cumsum(np.where(is_wanted, in_bucket, 0)) - np.where(is_wanted, in_bucket, 0)
    at = {rank: int(np.searchsorted(until, rank, side="right")) for rank in ranks}
    last = np.cumsum(counts)
    found = {}
    for rank, bucket in at.items():
        among = rank - int(until[bucket] - in_bucket[bucket]) + int(kept_before[bucket])
        found[rank] = int(values[np.searchsorted(last, among, side="right")])
    return found
