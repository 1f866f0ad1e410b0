"""Whether an engine kept up with what was sent: beyond its capacity latencies grow for as long as a trace lasts.

Looked at over the time in which requests arrived, by quarters, the first of which is left to the engine to fill up.
More arrive than start if the mean number of requests that were never scheduled yet grows from the second quarter to the
third, and on to the fourth: in all by OUTRUN of the requests that arrive between the two (half of all), and by more
than chance explains (three standard deviations of a Poisson count).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.request_columns import Requests

OUTRUN = 0.05
QUARTERS = (1, 2, 3)


def waiting_by_quarter(requests: Requests) -> tuple[float, ...]:
    """Mean number of requests that were not scheduled yet, in the second, third and fourth quarter of the arrivals'
    time; none where all arrive at once."""
    arrivals = [piece.numbers("arrival_ns") for piece in requests.pieces()]
    ends = [(float(arrival.min()), float(arrival.max())) for arrival in arrivals if arrival.size]
    if not ends:
        return ()
    first, last = min(low for low, _ in ends), max(high for _, high in ends)
    quarter = (last - first) / 4
    if quarter == 0:
        return ()
    sums = dict.fromkeys(QUARTERS, 0.0)
    for piece in requests.pieces():
        arrival, scheduled = piece.numbers("arrival_ns"), piece.numbers("first_scheduled_ns")
        left = np.where(np.isnan(scheduled), np.inf, scheduled)
        for number in QUARTERS:
            start = first + number * quarter
            inside = np.minimum(left, start + quarter) - np.maximum(arrival, start)
            sums[number] += float(np.maximum(inside, 0.0).sum())
    return tuple(total / quarter for total in sums.values())


def is_outrun(waiting: Sequence[float], num_requests: int) -> bool:
    """Whether arrivals outran the engine. waiting: as above, or sums of them over replicates, with their requests."""
    if not waiting:
        return False
    second, third, fourth = waiting
    between = num_requests / 2
    return second < third < fourth and fourth - second >= max(OUTRUN * between, 3 * between**0.5)


def steadiness(requests: Requests) -> dict[str, Any] | None:
    """For the summary; None where all came at once."""
    waiting = waiting_by_quarter(requests)
    return {"waiting": list(waiting), "is_outrun": is_outrun(waiting, len(requests))} if waiting else None


def outrun_note(summary: Mapping[str, Any]) -> str | None:
    """What to tell of a run whose arrivals outran its engine, one sentence; None of others."""
    found = summary.get("steadiness")
    if not found or not found["is_outrun"]:
        return None
    before, _, after = found["waiting"]
    return (
        f"arrivals outran the engine: on average {before:,.0f} requests waited in the second quarter of their time, "
        f"and {after:,.0f} in the last; the latencies depend on how long the trace is"
    )
