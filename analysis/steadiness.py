"""Whether an engine kept up with what was sent: beyond its capacity latencies grow for as long as a trace lasts.

Looked at over the time in which requests arrived, by quarters, the first of which is left to the engine to fill up.
A number grows if its mean does from the second quarter to the third, and on to the fourth: in all by OUTRUN of the
requests that arrive between the two (half of all), and by more than chance explains (three standard deviations of a
Poisson count). Arrivals outran the engine if the requests that were never scheduled yet grow so. If those in the system
do (an engine may take in all that comes, and be slow with all of it), this tells the same where requests stay for less
than a quarter in the mean, or where the last one to end does so later, after the last arrival, than LATE times what any
request of the first quarter took. Else it may only be filling up, which cannot be told; nor can anything where requests
stay for more than half of the time in which they came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from analysis.request_columns import RequestColumns, Requests
from analysis.rows import FloatArray

OUTRUN = 0.05
LATE = 2.0
QUARTERS = (1, 2, 3)


class Stays(NamedTuple):
    """How long requests stayed, in ns from their arrivals, those that ended."""

    mean_ns: float
    longest_early_ns: float  # of those that came in the first quarter
    drain_ns: float  # from the last arrival to the last end


def waiting_by_quarter(requests: Requests) -> tuple[float, ...]:
    """Mean number of requests that were not scheduled yet, in the second, third and fourth quarter of the arrivals'
    time; none where all arrive at once."""
    return _by_quarter(requests, only_waiting=True)


def in_system_by_quarter(requests: Requests) -> tuple[float, ...]:
    """The same of the requests that had not ended: waiting, running or swapped."""
    return _by_quarter(requests, only_waiting=False)


def _by_quarter(requests: Requests, only_waiting: bool) -> tuple[float, ...]:
    first, last = _arrivals(requests)
    quarter = (last - first) / 4
    if quarter == 0:
        return ()
    sums = dict.fromkeys(QUARTERS, 0.0)
    for piece in requests.pieces():
        arrival, left = piece.numbers("arrival_ns"), _ends(piece)
        if only_waiting:
            left = np.fmin(left, piece.numbers("first_scheduled_ns"))
        for number in QUARTERS:
            start = first + number * quarter
            inside = np.minimum(left, start + quarter) - np.maximum(arrival, start)
            sums[number] += float(np.maximum(inside, 0.0).sum())
    return tuple(total / quarter for total in sums.values())


def _arrivals(requests: Requests) -> tuple[float, float]:
    """The first and the last, ns; equal where there are none."""
    arrivals = [piece.numbers("arrival_ns") for piece in requests.pieces()]
    ends = [(float(arrival.min()), float(arrival.max())) for arrival in arrivals if arrival.size]
    return (min(low for low, _ in ends), max(high for _, high in ends)) if ends else (0.0, 0.0)


def _ends(piece: RequestColumns) -> FloatArray:
    """ns; infinite for what did not end."""
    finish = piece.numbers("finish_ns")
    return np.where(np.isnan(finish), np.inf, finish)


def _stays(requests: Requests) -> Stays:
    first, last = _arrivals(requests)
    total, num, early, end = 0.0, 0, 0.0, last
    for piece in requests.pieces():
        arrival, finish = piece.numbers("arrival_ns"), _ends(piece)
        stay = finish - arrival
        ended = np.isfinite(stay)
        total, num = total + float(stay[ended].sum()), num + int(ended.sum())
        early = max(early, float(stay[arrival <= first + (last - first) / 4].max(initial=0.0)))
        end = max(end, float(finish[ended].max(initial=0.0)))
    return Stays(total / num if num else np.inf, early, end - last)


def is_outrun(waiting: Sequence[float], num_requests: int) -> bool:
    """Whether arrivals outran the engine. waiting: as above, or sums of them over replicates, with their requests."""
    if not waiting:
        return False
    second, third, fourth = waiting
    between = num_requests / 2
    return second < third < fourth and fourth - second >= max(OUTRUN * between, 3 * between**0.5)


def _judged(requests: Requests, waiting: Sequence[float], in_system: Sequence[float]) -> bool | None:
    """Whether arrivals outran the engine; None where it cannot be told."""
    if is_outrun(waiting, len(requests)):
        return True
    stays, (first, last) = _stays(requests), _arrivals(requests)
    if is_outrun(in_system, len(requests)):
        is_filled = stays.mean_ns <= (last - first) / 4
        return True if is_filled or stays.drain_ns > LATE * stays.longest_early_ns else None
    return None if stays.mean_ns > (last - first) / 2 else False


def steadiness(requests: Requests) -> dict[str, Any] | None:
    """For the summary; None where all came at once."""
    waiting, in_system = waiting_by_quarter(requests), in_system_by_quarter(requests)
    if not waiting:
        return None
    judged = _judged(requests, waiting, in_system)
    return {"waiting": list(waiting), "in_system": list(in_system), "is_outrun": judged}


def outrun_note(summary: Mapping[str, Any]) -> str | None:
    """What to tell of a run whose arrivals outran its engine, one sentence; None of others."""
    found = summary.get("steadiness")
    if not found or not found["is_outrun"]:
        return None
    before, _, after = found["in_system"]
    return (
        f"arrivals outran the engine: on average {before:,.0f} requests were in the system in the second quarter of "
        f"their time, and {after:,.0f} in the last; the latencies depend on how long the trace is"
    )
