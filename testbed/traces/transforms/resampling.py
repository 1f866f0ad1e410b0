"""Makes traces similar to a recorded one, a different one for each seed: replicates of a recorded trace."""

from __future__ import annotations

from collections import Counter

from testbed.checks import require
from testbed.errors import TraceError
from testbed.traces.schema import Trace, TraceRequest
from testbed.traces.synthesis import content_key
from testbed.traces.transforms.common import MAX_S, derived, marked, renamed
from testbed.traces.transforms.units import Unit, contents_of, units_of
from testbed.wording import count

_WHOLE = 2**64


def jitter(trace: Trace, within_s: float, seed: int = 0) -> Trace:
    """Moves each session, conversation or single request by up to `within_s` in either direction, uniformly, by a hash
    of its name. All its requests move by the same time. A start that would come before 0 comes as long after it: so
    the rate stays what it is, and no starts pile up at 0."""
    require("within_s", within_s, 0 < within_s <= MAX_S, f"above 0, up to {MAX_S:.1e}")
    unit_of, within_ns = units_of(trace), round(within_s * 1e9)
    earliest: dict[Unit, int] = {}
    for row in trace.rows:
        earliest.setdefault(unit_of(row), row.arrival_ns)
    moved = {
        unit: abs(start_ns + content_key("jitter", seed, *unit) * (2 * within_ns + 1) // _WHOLE - within_ns) - start_ns
        for unit, start_ns in earliest.items()
    }
    rows = [row._replace(arrival_ns=row.arrival_ns + moved[unit_of(row)]) for row in trace.rows]
    note = f"starts of {count(len(moved), 'session')} moved by up to {within_s:g} s, seed {seed}"
    return derived(trace, lambda: iter(sorted(rows, key=lambda row: row.arrival_ns)), note)


def bootstrap(trace: Trace, seed: int = 0) -> Trace:
    """Samples sessions, conversations or single requests with replacement, as many as there are. The recorded starts
    stay. Requests that would come after the last recorded arrival are left out, as the recording left them out.

    A unit that is sampled again has its own contents, except those that several units share (a system prompt), so that
    a copy does not hit the first one's blocks. Ids get `~` and the number of the start.
    """
    unit_of = units_of(trace)
    members: dict[Unit, list[TraceRequest]] = {}
    for row in trace.rows:
        members.setdefault(unit_of(row), []).append(row)
    if len(members) < 2:
        raise TraceError(f"trace {trace.name!r} is one session: there is nothing to draw from; use windows of it")
    common, units = contents_of(trace.rows, unit_of), list(members)
    num_drawn: Counter[Unit] = Counter()
    rows: list[TraceRequest] = []
    for number, slot in enumerate(units):
        drawn = units[content_key("bootstrap", seed, number) * len(units) // _WHOLE]
        copy = num_drawn[drawn]
        num_drawn[drawn] += 1
        later_ns = members[slot][0].arrival_ns - members[drawn][0].arrival_ns
        for row in members[drawn]:
            row = marked(row, "", f"~{number}")._replace(arrival_ns=row.arrival_ns + later_ns)
            rows.append(renamed(row, "bootstrap", copy, but=common) if copy else row)
    end_ns = max(row.arrival_ns for row in trace.rows)
    kept = [row for row in rows if row.arrival_ns <= end_ns]
    note = f"{len(units)} sessions drawn with replacement from as many ({len(num_drawn)} different), seed {seed}"
    if len(kept) < len(rows):
        note += f"; {count(len(rows) - len(kept), 'request')} after the recorded end left out"
    return derived(trace, lambda: iter(sorted(kept, key=lambda row: row.arrival_ns)), note)
