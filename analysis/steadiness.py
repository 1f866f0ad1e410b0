"""Whether an engine kept up with what was sent: beyond its capacity latencies grow for as long as a trace lasts.

Looked at over the time in which requests arrived, by quarters, the first of which is left to the engine to fill up.
A number grows if its mean does from the second quarter to the third, and on to the fourth: in all by OUTRUN of the
requests that arrive between the two (half of all), and by more than chance explains (three standard deviations of a
Poisson count). Arrivals outran the engine if the requests that were never scheduled yet grow so. If those in the system
do (an engine may take in all that comes, and be slow with all of it), this tells the same where requests stay for less
than a quarter in the mean, or where the last one to end does so later, after the last arrival, than LATE times what any
request of the first quarter took. Else it may only be filling up, which cannot be told; nor can anything where requests
stay for more than half of the time in which they came (sessions: all of it, for a recorded one has long pauses).

A later turn comes because the one before it has ended: however slow the engine is, as many come as it serves. So of a
trace with sessions the time is that in which sessions began, the last of which leaves the engine to drain; sessions are
counted too, from their first arrival to their last end; and requests that were never scheduled yet tell where sessions,
their waits left out, last for less than a quarter.
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


class Customers(NamedTuple):
    """Whoever comes by itself, and not because something else has ended: a request outside sessions, or a session with
    all its turns. ns; infinite for what did not end."""

    arrival_ns: FloatArray
    end_ns: FloatArray
    num_sessions: int
    waited_ns: float  # until they were first scheduled, all requests together

    @property
    def window_ns(self) -> tuple[float, float]:
        """The first and the last arrival; equal where there are none."""
        return (float(self.arrival_ns.min()), float(self.arrival_ns.max())) if self.arrival_ns.size else (0.0, 0.0)

    def stays(self) -> Stays:
        first, last = self.window_ns
        stay = self.end_ns - self.arrival_ns
        ended = np.isfinite(stay)
        early = self.arrival_ns <= first + (last - first) / 4
        return Stays(
            float(stay[ended].mean()) if ended.any() else np.inf,
            float(stay[early].max(initial=0.0)),
            float(self.end_ns[ended].max(initial=last)) - last,
        )


class Stays(NamedTuple):
    """How long customers stayed, in ns from their arrivals, those that ended."""

    mean_ns: float
    longest_early_ns: float  # of those that came in the first quarter
    drain_ns: float  # from the last arrival to the last end


def customers_of(requests: Requests) -> Customers:
    arrivals, ends, waited_ns = [np.empty(0)], [np.empty(0)], 0.0
    sessions: dict[str, tuple[float, float]] = {}
    for piece in requests.pieces():
        arrival, end, in_session = piece.numbers("arrival_ns"), _ends(piece), piece.is_known("session_id")
        waited_ns += float(np.nansum(piece.numbers("first_scheduled_ns") - arrival))
        arrivals.append(arrival[~in_session])
        ends.append(end[~in_session])
        if not in_session.any():
            continue
        codes = piece.codes("session_id")
        began, ended = np.full(len(codes.labels), np.inf), np.full(len(codes.labels), -np.inf)
        np.minimum.at(began, codes.codes[in_session], arrival[in_session])
        np.maximum.at(ended, codes.codes[in_session], end[in_session])
        for name, *span in zip(codes.labels, began.tolist(), ended.tolist(), strict=True):
            before = sessions.get(name, (np.inf, -np.inf))
            sessions[name] = min(before[0], span[0]), max(before[1], span[1])
    sessions = {name: span for name, span in sessions.items() if np.isfinite(span[0])}
    spans = np.array(list(sessions.values())).reshape(-1, 2)
    starts, lasts = np.concatenate([*arrivals, spans[:, 0]]), np.concatenate([*ends, spans[:, 1]])
    return Customers(starts, lasts, len(sessions), waited_ns)


def waiting_by_quarter(requests: Requests) -> tuple[float, ...]:
    """Mean number of requests that were not scheduled yet, in the second, third and fourth quarter of the time in which
    customers came; none where all came at once."""
    return _by_quarter(requests, customers_of(requests).window_ns, only_waiting=True)


def _by_quarter(requests: Requests, window_ns: tuple[float, float], *, only_waiting: bool) -> tuple[float, ...]:
    """Of requests that were not scheduled yet, or had not ended."""
    sums = np.zeros(len(QUARTERS))
    for piece in requests.pieces():
        arrival, left = piece.numbers("arrival_ns"), _ends(piece)
        if only_waiting:
            left = np.fmin(left, piece.numbers("first_scheduled_ns"))
        sums += _areas(arrival, left, window_ns)
    return _means(sums, window_ns)


def _areas(arrival: FloatArray, left: FloatArray, window_ns: tuple[float, float]) -> FloatArray:
    """Of each quarter but the first: the time that all of them spent there together."""
    first, last = window_ns
    starts = [first + number * (last - first) / 4 for number in QUARTERS]
    inside = [np.minimum(left, start + (last - first) / 4) - np.maximum(arrival, start) for start in starts]
    return np.array([float(np.maximum(one, 0.0).sum()) for one in inside])


def _means(sums: FloatArray, window_ns: tuple[float, float]) -> tuple[float, ...]:
    quarter = (window_ns[1] - window_ns[0]) / 4
    return tuple((sums / quarter).tolist()) if quarter else ()


def _ends(piece: RequestColumns) -> FloatArray:
    """ns; infinite for what did not end."""
    finish = piece.numbers("finish_ns")
    return np.where(np.isnan(finish), np.inf, finish)


def is_outrun(waiting: Sequence[float], num_requests: int) -> bool:
    """Whether arrivals outran the engine. waiting: as above, or sums of them over replicates, with their requests."""
    if not waiting:
        return False
    second, third, fourth = waiting
    between = num_requests / 2
    return second < third < fourth and fourth - second >= max(OUTRUN * between, 3 * between**0.5)


def _judged(customers: Customers, waiting: Sequence[float], in_system: Sequence[float]) -> bool | None:
    """Whether arrivals outran the engine; None where it cannot be told."""
    num, stays, (first, last) = len(customers.arrival_ns), customers.stays(), customers.window_ns
    quarter, without_waits = (last - first) / 4, stays.mean_ns - customers.waited_ns / max(1, num)
    if is_outrun(waiting, num) and (not customers.num_sessions or without_waits <= quarter):
        return True
    there = _means(_areas(customers.arrival_ns, customers.end_ns, customers.window_ns), customers.window_ns)
    if any(is_outrun(one, num) for one in (waiting, in_system, there)):
        return True if stays.mean_ns <= quarter or stays.drain_ns > LATE * stays.longest_early_ns else None
    return None if stays.mean_ns > (4 if customers.num_sessions else 2) * quarter else False


def steadiness(requests: Requests) -> dict[str, Any] | None:
    """For the summary; None where all came at once."""
    customers = customers_of(requests)
    waiting, in_system = (_by_quarter(requests, customers.window_ns, only_waiting=only) for only in (True, False))
    if not waiting:
        return None
    judged = _judged(customers, waiting, in_system)
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
