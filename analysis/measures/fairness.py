"""How evenly tenants are served: in total, and while they wait at the same time.

Service is measured in tokens: prompt tokens spread evenly over the prefill, output tokens evenly over the decode. If
every request ends, the total service of a tenant is what it asked for. The effect of a scheduling order therefore shows
only while two tenants both have requests that were never scheduled yet (Sheng et al., Fairness in Serving Large
Language Models, OSDI 2024, bound the difference in service of two such tenants).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from analysis.measures.metrics import jain_index, latency
from analysis.reading.request_columns import RequestColumns, Requests
from analysis.reading.rows import Codes, FloatArray

MAX_INSTANTS = 40_000  # of 10,000 requests all that happened; of more as many instants, evenly spaced
MAX_TENANTS = 32  # with more, pairs are not compared, and the mean TTFT of each is not reported
Rows = np.ndarray[Any, np.dtype[np.intp]]


@dataclass(slots=True)
class _Mean:
    """The mean of known values, which are added piece by piece."""

    sums: list[float] = field(default_factory=list)
    num: int = 0

    def add(self, values: FloatArray) -> None:
        known = values[~np.isnan(values)]
        self.sums.append(math.fsum(known))
        self.num += known.size

    @property
    def value(self) -> float | None:
        return math.fsum(self.sums) / self.num if self.num else None


@dataclass(slots=True)
class _Tenant:
    tokens: int = 0
    ttft: _Mean = field(default_factory=_Mean)
    num_unserved: int = 0  # aborted or unfinished before a first token: a mean without them would flatter
    normalised_latency: _Mean = field(default_factory=_Mean)

    @property
    def mean_ttft_s(self) -> float | None:
        return None if self.num_unserved else self.ttft.value


class _Track:
    """The tokens that one tenant got up to each of some instants (s, ascending), and its waiting requests then."""

    def __init__(self, instants: FloatArray) -> None:
        self._instants = instants
        self._rate, self._offset, self._waiting = (np.zeros(instants.size + 1) for _ in range(3))

    def add(self, columns: Mapping[str, FloatArray], rows: Rows) -> None:
        arrival, scheduled, first, finish, prompt, output = (values[rows] for values in columns.values())
        self._step(self._waiting, arrival, 1.0)
        self._step(self._waiting, np.fmin(scheduled, finish), -1.0)  # an ignored request stops waiting at its finish
        self._serve(scheduled, first, prompt)
        self._serve(first, finish, output)

    def _serve(self, begin: FloatArray, end: FloatArray, tokens: FloatArray) -> None:
        """Adds tokens evenly from begin to end, or at once if these are equal. NaN: the request has no such instant."""
        at_once = end == begin
        self._step(self._offset, begin[at_once], -tokens[at_once])
        begin, end, tokens = begin[~at_once], end[~at_once], tokens[~at_once]
        rate = tokens / (end - begin)
        for at, change in ((begin, rate), (end, -rate)):
            self._step(self._rate, at, change)
            self._step(self._offset, at, change * at)

    def _step(self, sums: FloatArray, at: FloatArray, values: FloatArray | float) -> None:
        """Adds values that count from an instant on."""
        known = ~(np.isnan(at) | np.isnan(values))
        places = np.searchsorted(self._instants, at[known])
        sums += np.bincount(places, np.broadcast_to(values, at.shape)[known], minlength=sums.size)

    @property
    def served(self) -> FloatArray:
        up_to: FloatArray = np.cumsum(self._rate)[:-1] * self._instants - np.cumsum(self._offset)[:-1]
        return up_to

    @property
    def waits(self) -> FloatArray:
        num: FloatArray = np.cumsum(self._waiting)[:-1]
        return num


def fairness(requests: Requests, end_ns: int) -> dict[str, Any] | None:
    """The summary's "fairness"; None with fewer than two tenants."""
    first_ns = min((int(piece.whole("arrival_ns").min(initial=end_ns)) for piece in requests.pieces()), default=end_ns)
    instants = _instants(requests, first_ns, end_ns)
    tenants: dict[str, _Tenant] = {}
    tracks: dict[str, _Track] = {}
    for piece in requests.pieces():
        columns = _columns(piece, first_ns, end_ns)
        got = (
            np.where(piece.is_known("first_token_ns"), columns["num_prompt_tokens"], 0.0) + columns["num_output_tokens"]
        )
        ttft, normalised = latency(piece, "ttft_s"), latency(piece, "normalised_latency_s")
        unserved = piece.reasons.among(("abort", "unfinished")) & np.isnan(ttft)
        for name, rows in _by_label(piece.codes("tenant")):
            one = tenants.setdefault(name, _Tenant())
            one.tokens += int(got[rows].sum())
            one.ttft.add(ttft[rows])
            one.num_unserved += int(unserved[rows].sum())
            one.normalised_latency.add(normalised[rows])
            if len(tenants) <= MAX_TENANTS:
                tracks.setdefault(name, _Track(instants)).add(columns, rows)
    if len(tenants) < 2:
        return None
    names, is_few = sorted(tenants), len(tenants) <= MAX_TENANTS
    known = [tenants[name] for name in names]
    means = [mean for one in known if (mean := one.normalised_latency.value) is not None]
    return {
        "num_tenants": len(names),
        "jain_service": jain_index(np.array([one.tokens for one in known], dtype=np.float64)),
        "max_min_service_gap_tokens": _largest_gap([tracks[name] for name in names]) if is_few else None,
        "jain_normalised_latency": jain_index(np.array(means)),
        "mean_ttft_s": {name: tenants[name].mean_ttft_s for name in names} if is_few else None,
    }


def _instants(requests: Requests, first_ns: int, end_ns: int) -> FloatArray:
    """When a request came, was scheduled, had its first token or ended, in s since the first arrival, and the run's
    end: service is linear from one to the next. Evenly spaced instants if these are more than MAX_INSTANTS."""
    found, end = np.empty(0), max(end_ns - first_ns, 1) / 1e9
    for piece in requests.pieces():
        happened = list(_columns(piece, first_ns, end_ns).values())[:4]
        found = np.unique(np.concatenate([found, [0.0, end], *happened]))
        if found.size > MAX_INSTANTS:
            return np.linspace(0.0, end, MAX_INSTANTS)
    return found[~np.isnan(found)]


def _columns(piece: RequestColumns, first_ns: int, end_ns: int) -> dict[str, FloatArray]:
    """Instants in s since the first arrival, and token counts. An unfinished request that has a token ends with the
    run."""
    names = ("arrival_ns", "first_scheduled_ns", "first_token_ns", "finish_ns")
    found = {name: (piece.numbers(name) - first_ns) / 1e9 for name in names}
    unfinished = np.isnan(found["finish_ns"]) & ~np.isnan(found["first_token_ns"])
    found["finish_ns"] = np.where(unfinished, (end_ns - first_ns) / 1e9, found["finish_ns"])
    return found | {name: piece.numbers(name) for name in ("num_prompt_tokens", "num_output_tokens")}


def _largest_gap(tracks: list[_Track]) -> float:
    """The largest change, over all pairs of tenants, of the difference in their service during a stretch in which both
    had waiting requests throughout, in tokens."""
    known = [(one.served, one.waits > 0) for one in tracks]
    gap = 0.0
    for (served, waits), (other, other_waits) in combinations(known, 2):
        both = np.flatnonzero((waits & other_waits)[:-1])
        for stretch in np.split(both, np.flatnonzero(np.diff(both) > 1) + 1) if both.size else ():
            gap = max(gap, float(np.ptp((served - other)[stretch[0] : stretch[-1] + 2])))  # to where it ends
    return gap


def _by_label(codes: Codes) -> Iterator[tuple[str, Rows]]:
    """(label, its rows) for each label that occurs."""
    order = np.argsort(codes.codes, kind="stable")
    present, first = np.unique(codes.codes[order], return_index=True)
    for number, rows in zip(present.tolist(), np.split(order, first[1:]), strict=False):  # no rows: one part
        yield codes.labels[number], rows
