"""Statistics that are valid for serving experiments.

The unit is the replicate (a seed, or a trace window), never the request: requests of one run queue behind each other
and are far from independent. Variants share each replicate's trace, so differences are paired (common random numbers).
If there is only one run, a circular-block bootstrap keeps the dependence within blocks. Everything is deterministic in
`seed`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from analysis.reading.rows import FloatArray

EQUAL, ALIKE = "equal in every replicate", "the same difference in every replicate"  # methods for zero spread
LEVEL = 0.95  # confidence level of intervals
ALPHA = 0.05  # significance level of claims
Scale = Literal["difference", "log_ratio"]
Verdict = Literal[
    "identical", "equivalent", "inside the noise", "inside the engine's noise", "undecided", "higher", "lower",
    "unknown",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its confidence interval. On the scale "log_ratio", `percent()` returns it as a relative change."""

    value: float
    low: float
    high: float
    num: int  # replicates (or observations, for one run)
    method: str
    scale: Scale = "difference"
    level: float = LEVEL
    p_value: float | None = None

    @property
    def is_within_trace(self) -> bool:
        """Whether it is of the requests of one trace, not of replicates."""
        return self.method.startswith("circular blocks")

    def percent(self) -> tuple[float, float, float]:
        """(value, low, high) as relative changes in percent. Raises ValueError unless the scale is "log_ratio"."""
        if self.scale != "log_ratio":
            raise ValueError("percent() needs an estimate on the scale log_ratio")
        value, low, high = (100.0 * math.expm1(min(x, 700.0)) for x in (self.value, self.low, self.high))
        return value, low, high


def differences(base: FloatArray, other: FloatArray, *, are_shares: bool = False) -> tuple[FloatArray, Scale]:
    """The differences of pairs of non-negative values: log-ratios, which are relative changes. For shares, and if a
    value is 0 (which has no ratio), plain differences for all pairs."""
    if (base == other).all():
        return np.zeros_like(base), "log_ratio"
    if min(base.min(), other.min()) > 0 and not are_shares:
        return np.log(other / base), "log_ratio"
    return other - base, "difference"


def mean_of_all(values: Sequence[float | None]) -> float | None:
    """The mean; None if a value is missing or there are no values."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def spread(values: Sequence[float]) -> float:
    """How far values are apart: largest / smallest - 1; infinite if the smallest is 0 and the largest is not."""
    low, high = min(values), max(values)
    return 0.0 if low == high else high / low - 1.0 if low > 0 else math.inf


def largest_spread(groups: Iterable[Sequence[float | None]]) -> float | None:
    """The largest `spread` of the known values of a group; None if no group has two."""
    known = [[value for value in values if value is not None] for values in groups]
    return max((spread(values) for values in known if len(values) > 1), default=None)


ENOUGH = 4  # repeats, whose largest difference bounds what noise does


def widened(spread: float, num_repeats: int) -> float:
    """A bound of what noise does, from the largest `spread` of `num_repeats` repeats (runs after the first of their
    kind). Fewer than ENOUGH hardly say how large it is: its logarithm is multiplied by Student's t of that many degrees
    of freedom over that of ENOUGH, which is 4.6 for one repeat (of two equal runs, one half differ by more than two
    others did)."""
    if num_repeats >= ENOUGH or not spread:
        return spread
    from scipy import stats  # slow to import

    few, enough = (float(stats.t.ppf(0.5 + LEVEL / 2, num)) for num in (num_repeats, ENOUGH))
    return math.expm1(math.log1p(spread) * few / enough)


def mean_t(
    differences: FloatArray,
    scale: Scale = "difference",
    level: float = LEVEL,
    correlation: float = 0.0,
    limit: float = math.inf,
) -> Estimate:
    """Mean of replicates `[num_replicates]` with Student's interval and two-sided p-value (Student, 1908).

    correlation: between the replicates, below 1; above 0 if they are drawn from one record. They then differ less from
    each other than from other records: the variance of their mean is not s^2 / num, but s^2 (1 / num + correlation /
    (1 - correlation)) (Nadeau and Bengio, 2003).
    limit: no difference can be larger, as 1 for shares. A finite interval is cut there, and covers the mean as often as
    before, as that does not lie beyond.
    One replicate gives an infinite interval and no p-value. If all values are equal and not 0, there is no spread to
    judge by. With enough replicates for the sign test (2^(1 - num) < 1 - level: six at 95 %) the interval is a point
    with that test's p-value (Arbuthnot, 1710); with fewer, or correlated ones, it is infinite, without a p-value. All
    0: a point at 0.
    """
    mean, num = float(differences.mean()), differences.size
    variance = 1.0 / num + correlation / (1.0 - correlation)  # of the mean, relative to that of a replicate
    error = float(differences.std(ddof=1)) * math.sqrt(variance) if num > 1 else 0.0
    if mean == error == 0.0:
        return Estimate(0.0, 0.0, 0.0, num, EQUAL, scale, level)
    if error <= 1e-12 * abs(mean):
        p_value = 2.0 ** (1 - num)
        if num > 1 and not correlation and p_value < 1 - level:
            return Estimate(mean, mean, mean, num, ALIKE, scale, level, p_value)
        return Estimate(mean, -math.inf, math.inf, num, ALIKE if num > 1 else "paired t", scale, level)
    from scipy import stats  # slow to import

    half = float(stats.t.ppf(0.5 + level / 2, num - 1)) * error
    p_value = 2.0 * float(stats.t.sf(abs(mean / error), num - 1))
    low, high = max(mean - half, -limit), min(mean + half, limit)
    return Estimate(mean, low, high, num, "paired t", scale, level, p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (Holm, 1979), in the order given; they control the family-wise error rate."""
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def false_discovery(p_values: Sequence[float]) -> list[float]:
    """Benjamini and Hochberg's adjusted p-values (1995), in the order given: of what is claimed, at most the level is
    expected to be false; if all are null, anything is claimed no more often than that. For p-values that depend on each
    other positively, as those of metrics of the same runs."""
    if len(p_values) < 2:
        return list(p_values)
    from scipy import stats  # slow to import

    return [float(p) for p in stats.false_discovery_control(p_values)]


def block_length(values: ArrayLike) -> int:
    """The length of a block for a series `[n]`: (sqrt(6) rho / (1 - rho^2))^(2/3) n^(1/3), within [1, n / 4].

    This is the rule for an AR(1) with lag-1 autocorrelation rho (Carlstein, 1986; Andrews, 1991; Lahiri, 2003).
    """
    series = np.asarray(values, dtype=np.float64)
    series = series - series.mean() if series.size else series
    power = float((series**2).sum())
    rho = float((series[1:] * series[:-1]).sum()) / power if power > 0 else 0.0
    rho = min(max(abs(rho), 0.0), 0.99)
    length = math.pow(math.sqrt(6.0) * rho / (1.0 - rho * rho), 2.0 / 3.0) * math.pow(series.size, 1.0 / 3.0)
    return max(1, min(math.ceil(length), int(series.size) // 4))


def circular_blocks(
    values: ArrayLike,
    statistic: Callable[[FloatArray], float] = lambda rows: float(rows.mean()),
    num_resamples: int = 1_000,
    seed: int = 0,
    scale: Scale = "difference",
) -> Estimate:
    """A statistic of one run's series in arrival order, with a circular-block bootstrap interval (Politis and
    Romano, 1992): the series is closed to a circle, or its ends, where a queue is shortest and longest, are drawn less.

    `values` is `[n]`, or `[n, k]` whose rows are resampled together (paired requests of two variants); `statistic` gets
    an array of the same shape. The interval covers the variation within this run, not that between traces.
    """
    rows = np.asarray(values, dtype=np.float64)
    num = rows.shape[0]
    value = float(statistic(rows))
    if num < 8:
        return Estimate(value, -math.inf, math.inf, num, "circular blocks", scale)
    columns = rows.reshape(num, -1)
    size = max(block_length(column) for column in columns.T)
    rng = np.random.default_rng(seed)
    offsets, count = np.arange(size), math.ceil(num / size)
    drawn = np.empty(num_resamples)
    for index in range(num_resamples):
        starts = rng.integers(0, num, size=count)
        drawn[index] = statistic(rows[(starts[:, None] + offsets).ravel()[:num] % num])
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high), num, f"circular blocks of {size}", scale)


def wilson(successes: int, total: int) -> tuple[float, float]:
    """Wilson's score interval for a share (Wilson, 1927). ValueError unless 0 <= successes <= total and total > 0."""
    if not 0 <= successes <= total or total <= 0:
        raise ValueError(f"a share needs 0 <= successes <= total, total > 0; got {successes} of {total}")
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    share = successes / total
    centre = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    low = 0.0 if successes == 0 else (centre - half) / scale
    high = 1.0 if successes == total else (centre + half) / scale
    return low, high


def mser5(values: ArrayLike) -> int:
    """The number of leading observations to cut as warm-up: MSER-5 (White, 1997); 0 for fewer than 20 observations.

    The cut minimises the squared standard error of the remaining observations, over means of batches of five. Only the
    first half is searched, as the rule is unreliable beyond it.
    """
    series = np.asarray(values, dtype=np.float64)
    batches = series[: series.size // 5 * 5].reshape(-1, 5).mean(axis=1)
    if batches.size < 4:
        return 0
    kept = np.arange(batches.size, 0, -1, dtype=np.float64)
    centred = batches - batches.mean()
    sums, squares = np.cumsum(centred[::-1])[::-1], np.cumsum((centred**2)[::-1])[::-1]
    errors = (squares - sums**2 / kept) / kept**2
    return 5 * int(np.argmin(errors[: batches.size // 2 + 1]))


def effect_size(differences: FloatArray) -> float | None:
    """Cohen's d_z of paired replicates with Hedges' correction: mean difference / its SD; None if the SD is 0."""
    if differences.size < 2 or float(differences.std(ddof=1)) <= 1e-12 * abs(float(differences.mean())):
        return None
    correction = 1.0 - 3.0 / (4.0 * (differences.size - 1) - 1.0) if differences.size > 2 else 1.0
    return correction * float(differences.mean()) / float(differences.std(ddof=1))


def verdict(estimate: Estimate, margin: float = 0.0, p_value: float | None = None) -> Verdict:
    """The verdict that an interval supports; `margin` is the equivalence margin on the estimate's own scale.

    "equivalent": the whole interval lies within the margin. "inside the noise": it contains 0. "undecided": it does
    not, and the corrected `p_value`, if given, is not below ALPHA. "identical": no difference in any replicate.
    "unknown": no finite interval, or ALIKE, which knows of no noise, with such a p-value.
    """
    if not (math.isfinite(estimate.low) and math.isfinite(estimate.high)):
        return "unknown"
    if estimate.value == estimate.low == estimate.high == 0.0:
        return "identical"
    if margin > 0 and -margin <= estimate.low and estimate.high <= margin:
        return "equivalent"
    is_undecided = p_value is not None and p_value >= ALPHA
    if estimate.low <= 0.0 <= estimate.high or is_undecided:
        if estimate.method == ALIKE:
            return "unknown"
        return "inside the noise" if estimate.low <= 0.0 <= estimate.high else "undecided"
    return "higher" if estimate.value > 0 else "lower"
