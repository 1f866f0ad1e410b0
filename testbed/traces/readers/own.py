"""Files of the testbed's own schema, as JSONL, CSV or Parquet, whole or row by row. `own_rows` reads one record.

docs/traces.md has the table of fields. Exact fields, which write_jsonl writes (see serialize), take precedence. A field
that resembles an absent one is an error; others are ignored, and the notes list them.

Counts become synthetic content keyed by the request's id, the same in every file. In a session, a count is the length
of the turn's whole prompt. If it is long enough for the prompt and the output of the turn before, it begins with them,
so that prefix hits are those of a chat. If it is shorter, the prompt is a separate content. If the output of the turn
before is not known (the model decides), only its prompt is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from testbed.errors import ConfigError, TraceError
from testbed.foreign_text import nearest, shown
from testbed.traces.arrange import check_row, check_turn, sessions_of, used_twice
from testbed.traces.readers.fields import listed
from testbed.traces.readers.open_parquet import parquet_records, parquet_schema
from testbed.traces.readers.open_text import Record, csv_header, existing_file, format_suffix, read_csv, read_objects
from testbed.traces.readers.own_rows import EXACT_FIELDS, FIELDS, KNOWN, Draft, fill, ignored_fields, read_draft
from testbed.traces.schema import Trace, TraceRequest
from testbed.traces.stream import OutOfOrderError, StreamedTrace, whole

OWN = ("csv", "jsonl", "parquet")
Columns = Mapping[str, str]  # the testbed's field -> the file's name for it


def stream_jsonl(path: str | Path, limit: int | None = None, columns: Columns | None = None) -> StreamedTrace:
    """Reads one JSON object a line (plain, .gz, .zst), at most the first `limit`; see _streamed."""

    def records() -> Iterator[Record]:
        objects = _objects(path, columns) if columns else read_objects(path)
        return islice(_renamed(objects, columns), limit)

    return _streamed("jsonl", path, records)


def stream_csv(path: str | Path, limit: int | None = None, columns: Columns | None = None) -> StreamedTrace:
    """Reads a CSV with a header (plain, .gz, .zst); an empty cell is an absent field; ids: "1 2 3" or "[1, 2, 3]"."""
    if columns:
        _check_there(path, columns, csv_header(path))
    return _streamed("csv", path, lambda: islice(_renamed(_csv_records(path), columns), limit))


def stream_parquet(path: str | Path, limit: int | None = None, columns: Columns | None = None) -> StreamedTrace:
    """Reads a Parquet file; a null (or NaN in an optional column) is an absent field; places are row numbers from 1.

    A frozen trace (see testbed.traces.frozen) keeps its name and notes, and is checked against its fingerprint. If it
    has lost its metadata, it is read like any other file, with a note.
    """
    from testbed.traces.frozen import LOST, frozen_info, has_lost_metadata, stream_frozen  # it reads with this module

    info = frozen_info(path)
    if columns:
        _check_there(path, columns, parquet_schema(path).names)
    elif info is not None:
        return stream_frozen(path, info, limit)
    lost = (LOST,) if has_lost_metadata(path) else ()
    return _streamed("parquet", path, lambda: islice(_renamed(parquet_records(path), columns), limit), lost)


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


def check_columns(columns: object) -> None:
    """Raises ConfigError, as of the key trace.columns, unless it maps fields of ours to different names."""
    if not isinstance(columns, Mapping):
        raise ConfigError(f"trace.columns is {shown(columns)}; it must be {{<our field>: <its name in the file>, …}}")
    given: dict[Any, str] = {}
    for field, name in columns.items():
        if field not in KNOWN:
            near = nearest(str(field), (*FIELDS, *EXACT_FIELDS))
            raise ConfigError(
                f"trace.columns has {field!r}, which is no field of ours; {near}valid: {', '.join(FIELDS)}"
            )
        if not isinstance(name, str) or not name:
            raise ConfigError(f"trace.columns.{field} is {shown(name)}; it must be a name in the file, as a string")
        if name in given:
            raise ConfigError(f"trace.columns names {name!r} for {given[name]} and for {field}; a column is one field")
        given[name] = field


def _check_there(path: str | Path, columns: Columns, names: Iterable[str]) -> None:
    there = list(names)
    if absent := [name for name in columns.values() if name not in there]:
        near = nearest(absent[0], there)
        raise TraceError(f"{path}: trace.columns names {absent[0]!r}, which it has not; {near}found {listed(there)}")


def _renamed(records: Iterator[Record], columns: Columns | None) -> Iterator[Record]:
    """Returns the records with our names for the fields in `columns`, which take the place of any that have these."""
    if not columns:
        return records
    left = {*columns, *columns.values()}
    return (
        (place, {ours: fields[name] for ours, name in columns.items() if name in fields}
         | {name: value for name, value in fields.items() if name not in left})
        for place, fields in records
    )  # fmt: skip


def _objects(path: str | Path, columns: Columns) -> Iterator[Record]:
    """Yields the objects; checks at the end that one has each of the columns, as one alone need not have all."""
    seen: dict[str, None] = {}
    for place, fields in read_objects(path):
        seen.update(dict.fromkeys(fields))
        yield place, fields
    if seen:
        _check_there(path, columns, seen)


def _csv_records(path: str | Path) -> Iterator[Record]:
    names = csv_header(path)
    for place, cells in read_csv(path, names):
        yield place, {name: text for name, cell in zip(names, cells, strict=True) if (text := cell.strip())}


def _streamed(
    name: str, path: str | Path, records: Callable[[], Iterator[Record]], notes: tuple[str, ...] = ()
) -> StreamedTrace:
    """Returns the rows of a file as a stream. Memory grows with the ids, which must differ, and with the sessions.

    Iterating raises OutOfOrderError if a row, or a turn of a session, is out of order; TraceError on a bad row.
    """
    names: dict[str, None] = {}  # of the fields in all records of a file that is read whole
    _, first = next(records(), ("", {}))
    return StreamedTrace(
        name,
        lambda: _in_order(records()),
        (*ignored_fields(first), *notes),
        nothing=f"{path}: no requests; expected at least one row",
        unordered=lambda: _in_any_order(records(), names),
        counted=lambda: (*ignored_fields(names), *notes),
    )


def _in_order(records: Iterator[Record]) -> Iterator[TraceRequest]:
    ids: set[str] = set()
    clock: str | None = None  # of the first arrival, from whose start_ns the others count
    start_ns = 0
    newest: dict[str, TraceRequest] = {}  # session -> its newest turn
    for place, fields in records:
        draft = read_draft(fields, place, str(len(ids)))
        if clock is None and draft.clock:
            start_ns = draft.row.arrival_ns
        clock = _one_clock(clock, draft)
        previous = newest.get(draft.row.session_id or "")
        row = fill(_since(draft, start_ns), previous)
        check_row(row)
        if row.request_id in ids:
            raise used_twice(row)
        ids.add(row.request_id)
        if row.session_id is not None:
            if row.think_ns is not None if previous is None else row.turn != (previous.turn or 0) + 1:
                raise OutOfOrderError(
                    f"{place}: turn {row.turn} of session {row.session_id!r} follows "
                    f"{'nothing' if previous is None else f'turn {previous.turn}'}; expected turns in order"
                )
            row = newest[row.session_id] = check_turn(row, previous)
        yield row


def _in_any_order(records: Iterator[Record], names: dict[str, None]) -> Iterator[TraceRequest]:
    """Reads all rows, then makes the contents of those with counts, session by session in turn order. Adds the names of
    their fields to `names`."""
    drafts: list[Draft] = []
    clock: str | None = None
    for place, fields in records:
        drafts.append(read_draft(fields, place, str(len(drafts))))
        clock = _one_clock(clock, drafts[-1])
        names.update(dict.fromkeys(fields))
    if clock:
        start_ns = min(draft.row.arrival_ns for draft in drafts if draft.clock)
        drafts = [_since(draft, start_ns) for draft in drafts]
    rows = [draft.row for draft in drafts]
    filled = [row if row.session_id is not None else fill(draft, None) for row, draft in zip(rows, drafts, strict=True)]
    for positions in sessions_of(rows).values():
        previous: TraceRequest | None = None
        for position in positions:
            previous = filled[position] = fill(drafts[position], previous)
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
