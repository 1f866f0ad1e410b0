"""The change of a latency between runs of one trace, with an interval over its requests: there are no replicates.

The change is that of the runs' summaries: of the requests that they count, censored as there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.load import Run
from analysis.measures.classes import is_of
from analysis.measures.statistics import Estimate, circular_blocks
from analysis.measures.summary import samples_of
from analysis.measures.survival import km_quantiles
from analysis.reading.rows import FloatArray

_MIN_BEYOND = 5 - 1e-9  # requests beyond a quantile; with fewer its bootstrap is meaningless
_OBSERVED, _CENSORED, _ABSENT = 0.0, 1.0, 2.0  # what a request's time in a run is


def within_one_trace(
    baseline: Sequence[Run], arm: Sequence[Run], name: str, which: str, of_class: str
) -> Estimate | None:
    """The log-ratio of a latency's mean or quantile (averaged over repeats), with a circular-block interval over the
    requests of one trace; None for other metrics, or with too few requests. of_class: of a class; "": of all."""
    if name not in ("ttft_s", "tpot_s", "e2e_s"):
        return None
    by = baseline[0].summary["classes"]["by"] if of_class else ""
    frames = [_times(run, name, by, of_class) for run in (*baseline, *arm)]
    arrival = pd.concat([frame.pop("arrival_ns") for frame in frames], axis=1).bfill(axis=1).iloc[:, 0]
    joined = pd.concat(frames, axis=1).loc[arrival.sort_values(kind="stable").index]
    times, kinds = (joined[column].to_numpy(dtype=np.float64) for column in ("time_s", "kind"))
    kinds = np.where(np.isnan(kinds), _ABSENT, kinds)
    some = (kinds != _ABSENT).any(axis=1)
    times, kinds = times[some], kinds[some]  # [num_requests, num_runs] each
    level = None if which == "mean" else int(which[1:]) / 100
    if len(times) * (0.5 if level is None else 1.0 - level) < _MIN_BEYOND or (times[kinds == _OBSERVED] <= 0).any():
        return None

    def log_ratio(rows: FloatArray) -> float:
        each = [_statistic(*run, level) for run in zip(rows.T[: len(frames)], rows.T[len(frames) :], strict=True)]
        base, other = np.mean(each[: len(baseline)]), np.mean(each[len(baseline) :])
        return math.log(other / base) if 0 < base < math.inf and other < math.inf else math.nan

    filled = np.where(np.isnan(times), np.nanmean(times, axis=0), times)  # for the length of blocks
    return circular_blocks(np.hstack([filled, kinds]), log_ratio, num_resamples=400, scale="log_ratio")


def _times(run: Run, name: str, by: str, of_class: str) -> pd.DataFrame:
    """By request: arrival_ns, time_s (if censored, at least that) and kind."""
    requests, end_ns = run.counted
    if of_class:
        requests = requests.where(is_of(by, of_class)(requests))
    samples, cut = samples_of(requests, end_ns)
    times, bounds = samples[name]
    kinds = np.where(np.isnan(times), _ABSENT, _OBSERVED)
    if bounds.size:
        at = np.flatnonzero(cut & np.isnan(times))
        times = times.copy()
        times[at], kinds[at] = bounds, _CENSORED
    columns = {"arrival_ns": requests.whole("arrival_ns"), "time_s": times, "kind": kinds}
    return pd.DataFrame(columns, index=pd.Index(requests.codes("request_id").texts()))


def _statistic(times: FloatArray, kinds: FloatArray, level: float | None) -> float:
    """The mean, or the quantile at a level; infinite if it is not reached, or without a request."""
    observed, censored = times[kinds == _OBSERVED], times[kinds == _CENSORED]
    if level is None:
        return float(observed.mean()) if observed.size and not censored.size else math.inf
    found = km_quantiles(observed, censored, [level])[0]
    return math.inf if found is None else found
