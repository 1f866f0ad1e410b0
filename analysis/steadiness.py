"""Whether an engine kept up with what was sent: beyond its capacity latencies grow for as long as a trace lasts.

Looked at over the time in which requests arrived, by quarters. The first half is left to the engine to fill up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis.request_columns import RequestColumns, Requests

MIN_ARRIVALS = 40  # in the second half: fewer say nothing
_SIGMAS = 3.0  # by which more must come than end, both counted as Poisson's
_SHARE = 0.05  # and as a share of what came
_LONGER = 1.5  # times as long as in the second quarter waits must be in the last one


def steadiness(requests: Requests, end_ns: int) -> dict[str, Any] | None:
    """Arrivals and ends in the second half of the arrivals' time, mean waits before the first step in its second and
    last quarter, and whether the arrivals outran the engine: clearly more came than ended, and waits grew.

    A request that was not begun has waited until `end_ns`. None for fewer than 2 x MIN_ARRIVALS requests, or where all
    came at once.
    """
    span = [(int(arrival.min()), int(arrival.max())) for arrival in map(_arrival, requests.pieces()) if arrival.size]
    if not span or len(requests) < 2 * MIN_ARRIVALS:
        return None
    first_ns, last_ns = min(low for low, _ in span), max(high for _, high in span)
    if last_ns == first_ns:
        return None
    middle_ns = first_ns + (last_ns - first_ns) // 2
    num_come = requests.sum(lambda piece: _within(_arrival(piece), middle_ns, last_ns).sum())
    num_ended = requests.sum(lambda piece: _within(piece.whole("finish_ns", -1), middle_ns, last_ns).sum())
    waits = [
        _mean_wait_s(requests, first_ns + part * (last_ns - first_ns) // 4, end_ns, (last_ns - first_ns) // 4)
        for part in (1, 3)
    ]
    more = num_come - num_ended
    is_growing = more > max(_SIGMAS * math.sqrt(num_come + num_ended), _SHARE * num_come)
    longer = waits[0] is not None and waits[1] is not None and waits[1] > _LONGER * waits[0]
    return {
        "num_come": int(num_come),
        "num_ended": int(num_ended),
        "waits_s": waits,
        "is_outrun": bool(is_growing and longer and num_come >= MIN_ARRIVALS),
    }


def outrun_note(summary: Mapping[str, Any]) -> str | None:
    """What to tell of a run whose arrivals outran its engine, one sentence; None of others."""
    found = summary.get("steadiness")
    if not found or not found["is_outrun"]:
        return None
    before, after = found["waits_s"]
    return (
        f"arrivals outran the engine: in the second half of their time {found['num_come']:,} requests came and "
        f"{found['num_ended']:,} ended, and waits grew from {before:.3g} to {after:.3g} s; the latencies depend on how "
        "long the trace is"
    )


def _arrival(piece: RequestColumns) -> Any:
    return piece.whole("arrival_ns")


def _within(instants_ns: Any, start_ns: int, end_ns: int) -> Any:
    return (instants_ns > start_ns) & (instants_ns <= end_ns)


def _mean_wait_s(requests: Requests, start_ns: int, end_ns: int, length_ns: int) -> float | None:
    """Of those that arrived in a quarter."""
    total, num = 0.0, 0
    for piece in requests.pieces():
        chosen = _within(_arrival(piece), start_ns, start_ns + length_ns)
        begun = np.where(piece.is_known("first_scheduled_ns"), piece.whole("first_scheduled_ns"), end_ns)
        total += float((begun - _arrival(piece))[chosen].sum())
        num += int(chosen.sum())
    return total / num / 1e9 if num else None
