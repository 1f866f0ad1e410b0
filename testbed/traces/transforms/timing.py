"""Transformations of arrivals. Contents and lengths stay, and so do think times, except in `speed_up`."""

from __future__ import annotations

from collections.abc import Iterator

from testbed.checks import choose, require
from testbed.errors import ConfigError
from testbed.traces.arrivals import ArrivalConfig, idle_notes, instants
from testbed.traces.draws import streams
from testbed.traces.schema import MAX_NS, Trace, TraceRequest, TraceSource
from testbed.traces.transforms.common import MAX_FLOAT, MAX_S, S, derived
from testbed.traces.transforms.selection import thinned
from testbed.traces.transforms.units import session_of


def scale_rate(trace: S, factor: float) -> S:
    """Makes arrivals `factor` times as fast: divides each arrival by it. Think times and cancellations stay."""
    require("factor", factor, 0 < factor <= MAX_FLOAT, "a finite number above 0")
    idle = ", which changes nothing: all requests but closed-loop turns arrive at 0" if _is_at_once(trace) else ""
    return _rate_scaled(trace, factor, f"arrival rate x {factor:g}{idle}", ("factor", factor))


def _rate_scaled(trace: S, factor: float, note: str, given: tuple[str, float]) -> S:
    """Divides arrivals by `factor`. given: the parameter from which it was computed, and its value, for errors."""
    late = f"large enough that the last arrival comes before {MAX_S:.1e} s"

    def rows() -> Iterator[TraceRequest]:
        for row in trace:
            arrival_ns = row.arrival_ns / factor
            require(*given, arrival_ns <= MAX_NS, late)
            yield row._replace(arrival_ns=round(arrival_ns))

    return derived(trace, rows, note, num_requests=trace.num_requests)


def _is_at_once(trace: TraceSource) -> bool:
    """Whether all arrivals are at 0. Reads a stream up to the first that is not, or to its closed tail."""
    for row in trace:
        if row.arrival_ns > 0:
            return False
        if trace.closed_tail and row.think_ns is not None:
            return True
    return True


def speed_up(trace: S, factor: float) -> S:
    """Makes the trace's clock `factor` times as fast: divides arrivals and think times, which set when requests come.
    Cancellations and deadlines, which limit how long a request takes, stay."""
    scaled = scale_rate(trace, factor)

    def rows() -> Iterator[TraceRequest]:
        for row in scaled:
            yield row if row.think_ns is None else row._replace(think_ns=round(row.think_ns / factor))

    return derived(trace, rows, f"the trace's clock x {factor:g}", num_requests=trace.num_requests)


WAYS = {  # value of `by` of set_rate -> what it keeps
    "thin": "all times, and leaves whole sessions out at random",
    "warp": "all requests, and stretches or squeezes time, bursts and lulls with it",
}


def set_rate(trace: S, rate: float, by: str, seed: int = 0) -> S:
    """Changes the mean rate of arrivals to `rate` per second, `by` warp (of time) or thin (of requests).

    The two ways give different loads. by: "warp" stretches or squeezes time (all requests stay; bursts and lulls change
    their length), "thin" leaves whole sessions out at random (time stays; the rate can only fall). Iterates over a
    streamed trace once.
    """
    require("rate", rate, 0 < rate <= MAX_FLOAT, "a finite number above 0")
    choose("by", by, tuple(WAYS))
    num, first, last = 0, 0, 0
    for row in trace:
        if row.think_ns is None:
            first = row.arrival_ns if num == 0 else first
            num, last = num + 1, row.arrival_ns
    if last == first:
        raise ConfigError(f"trace {trace.name!r} has no rate to change: all its requests arrive at one instant")
    own_rate = (num - 1) / ((last - first) / 1e9)
    factor, told = rate / own_rate, f"rate set from {own_rate:g} to {rate:g} per second by {by}"
    if by == "warp":
        require("rate", rate, 0 < factor <= MAX_FLOAT, f"nearer to the trace's own {own_rate:g} per second")
        return _rate_scaled(trace, factor, f"{told}: arrival rate x {factor:g}", ("rate", rate))
    require("rate", rate, factor <= 1, f"at most the trace's own {own_rate:g} per second with by=thin")
    return thinned(trace, factor, seed, f"{told}: ")


def shift(trace: S, offset_s: float) -> S:
    """Moves all arrivals by `offset_s`, and none to before 0 (ConfigError)."""
    expected = f"a number of seconds from -{MAX_S:.1e} to {MAX_S:.1e}"
    require("offset_s", offset_s, abs(offset_s) <= MAX_S, expected)
    offset_ns = round(offset_s * 1e9)
    if offset_ns == 0:
        return trace

    def rows() -> Iterator[TraceRequest]:
        for number, row in enumerate(trace):
            if number == 0:
                least = f"at least {-row.arrival_ns / 1e9} s, so that no arrival is below 0"
                require("offset_s", offset_s, row.arrival_ns + offset_ns >= 0, least)
            yield row._replace(arrival_ns=row.arrival_ns + offset_ns)

    return derived(trace, rows, f"shifted by {offset_s:g} s", num_requests=trace.num_requests)


def spread(trace: Trace) -> Trace:
    """Spreads rows that arrive at one instant evenly up to the next instant; the last batch as far as the one before.

    For traces with batched timestamps, whose bursts come from the recording and not from the users.
    """
    made = list(trace.rows)
    timed = [i for i, row in enumerate(made) if row.think_ns is None]
    starts = [n for n, i in enumerate(timed) if n == 0 or made[i].arrival_ns != made[timed[n - 1]].arrival_ns]
    num_moved = gap_ns = 0
    for n, start in enumerate(starts):
        end = starts[n + 1] if n + 1 < len(starts) else len(timed)
        at_ns = made[timed[start]].arrival_ns
        gap_ns = made[timed[end]].arrival_ns - at_ns if end < len(timed) else gap_ns
        size = end - start
        for j in range(1, size):
            i = timed[start + j]
            made[i] = made[i]._replace(arrival_ns=at_ns + gap_ns * j // size)
        num_moved += size - 1 if gap_ns else 0
    note = f"{num_moved} of {len(made)} arrivals, batched in the file, were spread up to the next"
    return derived(trace, lambda: iter(made), note)


def restart(trace: Trace, config: ArrivalConfig, seed: int = 0) -> Trace:
    """Gives new starts to sessions and requests outside sessions, in their order; later turns move with the start."""
    starts = instants(config, streams(seed))
    offsets: dict[tuple[str, str], int] = {}
    rows = []
    for row in trace.rows:
        key = session_of(row)
        if key not in offsets:
            offsets[key] = next(starts) - row.arrival_ns
        rows.append(row._replace(arrival_ns=row.arrival_ns + offsets[key]))
    note = f"sessions start anew by {config.says()}, seed {seed}"
    return derived(trace, lambda: iter(rows), "; ".join((note, *idle_notes(config, ""))))
