"""Transformations that leave requests out. Sessions stay whole, or lose their last turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappush, heapreplace
from itertools import islice

from testbed.checks import require
from testbed.errors import ConfigError
from testbed.traces.schema import Trace, TraceRequest, TraceSource
from testbed.traces.synthesis import content_key
from testbed.traces.transforms.common import MAX_S, Rows, S, derived
from testbed.traces.transforms.units import UnitOf, units_of
from testbed.wording import count


def window(trace: S, start_s: float = 0.0, end_s: float | None = None) -> S:
    """Returns the requests that arrive in [start_s, end_s), moved so that start_s becomes 0.

    A closed-loop turn stays with the turn before it. Other sessions may be cut; their turns keep their prompts.
    """
    require("start_s", start_s, 0 <= start_s <= MAX_S, f"0 to {MAX_S:.1e}")
    expected = f"above start_s ({start_s}), up to {MAX_S:.1e}, or absent"
    require("end_s", end_s, end_s is None or start_s < end_s <= MAX_S, expected)
    start_ns, end_ns = round(start_s * 1e9), None if end_s is None else round(end_s * 1e9)

    def rows() -> Iterator[TraceRequest]:
        for row in trace:
            if end_ns is not None and row.arrival_ns >= end_ns:
                return
            if row.arrival_ns >= start_ns:
                yield row._replace(arrival_ns=row.arrival_ns - start_ns)

    note = f"cut to {start_s:.15g} s … {'the end' if end_s is None else f'{end_s:.15g} s'}"
    if isinstance(trace, Trace) and max(start_ns, end_ns or 0) > (last_ns := trace.rows[-1].arrival_ns):
        note += f", and the last request arrives at {last_ns / 1e9:.6g} s"
    return derived(trace, rows, note)


def limit(trace: S, num_requests: int) -> S:
    """Returns the first `num_requests` rows; sessions may lose their last turns."""
    require("num_requests", num_requests, num_requests >= 1, "at least 1")
    known = trace.num_requests
    if known is not None and num_requests >= known:
        return trace
    note = f"the first {count(num_requests, 'request') if known is None else f'{num_requests} of {known} requests'}"
    return derived(
        trace, lambda: islice(trace, num_requests), note, num_requests=None if known is None else num_requests
    )


def keep(trace: S, wanted: Callable[[TraceRequest], bool], why: str = "filtered") -> S:
    """Returns the rows that `wanted` accepts. A session ends before its first turn that is not accepted."""

    def rows() -> Iterator[TraceRequest]:
        broken: set[str] = set()  # sessions that have ended; never iterated, as its order is not fixed
        for row in trace:
            if row.session_id in broken:
                continue
            if wanted(row):
                yield row
            elif row.session_id is not None:
                broken.add(row.session_id)

    return _kept(trace, rows, why)


def _kept(trace: S, rows: Rows, note: str) -> S:
    """Returns the trace with some of its rows, and a note on their number if it is whole."""
    return derived(trace, rows, note, counted=lambda made: f"{note}: {len(made)} of {trace.num_requests} requests kept")


def keep_within(
    trace: S,
    min_prompt_tokens: int | None = None,
    max_prompt_tokens: int | None = None,
    min_output_tokens: int | None = None,
    max_output_tokens: int | None = None,
    tenant: str | None = None,
    max_turn: int | None = None,
) -> S:
    """Returns the requests within all given bounds (inclusive): `max_prompt_tokens`, `tenant`, `max_turn`, …

    A session ends before its first turn outside.
    """
    bounds = {name: value for name, value in (
        ("min_prompt_tokens", min_prompt_tokens), ("max_prompt_tokens", max_prompt_tokens),
        ("min_output_tokens", min_output_tokens), ("max_output_tokens", max_output_tokens), ("max_turn", max_turn),
        ("tenant", tenant),
    ) if value is not None}  # fmt: skip
    if not bounds:
        raise ConfigError("filter is empty; it must be given at least one bound, such as max_prompt_tokens")
    for name, value in bounds.items():
        require(name, value, isinstance(value, str) or value >= 0, "0 or above")

    def is_within(row: TraceRequest) -> bool:
        num_prompt, num_output = row.num_prompt_tokens, row.num_output_tokens
        return (
            (min_prompt_tokens is None or num_prompt >= min_prompt_tokens)
            and (max_prompt_tokens is None or num_prompt <= max_prompt_tokens)
            and (min_output_tokens is None or (num_output is not None and num_output >= min_output_tokens))
            and (max_output_tokens is None or (num_output is not None and num_output <= max_output_tokens))
            and (tenant is None or row.tenant == tenant)
            and (max_turn is None or row.turn is None or row.turn <= max_turn)
        )

    return keep(trace, is_within, "filtered by " + ", ".join(f"{name}={value}" for name, value in bounds.items()))


def thin(trace: S, fraction: float, seed: int = 0) -> S:
    """Keeps each session, conversation, or request outside of them with probability `fraction`, by a hash of its name.

    What stays at a smaller fraction also stays at a larger one.
    """
    return thinned(trace, fraction, seed)


def thinned(trace: S, fraction: float, seed: int, why: str = "") -> S:
    """Like `thin`. why: the beginning of the note."""
    require("fraction", fraction, 0 < fraction <= 1, "above 0, up to 1")
    return _below(trace, lambda _: int(fraction * 2**64), seed, f"{why}thinned to {fraction:g} with seed {seed}")


def sample_sessions(trace: S, num: int, seed: int = 0) -> S:
    """Keeps `num` sessions, conversations, or requests outside of them, sampled by a hash of their names.

    All stay if there are fewer. A smaller sample is a part of a larger one. Iterates over a streamed trace three times;
    holds `num` hashes.
    """
    require("num", num, num >= 1, "at least 1")
    note = f"a sample of {count(num, 'session')} with seed {seed}"
    return _below(trace, lambda unit_of: _bound(trace, num, seed, unit_of), seed, note)


def _bound(trace: TraceSource, num: int, seed: int, unit_of: UnitOf) -> int:
    """Returns a bound just above the `num` smallest hashes of the trace's units."""
    smallest: list[int] = []  # a heap of the negated hashes: the largest is first
    held: set[int] = set()  # the hashes in the heap; never iterated, as its order is not fixed
    for row in trace:
        key = content_key("thin", seed, *unit_of(row))
        if key in held:
            continue
        if len(smallest) < num:
            held.add(key)
            heappush(smallest, -key)
        elif key < -smallest[0]:
            held.add(key)
            held.discard(-heapreplace(smallest, -key))
    return -smallest[0] + 1 if smallest else 0


def _below(trace: S, bound_of: Callable[[UnitOf], int], seed: int, note: str) -> S:
    """Returns the units whose hash is below a bound."""

    def rows() -> Iterator[TraceRequest]:
        unit_of = units_of(trace)
        bound = bound_of(unit_of)
        return (row for row in trace if content_key("thin", seed, *unit_of(row)) < bound)

    return _kept(trace, rows, note)
