"""Values over time as step functions, of one engine or summed over the replicas of a fleet.

Draws no figures. Counts hold as defined in `analysis.measures.occupancy`; those of a replica are 0 before its first
step and after its last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from analysis.measures.occupancy import spans
from analysis.measures.replicas import split
from analysis.reading.frames import numbers
from analysis.reading.request_columns import Requests
from analysis.reading.rows import FloatArray

if TYPE_CHECKING:
    import pandas as pd

    from analysis.load import Run

MAX_POINTS = 800  # of one curve; more are not visible and make an SVG large


@dataclass(frozen=True, slots=True)
class Level:
    """values[i] holds from times_s[i] until times_s[i + 1], the last one forever; both `[num_points]`, by time."""

    times_s: FloatArray
    values: FloatArray

    def mean_between(self, edges_s: FloatArray) -> FloatArray:
        """The mean over each [edges_s[i], edges_s[i + 1]), `[num_edges - 1]`; 0 before the first instant."""
        times = np.append(self.times_s, max(self.times_s[-1], edges_s[-1]))
        sums = np.append(0.0, np.cumsum(self.values * np.diff(times)))  # the integral up to each of these
        return np.asarray(np.diff(np.interp(edges_s, times, sums)) / np.diff(edges_s), dtype=np.float64)

    def at(self, instants_s: FloatArray) -> FloatArray:
        """The values at these instants, 0 before the first."""
        places = np.searchsorted(self.times_s, instants_s, side="right") - 1
        padded = np.append(self.values, 0.0)  # place -1: before the first
        return np.asarray(padded[places], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Engine:
    """The steps of one engine, in order, and the intervals for which their counts hold (see `occupancy.spans`)."""

    steps: pd.DataFrame
    start: FloatArray  # ns
    until: FloatArray
    following: FloatArray
    ends_idle: bool  # whether curves fall to 0 after the last step

    def level(self, values: FloatArray) -> Level:
        """The values, one for each step, over time; 0 while the engine is idle."""
        times = np.column_stack((self.start, self.until)).ravel() / 1e9
        after = np.where(self.until < self.following, 0.0, values)
        if self.ends_idle:
            after[-1] = 0.0
        return Level(times, np.column_stack((values, after)).ravel())

    @property
    def preemptions_s(self) -> FloatArray:
        """The starts of the steps that preempted, by recompute or by swap."""
        did = (numbers(self.steps, "num_preempted") > 0) | (numbers(self.steps, "num_swapped_out") > 0)
        return np.asarray(self.start[did] / 1e9, dtype=np.float64)


def engines_of(run: Run) -> list[Engine]:
    """The engines of a run that took steps, by replica number."""
    parts = split(Requests.of(run.requests), run.manifest)
    engines, is_fleet = [], len(parts) > 1
    for number, requests in enumerate(parts):
        steps = run.steps
        if is_fleet:
            steps = steps[numbers(steps, "replica") == number].sort_values("start_ns", kind="stable")
        if len(steps):
            engines.append(Engine(steps, *spans(requests, steps), ends_idle=is_fleet))
    return engines


def total(levels: Sequence[Level]) -> Level:
    """The sum of the levels, which changes where any of them does. Exact for whole numbers."""
    times = np.unique(np.concatenate([level.times_s for level in levels]))
    return Level(times, np.sum([level.at(times) for level in levels], axis=0))


def thin(times: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """At most about `MAX_POINTS` points, in time order; the extremes of each bin are kept."""
    if times.size <= MAX_POINTS:
        return times, values
    edges = np.linspace(0, times.size, MAX_POINTS // 2 + 1).astype(int)
    keep = {0, times.size - 1}
    for low, high in pairwise(edges):
        keep |= {low + int(np.argmin(values[low:high])), low + int(np.argmax(values[low:high]))}
    chosen = np.array(sorted(keep))
    return times[chosen], values[chosen]
