"""Whether an engine kept up with the arrivals: beyond its capacity latencies grow for as long as a trace lasts.

The time in which requests arrived is divided into quarters, without the last twentieth of the arrivals (a few
stragglers could extend it until nothing is queued). The first quarter is left for the engine to fill up. A number
*grows* if its mean rises from the second quarter to the third and to the fourth, and three conditions hold:
- The total rise is at least a share of the requests that arrive in between (nearly half of all): 5 %, SURE.share.
- It is at least SURE.deviations standard deviations of a Poisson count.
- Each of the two rises is at least EACH of the total, which is more than one standard deviation of a quarter's count.
If a condition fails, the verdict is unknown, and not that the engine kept up, where the last quarter's mean is PERHAPS
standard deviations above that of an earlier one: the trace ends while the number grows, perhaps in a burst.

Arrivals outran the engine if the requests that were never scheduled yet grow in number or in work. Work is their
tokens, in requests of mean size: an order by size keeps few requests waiting, but the long ones.
An engine may also admit all arrivals and be slow with all of them. So if the requests in the system grow, arrivals
outran it as well, provided that requests stay for at most a quarter on average, or that the engine drains late: from
the last of those arrivals to the last end it takes more than LATE times the longest stay of a first-quarter request.
Otherwise the engine may only be filling up, and the verdict is unknown. It is also unknown if requests stay for more
than half of the arrival time on average (sessions: for all of it, as recorded sessions have long pauses).

A later turn of a session arrives because the one before it ended, so a slow engine slows down the arrivals. With
sessions, the time is therefore that in which sessions began. Sessions in the system are counted too, from their first
arrival to their last end. Growth of the never-scheduled requests is decisive on its own only if sessions, without their
waits, last at most a quarter on average.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from analysis.measures.notes import Note
from analysis.measures.survival import Pool, pooled_distributions
from analysis.reading.request_columns import RequestColumns, Requests
from analysis.reading.rows import FloatArray

EACH = 0.25
LATE = 2.0
PERHAPS = 1.0  # standard deviations
QUARTERS = (1, 2, 3)


class Growth(NamedTuple):
    """How much a number must rise to have grown: a share of the arrivals, and standard deviations of their count."""

    share: float
    deviations: float


SURE = Growth(0.05, 3.0)  # to say of a run that arrivals outran it
LIKELY = Growth(0.02, 1.0)  # to search for the rate at which they do: one that is found surely is found too high
Spans = tuple[FloatArray, FloatArray, FloatArray | float]  # begin, end, size in requests of mean size


class Customers:
    """The arrivals that do not depend on an earlier end: requests outside sessions, and sessions with all their turns.

    num: their number. first_ns, last_ns: the first arrival, and the one by which all but a twentieth had come (or the
    last one, if those came at once); equal if there are none, or all came at once. waited_ns: time until first
    scheduled, summed over all requests. mean_tokens: of a request, prompt and output. spread: the mean square of these
    sizes over the square of their mean.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self.sessions = _sessions(requests)
        self.num, self.waited_ns, self.first_ns = 0, 0.0, np.inf
        for arrival, _, _ in self.spans():
            self.num += len(arrival)
            self.first_ns = min(self.first_ns, float(arrival.min(initial=np.inf)))
        num, total, squares = 0, 0.0, 0.0
        for piece in requests.pieces():
            self.waited_ns += float(np.nansum(piece.numbers("first_scheduled_ns") - piece.numbers("arrival_ns")))
            sizes = _num_tokens(piece)
            num, total, squares = num + len(sizes), total + float(sizes.sum()), squares + float(sizes @ sizes)
        self.mean_tokens = total / num if total else 1.0
        self.spread = squares / num / self.mean_tokens**2 if total else 1.0
        self.first_ns = self.first_ns if self.num else 0.0
        self.last_ns = self.first_ns
        if self.num:
            self.last_ns = next((at for at in self._late_arrivals() if at > self.first_ns), self.first_ns)
        self.quarter_ns = (self.last_ns - self.first_ns) / 4

    def spans(self) -> Iterator[Spans]:
        """Customers from arrival to end, infinite if they did not end; one piece at a time."""
        for piece in self._requests.pieces():
            alone = ~piece.is_known("session_id")
            yield piece.numbers("arrival_ns")[alone], _ends(piece)[alone], 1.0
        yield self.sessions[:, 0], self.sessions[:, 1], 1.0

    def _late_arrivals(self) -> Iterator[float]:
        """The arrival by which all but a twentieth had come, ns; then the last arrival."""
        pools = {"": Pool(np.empty(0))}
        found = pooled_distributions(pools, lambda: iter([("", (arrival for arrival, _, _ in self.spans()))]))
        yield found[""]["p95"]
        yield max(float(arrival.max(initial=0.0)) for arrival, _, _ in self.spans())

    def by_quarter(self, spans: Iterable[Spans]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The time-average number of `spans`, and their work, in each quarter of the arrival time except the first;
        empty if all came at once."""
        if not self.quarter_ns:
            return (), ()
        sums, work = dict.fromkeys(QUARTERS, 0.0), dict.fromkeys(QUARTERS, 0.0)
        for begin, end, size in spans:
            for number in QUARTERS:
                start = self.first_ns + number * self.quarter_ns
                inside = np.maximum(np.minimum(end, start + self.quarter_ns) - np.maximum(begin, start), 0.0)
                sums[number] += float(inside.sum())
                work[number] += float((inside * size).sum())
        num, in_sizes = (tuple(total / self.quarter_ns for total in each.values()) for each in (sums, work))
        return num, in_sizes

    def stays(self) -> Stays:
        total, num, early, last_end = 0.0, 0, 0.0, self.last_ns
        for begin, end, _ in self.spans():
            stay, ended = end - begin, np.isfinite(end)
            total, num = total + float(stay[ended].sum()), num + int(ended.sum())
            early = max(early, float(stay[begin <= self.first_ns + self.quarter_ns].max(initial=0.0)))
            last_end = max(last_end, float(end[ended & (begin <= self.last_ns)].max(initial=0.0)))
        return Stays(total / num if num else np.inf, early, last_end - self.last_ns)


class Stays(NamedTuple):
    """How long the customers that ended stayed, in ns from their arrivals."""

    mean_ns: float
    longest_early_ns: float  # of those that arrived in the first quarter; infinite if one did not end
    drain_ns: float  # from `Customers.last_ns` to the last end of the customers that had arrived by then


def _sessions(requests: Requests) -> FloatArray:
    """`[num_sessions, 2]`: the first arrival and the last end of each session."""
    found: dict[str, tuple[float, float]] = {}
    for piece in requests.pieces():
        in_session = piece.is_known("session_id")
        if not in_session.any():
            continue
        codes = piece.codes("session_id")
        began, ended = np.full(len(codes.labels), np.inf), np.full(len(codes.labels), -np.inf)
        np.minimum.at(began, codes.codes[in_session], piece.numbers("arrival_ns")[in_session])
        np.maximum.at(ended, codes.codes[in_session], _ends(piece)[in_session])
        for code in np.unique(codes.codes[in_session]).tolist():
            name = codes.labels[code]
            before = found.get(name, (np.inf, -np.inf))
            found[name] = min(before[0], float(began[code])), max(before[1], float(ended[code]))
    return np.array(list(found.values())).reshape(-1, 2)


class Waiting(NamedTuple):
    """Requests that were never scheduled yet, averaged over the second, third and fourth quarter of the arrival time;
    empty if all came at once. num: their number. work: in requests of mean size (in a partial run, tokens that were not
    emitted yet do not count). spread: of the sizes, as in `Customers`."""

    num: tuple[float, ...] = ()
    work: tuple[float, ...] = ()
    spread: float = 1.0

    def grew(self, num_requests: int, least: Growth = SURE) -> bool:
        """Whether their number or their work grew."""
        return is_outrun(self.num, num_requests, 1.0, least) or is_outrun(self.work, num_requests, self.spread, least)

    def excess(self, num_requests: int) -> float:
        """The share of the requests from the second quarter to the fourth that the engine did not keep up with, by
        number or work, whichever is more."""
        return max((2 * (of[2] - of[0]) / num_requests for of in (self.num, self.work) if of), default=0.0)


def waiting_of(requests: Requests) -> Waiting:
    return _waiting(Customers(requests), requests)


def _waiting(customers: Customers, requests: Requests) -> Waiting:
    return Waiting(*customers.by_quarter(_spans(requests, customers.mean_tokens, only_waiting=True)), customers.spread)


def _spans(requests: Requests, mean_tokens: float, *, only_waiting: bool) -> Iterator[Spans]:
    """Requests from arrival to end, or (only_waiting) to their first scheduling."""
    for piece in requests.pieces():
        left = _ends(piece)
        if only_waiting:
            left = np.fmin(left, piece.numbers("first_scheduled_ns"))
        yield piece.numbers("arrival_ns"), left, _num_tokens(piece) / mean_tokens


def _num_tokens(piece: RequestColumns) -> FloatArray:
    return piece.numbers("num_prompt_tokens") + piece.numbers("num_output_tokens")


def _ends(piece: RequestColumns) -> FloatArray:
    """The instants at which requests ended, ns; infinite for those that did not."""
    finish = piece.numbers("finish_ns")
    return np.where(np.isnan(finish), np.inf, finish)


def is_outrun(waiting: Sequence[float], num_requests: int, spread: float = 1.0, least: Growth = SURE) -> bool:
    """Whether a number grew as the module defines it. waiting: its means over three quarters, or their sums over
    replicates; num_requests is then the sum, too."""
    if not waiting:
        return False
    rise = waiting[2] - waiting[0]
    if rise < max(least.share * num_requests / 2, least.deviations * _deviation(num_requests, spread)):
        return False
    return all(after - before >= EACH * rise for before, after in pairwise(waiting))


def _deviation(num_requests: int, spread: float) -> float:
    """The standard deviation of the requests that arrive between two quarters, or of their work."""
    return math.sqrt(num_requests / 2 * spread)


def _may_grow(counts: Sequence[float], num_requests: int, spread: float = 1.0) -> bool:
    """Whether a number is larger at the end than before: it may grow."""
    return counts[2] - min(counts) >= PERHAPS * _deviation(num_requests, spread)


def _judged(customers: Customers, waiting: Waiting, in_system: Sequence[float]) -> bool | None:
    """Whether arrivals outran the engine; None if that is unknown."""
    num, quarter_ns, in_sessions = customers.num, customers.quarter_ns, len(customers.sessions) > 0
    stays = customers.stays()
    without_waits_ns = stays.mean_ns - customers.waited_ns / max(1, num)
    if waiting.grew(num) and (not in_sessions or without_waits_ns <= quarter_ns):
        return True
    there = customers.by_quarter(customers.spans())[0] if in_sessions else in_system
    counts = (waiting.num, in_system, there)
    if waiting.grew(num) or any(is_outrun(one, num) for one in counts):
        return True if stays.mean_ns <= quarter_ns or stays.drain_ns > LATE * stays.longest_early_ns else None
    is_long = stays.mean_ns > (4 if in_sessions else 2) * quarter_ns
    may_grow = any(_may_grow(one, num) for one in counts) or _may_grow(waiting.work, num, waiting.spread)
    return None if is_long or may_grow else False


def steadiness(requests: Requests) -> dict[str, Any] | None:
    """The summary's "steadiness"; None if all came at once."""
    customers = Customers(requests)
    waiting = _waiting(customers, requests)
    in_system, _ = customers.by_quarter(_spans(requests, customers.mean_tokens, only_waiting=False))
    if not waiting.num:
        return None
    told = {"waiting": list(waiting.num), "waiting_work": list(waiting.work), "in_system": list(in_system)}
    return told | {"is_outrun": _judged(customers, waiting, in_system)}


def ends_growing(summary: Mapping[str, Any]) -> str:
    """What may grow when a run's trace ends: "waiting", the queue, else "in_system", all that have not ended; "" for
    neither."""
    known, num = summary["steadiness"], summary["num_requests"]
    return next((name for name in ("waiting", "in_system") if _may_grow(known[name], num)), "")


def outrun_note(summary: Mapping[str, Any]) -> Note | None:
    """A warning of one sentence if a run's arrivals outran its engine; None for other runs."""
    found = summary.get("steadiness")
    if not found or not found["is_outrun"]:
        return None
    before, _, after = found["in_system"]
    what = (
        f"{before:,.0f} requests were in the system in the second quarter of their time, and {after:,.0f} in the last"
    )
    work = found["waiting_work"]
    rise, of_work = after - before, work[2] - work[0]
    if of_work > rise:  # few requests wait, but the long ones
        what = (
            f"requests waited with the work of {work[0]:,.0f} of mean size in the second quarter of their time, and of "
            f"{work[2]:,.0f} in the last"
        )
    text = f"arrivals outran the engine: on average {what}; the latencies depend on how long the trace is"
    return Note(text, "outrun", max(rise, of_work))
