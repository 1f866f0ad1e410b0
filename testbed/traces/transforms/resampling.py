"""Makes traces similar to a recorded one, a different one for each seed: replicates, and more users of its kind."""

from __future__ import annotations

from collections import Counter
from math import ceil

from testbed.checks import require
from testbed.errors import TraceError
from testbed.traces.schema import TokenIds, Trace, TraceRequest
from testbed.traces.stream import MAX_HELD_ROWS
from testbed.traces.synthesis import content_key
from testbed.traces.transforms.common import MAX_S, derived, marked, renamed
from testbed.traces.transforms.units import Unit, contents_of, units_of
from testbed.wording import count

_COPIES = "copies at once"  # in the note of `copies`
_WHOLE = 2**64


def jitter(trace: Trace, within_s: float, seed: int = 0) -> Trace:
    """Moves each session, conversation or single request by up to `within_s` in either direction.

    The move is uniform, by a hash of its name. All its requests move by the same time. A start that would come before 0
    comes as long after it: so the rate stays what it is, and no starts pile up at 0."""
    units = list(map(units_of(trace), trace.rows))
    moved = _moves(trace, units, within_s, seed)
    rows = [row._replace(arrival_ns=row.arrival_ns + moved[unit]) for unit, row in zip(units, trace.rows, strict=True)]
    note = f"starts of {count(len(moved), 'session')} moved by up to {within_s:g} s, seed {seed}"
    return _in_order(trace, rows, note)


def _moves(trace: Trace, units: list[Unit], within_s: float, seed: int) -> dict[Unit, int]:
    """Returns by how many ns each unit is moved. units: of the rows. Raises ConfigError for a bad `within_s`."""
    require("within_s", within_s, 0 < within_s <= MAX_S, f"above 0, up to {MAX_S:.1e}")
    within_ns = round(within_s * 1e9)
    earliest: dict[Unit, int] = {}
    for unit, row in zip(units, trace.rows, strict=True):
        earliest.setdefault(unit, row.arrival_ns)
    return {
        unit: abs(start_ns + content_key("jitter", seed, *unit) * (2 * within_ns + 1) // _WHOLE - within_ns) - start_ns
        for unit, start_ns in earliest.items()
    }


def _in_order(trace: Trace, rows: list[TraceRequest], note: str) -> Trace:
    return derived(trace, lambda: iter(sorted(rows, key=lambda row: row.arrival_ns)), note)


def copies(trace: Trace, num: float, within_s: float, seed: int = 0) -> Trace:
    """Lays `num` copies of the trace over each other: so many times as many users, whose own pauses stay.

    The first copy is as recorded. In the others each session, conversation or single request is moved as by `jitter`,
    and has its own contents (explicit token ids stay, under a cache salt of the copy). The last copy may be a part: of
    2.3 copies the third has three tenths of the sessions. All that is there with a smaller `num` is there with a larger
    one. Ids get "@1", "@2", …; "@@1", … if the trace already is copies.
    """
    most = MAX_HELD_ROWS // len(trace)
    require("num", num, 0 < num <= most, f"above 0, at most {most:,}, for {len(trace):,} requests each in memory")
    units = list(map(units_of(trace), trace.rows))
    mark = "@" * (1 + sum(_COPIES in note for note in trace.notes))
    rows: list[TraceRequest] = []
    for copy in range(ceil(num)):
        own_seed, bound = content_key("copy", seed, copy), int((num - copy) * _WHOLE)
        moved = _moves(trace, units, within_s, own_seed)
        moved = {unit: by_ns for unit, by_ns in moved.items() if content_key("thin", own_seed, *unit) < bound}
        kept = ((row, moved[unit]) for unit, row in zip(units, trace.rows, strict=True) if unit in moved)
        rows += [_copied(row, by_ns, f"{mark}{copy}") if copy else row for row, by_ns in kept]
    return _in_order(trace, rows, f"{num:g} {_COPIES}, starts moved by up to {within_s:g} s, seed {seed}")


def _copied(row: TraceRequest, by_ns: int, mark: str) -> TraceRequest:
    row = marked(row, "", mark)._replace(arrival_ns=row.arrival_ns + by_ns)
    if any(isinstance(part, TokenIds) for part in row.prompt):
        row = row._replace(cache_salt=f"{row.cache_salt or ''}{mark}")
    return renamed(row, mark)


def bootstrap(trace: Trace, seed: int = 0) -> Trace:
    """Samples sessions, conversations or single requests with replacement, as many as there are.

    The recorded starts stay. Requests that would come after the last recorded arrival are left out, as the recording
    left them out.

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
    return _in_order(trace, kept, note)
