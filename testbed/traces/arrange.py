"""Makes a trace of a list of rows: checks ids and sessions, sorts arrivals. Every whole trace is made here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from testbed.errors import TraceError
from testbed.traces.schema import MAX_NS, Trace, TraceRequest
from testbed.wording import count


def arrange(name: str, rows: Iterable[TraceRequest], notes: Sequence[str] = ()) -> Trace:
    """Checks and sorts `rows` into a Trace; rows that were out of order are counted in its notes.

    A closed-loop turn (think_ns set) has no arrival of its own: it gets, and is sorted by, that of the turn before it.
    Raises TraceError, with the place, on no rows, a duplicate id, an arrival beyond MAX_NS, an empty prompt or output,
    and broken sessions: a missing or repeated turn (turns may begin at any number), a first turn without an arrival,
    turns that go back in time.
    """
    given = list(rows)
    if not given:
        raise no_requests(name, notes)
    _check_rows(given)
    sessions = sessions_of(given)
    for positions in sessions.values():
        previous: TraceRequest | None = None
        for position in positions:
            previous = given[position] = check_turn(given[position], previous)
    num_late = _count_late(given)
    order = list(range(len(given)))
    if num_late or sessions:
        order.sort(key=lambda position: given[position].arrival_ns)
    if sessions:
        _restore_turn_order(order, sessions, len(given))
    said = list(notes)
    if num_late:
        said.append(f"{count(num_late, 'row')} out of order, sorted by arrival")
    return Trace(name, tuple(given[position] for position in order), tuple(said))


def no_requests(name: str, notes: Sequence[str]) -> TraceError:
    """Returns the error for a trace without rows, with what was done to it: the last note, then those before."""
    *before, last = notes or ("",)
    after = f" (after: {last}{'; before that: ' if before else ''}{'; '.join(before)})" if last else ""
    return TraceError(f"trace {name!r} has no requests; expected at least one{after}")


def sessions_of(rows: Sequence[TraceRequest]) -> dict[str, list[int]]:
    """Returns the positions of each session's rows in turn order; sessions in order of first appearance."""
    sessions: dict[str, list[int]] = {}
    for position, row in enumerate(rows):
        if row.session_id is not None:
            sessions.setdefault(row.session_id, []).append(position)
    for positions in sessions.values():
        positions.sort(key=lambda position: rows[position].turn or 0)
    return sessions


def too_late(row: TraceRequest) -> TraceError:
    """Returns the error for an arrival after MAX_NS."""
    return TraceError(
        f"{_where(row)}: the request arrives at {row.arrival_ns / 1e9:.4g} s; expected at most {MAX_NS // 10**9:,} s"
    )


def check_row(row: TraceRequest) -> None:
    """Checks a row without regard to other rows. Raises TraceError, with its place."""
    where = _where(row)
    if row.arrival_ns > MAX_NS:
        raise too_late(row)
    if row.num_prompt_tokens < 1:
        raise TraceError(f"{where}: the prompt is empty; expected at least one token")
    if row.output is not None and row.output.num_tokens < 1:
        raise TraceError(f"{where}: the output is empty; expected at least one token, or no output at all")
    if (row.session_id is None) != (row.turn is None):
        missing, given = ("session_id", "turn") if row.session_id is None else ("turn", "session_id")
        raise TraceError(f"{where}: field {missing!r} is absent; expected it beside {given!r}")
    if row.think_ns is not None and row.session_id is None:
        raise TraceError(f"{where}: field 'think_time' is given outside a session; expected session_id and turn")


def check_turn(row: TraceRequest, previous: TraceRequest | None) -> TraceRequest:
    """Checks a turn against the one before it in its session (None: it is the first), and returns it. A closed-loop
    turn gets the arrival of the one before. Raises TraceError, with its place.
    """
    where = _where(row)
    if previous is None:
        if row.think_ns is not None:
            raise TraceError(
                f"{where}: the first turn of session {row.session_id!r} (turn {row.turn}) has a think_time; "
                "expected an arrival_time instead"
            )
        return row
    assert previous.turn is not None
    if row.turn != previous.turn + 1:
        raise TraceError(
            f"{where}: field 'turn' is {row.turn} in session {row.session_id!r}; "
            f"expected {previous.turn + 1}, the turn after {previous.place or previous.request_id}"
        )
    if row.think_ns is not None:
        return row._replace(arrival_ns=previous.arrival_ns)
    if row.arrival_ns < previous.arrival_ns:
        raise TraceError(
            f"{where}: turn {row.turn} of session {row.session_id!r} arrives at {row.arrival_ns / 1e9} s, "
            f"before turn {previous.turn} at {previous.arrival_ns / 1e9} s; expected turns in order of time"
        )
    return row


def used_twice(row: TraceRequest, first: str = "") -> TraceError:
    """Returns the error for an id that another row has. first: the place of that row, if known."""
    return TraceError(
        f"{_where(row)}: field 'request_id' is {row.request_id!r}; expected an id not used before"
        + (f" (first at {first})" if first else "")
    )


def _where(row: TraceRequest) -> str:
    return row.place or f"request {row.request_id!r}"


def _check_rows(rows: list[TraceRequest]) -> None:
    seen: dict[str, str] = {}
    for row in rows:
        if row.request_id in seen:
            raise used_twice(row, seen[row.request_id])
        seen[row.request_id] = row.place
        check_row(row)


def _count_late(rows: list[TraceRequest]) -> int:
    """Returns how many rows with an arrival of their own come after a row that arrives later."""
    num_late = latest = 0
    for row in rows:
        if row.think_ns is None:
            if row.arrival_ns < latest:
                num_late += 1
            else:
                latest = row.arrival_ns
    return num_late


def _restore_turn_order(order: list[int], sessions: dict[str, list[int]], num_rows: int) -> None:
    """Puts each session's turns into turn order, within their sorted places: the sort knows only their arrivals."""
    place_of = [0] * num_rows
    for place, position in enumerate(order):
        place_of[position] = place
    for positions in sessions.values():
        places = sorted(place_of[position] for position in positions)
        for place, position in zip(places, positions, strict=True):
            order[place] = position
