"""How evenly tenants are served: in all, and while they wait beside one another.

Service is tokens, of the prompt while it is computed and of the output while it is emitted, each evenly. What a tenant
got in all is what it asked for wherever every request ends; what an order makes of tenants shows while both have
requests that were never scheduled yet (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, bound the
difference of what such two get).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np

from analysis.measures.metrics import jain_index, latency
from analysis.reading.request_columns import RequestColumns, Requests
from analysis.reading.rows import Codes, FloatArray

NUM_INSTANTS = 1000
MAX_TENANTS = 32  # of which pairs are compared, and each one's mean TTFT is told


class _Tenant:
    """What one tenant got, up to each of some instants (s, ascending), and how many of its requests wait there."""

    def __init__(self, instants: FloatArray) -> None:
        self._instants = instants
        self._rate, self._offset, self._waiting = (np.zeros(instants.size + 1) for _ in range(3))
        self.tokens = 0
        self.ttfts: list[float] = []  # sums of TTFT and of normalised latency, and of how many, a piece at a time
        self.latencies: list[float] = []
        self.num_ttfts = self.num_latencies = 0

    def add(self, arrival: FloatArray, scheduled: FloatArray, spans: Iterator[tuple[FloatArray, ...]]) -> None:
        """spans: (begins, ends, tokens) of what is served evenly meanwhile; instants are NaN where there is none."""
        self._step(self._waiting, arrival, np.ones(arrival.size))
        self._step(self._waiting, scheduled, np.full(scheduled.size, -1.0))
        for begin, end, tokens in spans:
            rate = tokens / np.maximum(end - begin, 1e-9)
            for at, sign in ((begin, 1.0), (begin + np.maximum(end - begin, 1e-9), -1.0)):
                self._step(self._rate, at, sign * rate)
                self._step(self._offset, at, sign * rate * at)

    def _step(self, sums: FloatArray, at: FloatArray, values: FloatArray) -> None:
        """Values that count from an instant on."""
        known = ~np.isnan(at)
        places = np.searchsorted(self._instants, at[known])
        sums += np.bincount(places, values[known], minlength=sums.size)

    @property
    def served(self) -> FloatArray:
        up_to: FloatArray = np.cumsum(self._rate)[:-1] * self._instants - np.cumsum(self._offset)[:-1]
        return up_to

    @property
    def waits(self) -> FloatArray:
        num: FloatArray = np.cumsum(self._waiting)[:-1]
        return num


def fairness(requests: Requests, end_ns: int) -> dict[str, Any] | None:
    """For the summary; None with fewer than two tenants."""
    first_ns = min((int(piece.whole("arrival_ns").min(initial=end_ns)) for piece in requests.pieces()), default=end_ns)
    instants = np.linspace(0.0, max(end_ns - first_ns, 1) / 1e9, NUM_INSTANTS)
    tenants: dict[str, _Tenant] = {}
    for piece in requests.pieces():
        for name, rows in _by_label(piece.codes("tenant")):
            _add(tenants.setdefault(name, _Tenant(instants)), piece, rows, first_ns, end_ns)
    if len(tenants) < 2:
        return None
    names = sorted(tenants)
    known = [tenants[name] for name in names]
    means = [math.fsum(one.latencies) / one.num_latencies for one in known if one.num_latencies]
    is_few = len(names) <= MAX_TENANTS
    ttfts = {name: math.fsum(one.ttfts) / one.num_ttfts for name, one in tenants.items() if one.num_ttfts}
    return {
        "num_tenants": len(names),
        "jain_service": jain_index(np.array([one.tokens for one in known], dtype=np.float64)),
        "max_min_service_gap_tokens": _largest_gap(known) if is_few else None,
        "jain_normalised_latency": jain_index(np.array(means)),
        "mean_ttft_s": {name: ttfts.get(name) for name in names} if is_few else None,
    }


def _add(tenant: _Tenant, piece: RequestColumns, rows: Any, first_ns: int, end_ns: int) -> None:
    arrival, scheduled, first, finish = (
        (piece.numbers(name)[rows] - first_ns) / 1e9
        for name in ("arrival_ns", "first_scheduled_ns", "first_token_ns", "finish_ns")
    )
    finish = np.where(np.isnan(finish), (end_ns - first_ns) / 1e9, finish)
    prompt, output = (piece.numbers(name)[rows] for name in ("num_prompt_tokens", "num_output_tokens"))
    started = ~np.isnan(first)
    tenant.tokens += int(prompt[started].sum() + output.sum())
    spans = ((scheduled, first, prompt), (first, finish, output))
    tenant.add(arrival, scheduled, (tuple(part[started] for part in span) for span in spans))
    for name, sums in (("ttft_s", tenant.ttfts), ("normalised_latency_s", tenant.latencies)):
        values = latency(piece, name)[rows]
        sums.append(math.fsum(values[~np.isnan(values)]))
    tenant.num_ttfts += int((~np.isnan(latency(piece, "ttft_s")[rows])).sum())
    tenant.num_latencies += int((~np.isnan(latency(piece, "normalised_latency_s")[rows])).sum())


def _largest_gap(tenants: list[_Tenant]) -> float:
    """Of any two tenants: the most that one got more than the other while both waited all the time, in tokens."""
    known = [(one.served, one.waits > 0) for one in tenants]
    gap = 0.0
    for (served, waits), (other, other_waits) in combinations(known, 2):
        both = np.flatnonzero(waits & other_waits)
        for stretch in np.split(both, np.flatnonzero(np.diff(both) > 1) + 1):
            gap = max(gap, float(np.ptp((served - other)[stretch])) if stretch.size else 0.0)
    return gap


def _by_label(codes: Codes) -> Iterator[tuple[str, Any]]:
    """(label, its rows) of each label that occurs."""
    order = np.argsort(codes.codes, kind="stable")
    present, first = np.unique(codes.codes[order], return_index=True)
    for number, rows in zip(present.tolist(), np.split(order, first[1:]), strict=False):  # of none, one part
        yield codes.labels[number], rows
