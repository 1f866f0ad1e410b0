"""Transformations of traces: pure functions from Trace to Trace, each of which says in the notes what it did.

Parameters out of range raise ConfigError; a result without requests raises TraceError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from testbed.errors import ConfigError, TraceError
from testbed.traces.arrange import arrange
from testbed.traces.parts import cut_part, cut_parts, rename_part
from testbed.traces.schema import MAX_NS, Trace, TraceRequest
from testbed.traces.synthesis import content_key

MAX_S = MAX_NS / 1e9


def scale_rate(trace: Trace, factor: float) -> Trace:
    """Arrivals come `factor` times as fast: every arrival is divided by it. Think times and cancellations stay."""
    _require(math.isfinite(factor) and factor > 0, "trace.rate_scale", factor, "above 0")
    late = f"large enough that the last arrival comes before {MAX_S:.1e} s"
    _require(trace.rows[-1].arrival_ns / factor <= MAX_NS, "trace.rate_scale", factor, late)
    rows = (replace(row, arrival_ns=round(row.arrival_ns / factor)) for row in trace.rows)
    return _derived(trace, rows, f"arrival rate x {factor:g}")


def stretch_to(trace: Trace, duration_s: float) -> Trace:
    """Scales the arrivals linearly so that the last comes at `duration_s` (the first is expected at 0)."""
    _require(0 < duration_s <= MAX_S, "duration_s", duration_s, f"above 0, up to {MAX_S:.1e}")
    last_ns, duration_ns = trace.rows[-1].arrival_ns, round(duration_s * 1e9)
    if last_ns == 0:
        raise TraceError(f"trace {trace.name!r} cannot be stretched: all its requests arrive at 0")
    rows = (replace(row, arrival_ns=(row.arrival_ns * duration_ns + last_ns // 2) // last_ns) for row in trace.rows)
    return _derived(trace, rows, f"arrivals stretched from {last_ns / 1e9:g} s to {duration_s:g} s")


def spread(trace: Trace) -> Trace:
    """Spreads rows that arrive at one instant evenly up to the next instant; the last batch as far as the one before.

    For traces whose timestamps are batched: the bursts of the recording are then not those of the users.
    """
    rows = list(trace.rows)
    timed = [i for i, row in enumerate(rows) if row.think_ns is None]
    starts = [n for n, i in enumerate(timed) if n == 0 or rows[i].arrival_ns != rows[timed[n - 1]].arrival_ns]
    num_moved = gap_ns = 0
    for n, start in enumerate(starts):
        end = starts[n + 1] if n + 1 < len(starts) else len(timed)
        at_ns = rows[timed[start]].arrival_ns
        gap_ns = rows[timed[end]].arrival_ns - at_ns if end < len(timed) else gap_ns
        size = end - start
        for j in range(1, size):
            i = timed[start + j]
            rows[i] = replace(rows[i], arrival_ns=at_ns + gap_ns * j // size)
        num_moved += size - 1 if gap_ns else 0
    return _derived(
        trace, rows, f"{num_moved} of {len(rows)} arrivals, batched in the file, were spread up to the next"
    )


def shift(trace: Trace, offset_ns: int, note: bool = True) -> Trace:
    """Moves all arrivals by `offset_ns`. Raises ConfigError if one would fall before 0."""
    first_ns = trace.rows[0].arrival_ns
    _require(first_ns + offset_ns >= 0, "shift", offset_ns, f"at least {-first_ns} ns, so that no arrival is below 0")
    if offset_ns == 0:
        return trace
    rows = (replace(row, arrival_ns=row.arrival_ns + offset_ns) for row in trace.rows)
    return _derived(trace, rows, f"shifted by {offset_ns / 1e9:g} s" if note else None)


def window(trace: Trace, start_s: float = 0.0, end_s: float | None = None) -> Trace:
    """The requests that arrive in [start_s, end_s), moved so that start_s becomes 0.

    A closed-loop turn goes with the turn before it. An open session may be cut; its turns keep their prompts.
    """
    _require(0 <= start_s <= MAX_S, "trace.start_s", start_s, f"0 to {MAX_S:.1e}")
    expected = f"above start_s ({start_s}), up to {MAX_S:.1e}, or absent"
    _require(end_s is None or start_s < end_s <= MAX_S, "trace.end_s", end_s, expected)
    start_ns, end_ns = round(start_s * 1e9), None if end_s is None else round(end_s * 1e9)
    rows = (
        replace(row, arrival_ns=row.arrival_ns - start_ns)
        for row in trace.rows
        if row.arrival_ns >= start_ns and (end_ns is None or row.arrival_ns < end_ns)
    )
    return _derived(trace, rows, f"cut to {start_s:g} s … {'the end' if end_s is None else f'{end_s:g} s'}")


def limit(trace: Trace, num_requests: int) -> Trace:
    """The first `num_requests` rows; sessions may lose their last turns."""
    _require(num_requests >= 1, "limit", num_requests, "at least 1")
    if num_requests >= len(trace):
        return trace
    return _derived(trace, trace.rows[:num_requests], f"the first {num_requests} of {len(trace)} requests")


def keep(trace: Trace, wanted: Callable[[TraceRequest], bool], why: str = "filtered") -> Trace:
    """The rows that `wanted` accepts. A session ends where one of its turns is refused."""
    broken: set[str] = set()  # asked, never iterated
    kept = []
    for row in trace.rows:
        if row.session_id in broken:
            continue
        if wanted(row):
            kept.append(row)
        elif row.session_id is not None:
            broken.add(row.session_id)
    return _derived(trace, kept, f"{why}: {len(kept)} of {len(trace)} requests kept")


def thin(trace: Trace, fraction: float, seed: int = 0) -> Trace:
    """Keeps each session, and each request outside sessions, with probability `fraction`, by a hash of its id.

    Who stays at a smaller fraction also stays at a larger one.
    """
    _require(0 < fraction <= 1, "fraction", fraction, "above 0, up to 1")
    bound = int(fraction * 2**64)
    rows = [row for row in trace.rows if content_key("thin", seed, *_unit(row)) < bound]
    return _derived(trace, rows, f"thinned to {fraction:g}: {len(rows)} of {len(trace)} requests kept")


def clip_lengths(
    trace: Trace,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
    max_total_tokens: int | None = None,
) -> Trace:
    """Cuts prompts and outputs at their ends. max_total_tokens (a model's length) cuts the output to leave the prompt
    one token, then the prompt.
    """
    for name, value, least in (
        ("max_prompt_tokens", max_prompt_tokens, 1),
        ("max_output_tokens", max_output_tokens, 1),
        ("max_total_tokens", max_total_tokens, 2),
    ):
        _require(value is None or value >= least, name, value, f"at least {least}, or absent")
    rows, num_clipped = [], 0
    for row in trace.rows:
        max_output = _least(max_output_tokens, None if max_total_tokens is None else max_total_tokens - 1)
        output = row.output
        if output is not None and max_output is not None and output.num_tokens > max_output:
            output = cut_part(output, max_output)
        reserved = 1 if output is None else output.num_tokens
        max_prompt = _least(max_prompt_tokens, None if max_total_tokens is None else max_total_tokens - reserved)
        prompt = row.prompt
        if max_prompt is not None and row.num_prompt_tokens > max_prompt:
            prompt = cut_parts(prompt, max_prompt)
        is_same = prompt is row.prompt and output is row.output
        num_clipped += not is_same
        rows.append(row if is_same else replace(row, prompt=prompt, output=output))
    return _derived(trace, rows, f"lengths of {num_clipped} requests were clipped")


def repeat(trace: Trace, times: int, gap_s: float = 0.0, fresh_content: bool = True) -> Trace:
    """The trace `times` times, each copy `gap_s` after the last arrival of the one before; ids get "#1", "#2", ...

    fresh_content: copies have contents of their own (explicit token ids stay); else a copy hits what the first one left
    in a prefix cache.
    """
    _require(times >= 1, "times", times, "at least 1")
    _require(0 <= gap_s <= MAX_S, "gap_s", gap_s, f"0 to {MAX_S:.1e}")
    period_ns = trace.rows[-1].arrival_ns + round(gap_s * 1e9)
    rows = list(trace.rows)
    for copy in range(1, times):
        for row in trace.rows:
            marked = replace(_marked(row, "", f"#{copy}"), arrival_ns=row.arrival_ns + copy * period_ns)
            rows.append(_renamed(marked, "copy", copy) if fresh_content else marked)
    return _derived(trace, rows, f"repeated {times} times")


def merge(traces: Mapping[str, Trace], share_content: bool = False) -> Trace:
    """Several traces as one; the label of each goes before its ids, sessions and, as label/tenant, its tenants.

    share_content: equal contents of two traces are equal tokens (two windows of one file); else they are kept apart.
    """
    _require(len(traces) >= 1, "traces", len(traces), "at least 1 trace")
    rows: list[TraceRequest] = []
    for label, trace in traces.items():
        for row in trace.rows:
            marked = _marked(row, f"{label}/", "")
            marked = replace(marked, tenant=label if row.tenant is None else f"{label}/{row.tenant}")
            rows.append(marked if share_content else _renamed(marked, "merged", label))
    rows.sort(key=lambda row: row.arrival_ns)
    notes = [f"{label}: {note}" for label, trace in traces.items() for note in trace.notes]
    return arrange("+".join(traces), rows, notes)


def with_arrivals(trace: Trace, arrivals_ns: Sequence[int]) -> Trace:
    """Gives the rows that wait for no other (no closed-loop turns) new arrivals, in order; see generators.arrivals."""
    timed = [i for i, row in enumerate(trace.rows) if row.think_ns is None]
    _require(len(arrivals_ns) >= len(timed), "arrivals", len(arrivals_ns), f"at least {len(timed)} instants")
    rows = list(trace.rows)
    for i, arrival_ns in zip(timed, sorted(arrivals_ns[: len(timed)]), strict=True):
        rows[i] = replace(rows[i], arrival_ns=arrival_ns)
    return _derived(trace, rows, "arrivals were replaced")


def _derived(trace: Trace, rows: Iterable[TraceRequest], note: str | None) -> Trace:
    try:
        return arrange(trace.name, rows, trace.notes if note is None else (*trace.notes, note))
    except TraceError as error:
        raise TraceError(f"{error} (after: {note})" if note else str(error)) from None


def _marked(row: TraceRequest, prefix: str, suffix: str) -> TraceRequest:
    session = None if row.session_id is None else f"{prefix}{row.session_id}{suffix}"
    return replace(row, request_id=f"{prefix}{row.request_id}{suffix}", session_id=session)


def _renamed(row: TraceRequest, *names: str | int) -> TraceRequest:
    output = None if row.output is None else rename_part(row.output, *names)
    return replace(row, prompt=tuple(rename_part(part, *names) for part in row.prompt), output=output)


def _unit(row: TraceRequest) -> tuple[str, str]:
    return ("request", row.request_id) if row.session_id is None else ("session", row.session_id)


def _least(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return first if second is None else second
    return min(first, second)


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{name} is {value}; it must be {expected}")
