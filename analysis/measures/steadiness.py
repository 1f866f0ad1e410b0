"""Whether an engine kept up with what was sent: beyond its capacity latencies grow for as long as a trace lasts.

Looked at over the time in which requests arrived, but for the last twentieth of them (a few stragglers would stretch
it to where nothing is queued any more), by quarters, the first of which is left to the engine to fill up. A number
grows if its mean does from the second quarter to the third to the fourth: in all by OUTRUN of the requests that arrive
between the two (nearly half of all), and by more than chance explains (three standard deviations of a Poisson count;
between one and three, it cannot be told), and in each of the two steps by EACH of that, which is more than one
standard deviation of a quarter's count (else it cannot be told: a short trace may end in a burst). Arrivals outran the
engine if the requests that were never scheduled yet grow so, or their work does: their tokens, in requests of mean
size (an order by size keeps few requests waiting, but the long ones). If those in the system do (an engine may take in
all that comes, and be slow with all of it), this tells the same where requests stay for less than a quarter in the
mean, or where the last one to end does so later, after the last of those arrivals, than LATE times what any request of
the first quarter took. Else it may only be filling up, which cannot be told; nor can anything where requests stay for
more than half of the time in which they came (sessions: all of it, for a recorded one has long pauses).

A later turn comes because the one before it has ended: however slow the engine is, as many come as it serves. So of a
trace with sessions the time is that in which sessions began, the last of which leaves the engine to drain; sessions are
counted too, from their first arrival to their last end; and requests that were never scheduled yet tell where sessions,
their waits left out, last for less than a quarter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from analysis.measures.survival import Pool, pooled_distributions
from analysis.reading.request_columns import RequestColumns, Requests
from analysis.reading.rows import FloatArray

OUTRUN = 0.05
EACH = 0.25
LATE = 2.0
SURE, PERHAPS = 3.0, 1.0  # standard deviations
QUARTERS = (1, 2, 3)
Spans = tuple[FloatArray, FloatArray, FloatArray | float]  # begin, end, size in requests of mean size


class Customers:
    """Whoever comes by itself, and not because something else has ended: a request outside sessions, or a session with
    all its turns.

    num: how many. first_ns, last_ns: the first arrival, and the one by which all but a twentieth had come (the last,
    where these came at once); equal where there are none, or all came at once. waited_ns: until they were first
    scheduled, all requests together. mean_tokens: of a request, prompt and output; spread: how unlike these are, the
    mean square over the square of the mean.
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
        """From the arrivals to the ends, infinite for what did not end; a piece at a time."""
        for piece in self._requests.pieces():
            alone = ~piece.is_known("session_id")
            yield piece.numbers("arrival_ns")[alone], _ends(piece)[alone], 1.0
        yield self.sessions[:, 0], self.sessions[:, 1], 1.0

    def _late_arrivals(self) -> Iterator[float]:
        """The one by which all but a twentieth had come, ns; the last one."""
        pools = {"": Pool(np.empty(0))}
        found = pooled_distributions(pools, lambda: iter([("", (arrival for arrival, _, _ in self.spans()))]))
        yield found[""]["p95"]
        yield max(float(arrival.max(initial=0.0)) for arrival, _, _ in self.spans())

    def by_quarter(self, spans: Iterable[Spans]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """How many of them there are, and their work, in the mean over each quarter of the arrivals but the first; none
        where all came at once."""
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
    """How long customers stayed, in ns from their arrivals, those that ended."""

    mean_ns: float
    longest_early_ns: float  # of those that came in the first quarter
    drain_ns: float  # from the last arrival that counts to the last end of those that had come by then


def _sessions(requests: Requests) -> FloatArray:
    """`[num_sessions, 2]`: the first arrival and the last end of each."""
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
    """Of requests that were not scheduled yet, means over the second, third and fourth quarter of the time in which
    customers came: how many, and their work in requests of mean size (of a partial run without what was to be emitted);
    none where all came at once. spread: of their sizes, as `Customers` has it."""

    num: tuple[float, ...] = ()
    work: tuple[float, ...] = ()
    spread: float = 1.0

    def grew(self, num_requests: int) -> bool:
        return is_outrun(self.num, num_requests) or is_outrun(self.work, num_requests, self.spread)


def waiting_of(requests: Requests) -> Waiting:
    return _waiting(Customers(requests), requests)


def _waiting(customers: Customers, requests: Requests) -> Waiting:
    return Waiting(*customers.by_quarter(_spans(requests, customers.mean_tokens, only_waiting=True)), customers.spread)


def _spans(requests: Requests, mean_tokens: float, *, only_waiting: bool) -> Iterator[Spans]:
    """Of requests: from their arrivals to their ends, or to when they were first scheduled."""
    for piece in requests.pieces():
        left = _ends(piece)
        if only_waiting:
            left = np.fmin(left, piece.numbers("first_scheduled_ns"))
        yield piece.numbers("arrival_ns"), left, _num_tokens(piece) / mean_tokens


def _num_tokens(piece: RequestColumns) -> FloatArray:
    return piece.numbers("num_prompt_tokens") + piece.numbers("num_output_tokens")


def _ends(piece: RequestColumns) -> FloatArray:
    """ns; infinite for what did not end."""
    finish = piece.numbers("finish_ns")
    return np.where(np.isnan(finish), np.inf, finish)


def is_outrun(waiting: Sequence[float], num_requests: int, spread: float = 1.0) -> bool:
    """Whether arrivals outran the engine. waiting: as above, or sums of them over replicates, with their requests."""
    if not waiting or not _grew(waiting, num_requests, SURE, spread):
        return False
    return all(after - before >= EACH * (waiting[2] - waiting[0]) for before, after in pairwise(waiting))


def _grew(counts: Sequence[float], num_requests: int, deviations: float, spread: float = 1.0) -> bool:
    """Whether there are more in the last quarter, by more than so many deviations of what chance does."""
    between = num_requests / 2
    return counts[2] - counts[0] >= max(OUTRUN * between, deviations * math.sqrt(between * spread))


def _judged(customers: Customers, waiting: Waiting, in_system: Sequence[float]) -> bool | None:
    """Whether arrivals outran the engine; None where it cannot be told."""
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
    may_grow = any(_grew(one, num, PERHAPS) for one in counts) or _grew(waiting.work, num, PERHAPS, waiting.spread)
    return None if is_long or may_grow else False


def steadiness(requests: Requests) -> dict[str, Any] | None:
    """For the summary; None where all came at once."""
    customers = Customers(requests)
    waiting = _waiting(customers, requests)
    in_system, _ = customers.by_quarter(_spans(requests, customers.mean_tokens, only_waiting=False))
    if not waiting.num:
        return None
    told = {"waiting": list(waiting.num), "waiting_work": list(waiting.work), "in_system": list(in_system)}
    return told | {"is_outrun": _judged(customers, waiting, in_system)}


def outrun_note(summary: Mapping[str, Any]) -> str | None:
    """What to tell of a run whose arrivals outran its engine, one sentence; None of others."""
    found = summary.get("steadiness")
    if not found or not found["is_outrun"]:
        return None
    before, _, after = found["in_system"]
    what = (
        f"{before:,.0f} requests were in the system in the second quarter of their time, and {after:,.0f} in the last"
    )
    work = found.get("waiting_work") or (0.0, 0.0, 0.0)
    if work[2] - work[0] > after - before:  # few requests, but the long ones
        what = (
            f"requests waited with the work of {work[0]:,.0f} of mean size in the second quarter of their time, and of "
            f"{work[2]:,.0f} in the last"
        )
    return f"arrivals outran the engine: on average {what}; the latencies depend on how long the trace is"
