"""Throughput: counts per second of the time in which a run's requests come.

That time ends with the last arrival: after it a run only drains, and how long that takes depends on its longest
requests and not on the rate that it served. If fewer than half of the requests have ended by then, the time goes on
until half have; if all came at once, until the run ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np

from analysis.measures.metrics import last_token_ns
from analysis.measures.survival import Pool, pooled_distributions
from analysis.reading.request_columns import RequestColumns, Requests
from analysis.reading.rows import BoolArray, FloatArray

_NAMES = ("requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s", "total_tokens_per_s", "offered_per_s")


def rated_until_ns(requests: Requests, start_ns: int, end_ns: int) -> int:
    """The end of the time that rates are over. requests: those that arrive from start_ns to end_ns, the run's end."""
    last_ns = max(int(piece.whole("arrival_ns").max(initial=start_ns)) for piece in requests.pieces())
    if last_ns <= start_ns:
        return end_ns
    if 2 * requests.sum(lambda piece: (piece.numbers("finish_ns") <= last_ns).sum()) >= len(requests):
        return min(last_ns, end_ns)
    num_left = requests.sum(lambda piece: (~piece.is_known("finish_ns")).sum())
    ends = {"": Pool(np.full(num_left, float(end_ns)))}
    spare = [np.full(1 - len(requests) % 2, float(start_ns))]  # the median of an odd number is one of them
    half_ns = pooled_distributions(ends, lambda: iter([("", chain(spare, _ends(requests)))]))[""]["p50"]
    return end_ns if half_ns is None else min(int(half_ns), end_ns)


def _ends(requests: Requests) -> Iterable[FloatArray]:
    for piece in requests.pieces():
        finish_ns = piece.numbers("finish_ns")
        yield finish_ns[~np.isnan(finish_ns)]


def is_within(requests: RequestColumns, start_ns: int, until_ns: int) -> BoolArray:
    """Which requests end from start_ns to until_ns `[num_requests]`."""
    finish_ns = requests.numbers("finish_ns")
    return (finish_ns >= start_ns) & (finish_ns <= until_ns)


def throughput(requests: Requests, start_ns: int, until_ns: int) -> dict[str, Any]:
    """Completed requests, emitted and prompt tokens per second from start_ns to until_ns, and the offered rate.

    A prompt counts when its first output token is emitted, including cached tokens, as in serving benchmarks.
    """
    duration_s = (until_ns - start_ns) / 1e9
    if duration_s <= 0:
        return {"duration_s": 0.0} | dict.fromkeys(_NAMES)
    completed = prompt = output = num_inside = 0
    first_ns, last_ns = until_ns, start_ns  # arrivals within
    for piece in requests.pieces():
        first_token_ns = piece.numbers("first_token_ns")
        completed += int((piece.is_completed & is_within(piece, start_ns, until_ns)).sum())
        began = first_token_ns >= start_ns
        prompt += int(piece.whole("num_prompt_tokens")[began & (first_token_ns <= until_ns)].sum())
        is_whole = began & (last_token_ns(piece) <= until_ns)
        output += int(piece.whole("num_output_tokens")[is_whole].sum())
        if not is_whole.all():
            output += _num_tokens_within(piece.where(~is_whole), start_ns, until_ns)
        arrival = piece.whole("arrival_ns")
        inside = arrival[(arrival >= start_ns) & (arrival <= until_ns)]
        num_inside += inside.size
        first_ns = min(first_ns, int(inside.min(initial=until_ns)))
        last_ns = max(last_ns, int(inside.max(initial=start_ns)))
    window_s = (last_ns - first_ns) / 1e9 if num_inside > 1 else 0.0
    return {
        "duration_s": duration_s,
        "requests_per_s": completed / duration_s,
        "output_tokens_per_s": output / duration_s,
        "prompt_tokens_per_s": prompt / duration_s,
        "total_tokens_per_s": (prompt + output) / duration_s,
        "offered_per_s": (num_inside - 1) / window_s if window_s > 0 else None,
    }


def _num_tokens_within(requests: RequestColumns, start_ns: int, until_ns: int) -> int:
    """The tokens emitted then: without their instants as if each request had emitted them evenly spaced."""
    if requests.tokens is not None:
        return requests.num_tokens_within(start_ns, until_ns)
    first_ns, num_steps = requests.numbers("first_token_ns"), np.maximum(requests.whole("num_token_steps"), 1)
    gap_ns = np.maximum((last_token_ns(requests) - first_ns) / np.maximum(num_steps - 1, 1), 1.0)
    before, after = (np.clip(np.ceil((at - first_ns) / gap_ns), 0, num_steps) for at in (start_ns, until_ns + 1))
    return round(float(np.nansum(requests.whole("num_output_tokens") * (after - before) / num_steps)))
