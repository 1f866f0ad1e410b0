"""Files of the testbed's own schema, as JSONL, CSV or Parquet, whole or row by row. `own_log` chooses and renames
the records, `own_rows` reads one.

docs/traces.md has the table of fields. Exact fields, which write_jsonl writes (see serialize), take precedence. A field
that resembles an absent one is an error; others are ignored, and the notes list them.

Counts become synthetic content keyed by the request's id, the same in every file. In a session, a count is the length
of the turn's whole prompt. If it is long enough for the prompt and the output of the turn before, it begins with them,
so that prefix hits are those of a chat. If it is shorter, the prompt is a separate content. If the output of the turn
before is not known (the model decides), only its prompt is shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from testbed.errors import TraceError
from testbed.traces.arrange import check_row, check_turn, sessions_of, used_twice
from testbed.traces.readers.open_parquet import parquet_records, parquet_schema
from testbed.traces.readers.open_text import Record, csv_header, existing_file, format_suffix, read_csv, read_objects
from testbed.traces.readers.own_log import Columns, Log, Where, check_there, spread
from testbed.traces.readers.own_rows import Draft, fill, read_draft
from testbed.traces.schema import Trace, TraceRequest
from testbed.traces.stream import OutOfOrderError, StreamedTrace, whole

OWN = ("csv", "jsonl", "parquet")


def stream_jsonl(
    path: str | Path, limit: int | None = None, columns: Columns | None = None, where: Where | None = None
) -> StreamedTrace:
    """Reads one JSON object a line (plain, .gz, .zst), at most the first `limit` that `where` keeps; see of_log."""
    return of_log("jsonl", path, Log(lambda: own_records(path, columns, where, is_csv=False), limit, columns, where))


def stream_csv(
    path: str | Path, limit: int | None = None, columns: Columns | None = None, where: Where | None = None
) -> StreamedTrace:
    """Reads a CSV with a header (plain, .gz, .zst); an empty cell is an absent field; ids: "1 2 3" or "[1, 2, 3]"."""
    return of_log("csv", path, Log(lambda: own_records(path, columns, where, is_csv=True), limit, columns, where))


def stream_parquet(
    path: str | Path, limit: int | None = None, columns: Columns | None = None, where: Where | None = None
) -> StreamedTrace:
    """Reads a Parquet file; a null (or NaN in an optional column) is an absent field; places are row numbers from 1.

    A frozen trace (see testbed.traces.frozen) keeps its name and notes, and is checked against its fingerprint. If it
    has lost its metadata, it is read like any other file, with a note.
    """
    from testbed.traces.frozen import LOST, frozen_info, has_lost_metadata, stream_frozen  # it reads with this module

    info = frozen_info(path)
    if columns or where:
        check_there(path, columns, where, parquet_schema(path).names)
    elif info is not None:
        return stream_frozen(path, info, limit)
    lost = (LOST,) if has_lost_metadata(path) else ()
    return of_log("parquet", path, Log(lambda: parquet_records(path), limit, columns, where, lost))


def read_jsonl(path: str | Path) -> Trace:
    """Returns the whole trace of stream_jsonl: the file that a run has written."""
    return whole(stream_jsonl(path))


def own_format(path: str | Path) -> str:
    """Returns jsonl, csv or parquet, by a file's extension. Raises TraceError on another one."""
    existing_file(path)
    name = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}.get(format_suffix(path))
    if name is None:
        raise TraceError(
            f"{path}: unknown extension {format_suffix(path)!r}; expected .jsonl, .csv or .parquet "
            "(.gz and .zst for the first two)"
        )
    return name


def _objects(path: str | Path, columns: Columns | None, where: Where | None) -> Iterator[Record]:
    """Yields the objects; checks at the end that one has each of the names, as one alone need not have all."""
    seen: dict[str, None] = {}
    spreading = spread(columns, where)
    for place, record in read_objects(path):
        fields = spreading(record)
        if columns or where:
            seen.update(dict.fromkeys(fields))
        yield place, fields
    if seen:
        check_there(path, columns, where, seen)


def own_records(
    path: str | Path, columns: Columns | None = None, where: Where | None = None, *, is_csv: bool
) -> Iterator[Record]:
    """Returns the records of a CSV or JSONL. Raises TraceError if it lacks a name in `columns` or `where`."""
    return _csv_records(path, columns, where) if is_csv else _objects(path, columns, where)


def _csv_records(path: str | Path, columns: Columns | None, where: Where | None) -> Iterator[Record]:
    names = csv_header(path)
    check_there(path, columns, where, names)
    for place, cells in read_csv(path, names):
        yield place, {name: text for name, cell in zip(names, cells, strict=True) if (text := cell.strip())}


def of_log(name: str, path: str | Path, log: Log) -> StreamedTrace:
    """Returns the rows of a file as a stream. Memory grows with the ids, which must differ, and with the sessions.

    Iterating raises OutOfOrderError if a row, or a turn of a session, is out of order; TraceError on a bad row.
    """
    return StreamedTrace(
        name,
        lambda: _in_order(log),
        nothing=f"{path}: no requests; expected at least one row{log.where and f' by {log.where}'}",
        unordered=lambda: _in_any_order(log),
        counted=log.notes,
    )


def _in_order(log: Log) -> Iterator[TraceRequest]:
    ids: set[str] = set()
    start_ns = 0  # the first arrival, from which the others count
    newest: dict[str, tuple[int | None, TraceRequest]] = {}  # session -> its newest turn: in the file, and its row
    for place, fields in log:
        draft = read_draft(fields, place, str(len(ids)))
        if log.clock is None and draft.clock:
            start_ns = draft.row.arrival_ns
        log.clock = _one_clock(log.clock, draft)
        log.check_turn(draft.row)
        session = draft.row.session_id
        last, previous = newest.get(session or "", (None, None))
        row = log.with_turn(fill(_since(draft, start_ns), previous), last, previous)
        check_row(row)
        if row.request_id in ids:
            raise used_twice(row)
        ids.add(row.request_id)
        if session is not None:
            if row.think_ns is not None if previous is None else row.turn != (previous.turn or 0) + 1:
                raise _turn_too_early(draft.row, last, previous is None)
            row = check_turn(row, previous)
            newest[session] = draft.row.turn, row
        yield row


def _turn_too_early(row: TraceRequest, last: int | None, is_first: bool) -> OutOfOrderError:
    """last: the turn before it, in the file."""
    one, before = (f"turn {row.turn}", f"turn {last}") if row.turn is not None else ("a row", "one that arrives later")
    return OutOfOrderError(
        f"{row.place}: {one} of session {row.session_id!r} follows {'nothing' if is_first else before}; "
        "expected turns in order"
    )


def _in_any_order(log: Log) -> Iterator[TraceRequest]:
    """Reads all rows, then makes the contents of those with counts, session by session in turn order."""
    drafts: list[Draft] = []
    for place, fields in log:
        drafts.append(read_draft(fields, place, str(len(drafts))))
        log.clock = _one_clock(log.clock, drafts[-1])
        log.check_turn(drafts[-1].row)
    if log.clock:
        start_ns = min(draft.row.arrival_ns for draft in drafts if draft.clock)
        drafts = [_since(draft, start_ns) for draft in drafts]
    rows = [draft.row for draft in drafts]
    filled = [row if row.session_id is not None else fill(draft, None) for row, draft in zip(rows, drafts, strict=True)]
    for positions in sessions_of(rows).values():
        if not log.has_turns:
            positions.sort(key=lambda position: rows[position].arrival_ns)
        previous, last = None, None
        for position in positions:
            previous = filled[position] = log.with_turn(fill(drafts[position], previous), last, previous)
            last = rows[position].turn
    return iter(filled)


def _one_clock(clock: str | None, draft: Draft) -> str | None:
    """Returns the clock of the file's arrivals so far (None: none yet). Raises TraceError if the draft's is another."""
    if None in (clock, draft.clock) or clock == draft.clock:
        return draft.clock if clock is None else clock
    own, others = (name or "seconds of the run" for name in (draft.clock, clock))
    raise TraceError(f"{draft.row.place}: field 'arrival_time' is in {own}; expected {others}, as in the rows before")


def _since(draft: Draft, start_ns: int) -> Draft:
    """Returns the draft with an arrival after `start_ns`, if it has one."""
    if not start_ns or draft.clock is None:
        return draft
    return replace(draft, row=draft.row._replace(arrival_ns=draft.row.arrival_ns - start_ns))
