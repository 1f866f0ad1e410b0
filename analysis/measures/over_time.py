"""A latency of a run's requests by their arrival: quantiles in windows of time, and the stretch in which it is worst.

Quantiles are those of the summary: of the requests that it counts, and censored as there.
"""

from __future__ import annotations

import math
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from analysis.measures.summary import samples_of
from analysis.measures.survival import km_quantiles
from analysis.reading.request_columns import RequestColumns
from analysis.reading.rows import BoolArray, FloatArray

MIN_REQUESTS = 100  # of a window whose P99 is judged; of fewer it is that of one request
_JUDGED = 20  # windows, at most
_CLEAR = 2.0  # times the median of the windows' P99


class WorstTime(NamedTuple):
    """Consecutive windows, [from_s, to_s), of a P99 that is clearly larger than the usual one, seconds."""

    from_s: float
    to_s: float
    p99: float  # infinite if it is not reached
    usual_p99: float  # of the requests that arrived in no such stretch
    num: int  # such stretches; this one has the worst window


class OverTime:
    """A latency by arrival. counted: the requests and the run's end (ns), as of `Run.counted`; metric: of `samples_of`,
    one value for each request. arrival_s: `[num_requests]`."""

    def __init__(self, counted: tuple[RequestColumns, int], metric: str) -> None:
        samples, cut = samples_of(*counted)
        self.arrival_s = counted[0].numbers("arrival_ns") / 1e9
        self._observed, bounds = samples[metric]
        self._censored = np.full_like(self._observed, np.nan)
        if bounds.size:
            self._censored[cut & np.isnan(self._observed)] = bounds

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return float(np.ptp(self.arrival_s)) if self.arrival_s.size else 0.0

    def window_s(self, most: int) -> float:
        """1, 2 or 5 times a power of ten, the least of which `most` windows are as long as the arrivals take."""
        least = self.span_s / max(most, 1)
        power = 10.0 ** math.floor(math.log10(least or 1.0))
        return power * next(times for times in (1, 2, 5, 10) if times * power >= least)

    def windows(self, window_s: float) -> tuple[FloatArray, list[BoolArray]]:
        """The edges of the windows that have the arrivals, multiples of window_s, `[num_windows + 1]`; and for each
        window which requests arrived in it. Of the last window less than a tenth is part of the one before it. Without
        requests both are empty."""
        if not self.arrival_s.size:
            return np.empty(0), []
        first, last = (math.floor(end / window_s) for end in (self.arrival_s.min(), self.arrival_s.max()))
        edges = np.arange(first, last + 2, dtype=np.float64) * window_s
        if last > first and self.arrival_s.max() < edges[-2] + 0.1 * window_s:
            edges = np.delete(edges, -2)
        return edges, [self.within(*ends) for ends in pairwise(edges)]

    def within(self, from_s: float, to_s: float) -> BoolArray:
        """Which requests arrived in [from_s, to_s)."""
        return (self.arrival_s >= from_s) & (self.arrival_s < to_s)

    def quantile(self, chosen: BoolArray, level: float) -> float:
        """Of the chosen requests, seconds; infinite where it is not reached, NaN without any latency."""
        observed, censored = (values[chosen & ~np.isnan(values)] for values in (self._observed, self._censored))
        found = km_quantiles(observed, censored, [level])[0]
        return found if found is not None else math.inf if censored.size else math.nan

    def worst(self) -> WorstTime | None:
        """The stretch around the largest P99 of a window; None if that is below _CLEAR times the windows' median, or
        with fewer than three windows of MIN_REQUESTS."""
        most = min(_JUDGED, self.arrival_s.size // (2 * MIN_REQUESTS))
        edges, parts = self.windows(self.window_s(most))
        p99 = np.array([self.quantile(part, 0.99) if part.sum() >= MIN_REQUESTS else math.nan for part in parts])
        if np.isfinite(p99).sum() < 3:
            return None
        is_bad = p99 >= _CLEAR * np.nanmedian(p99)
        runs = [[*of] for bad, of in groupby(range(len(parts)), lambda place: is_bad[place]) if bad]
        if not runs:
            return None
        own = max(runs, key=lambda run: max(p99[run]))
        inside = np.any([parts[place] for run in runs for place in run], axis=0)
        own_p99 = self.quantile(np.any([parts[place] for place in own], axis=0), 0.99)
        return WorstTime(edges[own[0]], edges[own[-1] + 1], own_p99, self.quantile(~inside, 0.99), len(runs))
