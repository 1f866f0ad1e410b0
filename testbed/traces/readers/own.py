"""The testbed's own schema, as JSONL, CSV or Parquet. Owns the names of its fields and what they mean.

    request_id                              a name, unique in the file; absent: its row's number from 0
    arrival_time                            s from the start of the run; not shifted. Absent only beside think_time
    prompt_token_ids or prompt_tokens       the ids, or how many
    output_token_ids or output_tokens       the ids, or how many; neither: the model decides (a real engine only)
    priority, tenant                        optional
    session_id, turn                        optional, together; turns count up by one from any number
    think_time                              s after the turn before finished: a closed-loop turn
    cancel_after, deadline                  s after arrival
    cache_salt                              shares cached prefixes only with rows of the same salt
Exact forms, which write_jsonl uses and which win over those above: arrival_ns, think_ns, cancel_after_ns, deadline_ns,
prompt_parts, output_part (see serialize). Fields of other names are ignored, and named in the notes.

Counts become synthetic content keyed by the request's id, the same in every file. In a session, a count is read as the
whole prompt of the turn: where it is long enough to hold the prompt and the output of the turn before, it begins with
them, so that prefix hits come out as in a chat; where it is shorter, the turn is a content of its own. If the output
of the turn before is unknown (the model decides), only its prompt is shared.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from testbed.errors import TraceError
from testbed.traces.arrange import arrange, check_row, check_turn, sessions_of, used_twice
from testbed.traces.parts import join_parts
from testbed.traces.readers import fields as check
from testbed.traces.readers.open_text import csv_header, existing_file, format_suffix, read_csv, read_lines
from testbed.traces.schema import Part, Span, TokenIds, Trace, TraceRequest
from testbed.traces.stream import OutOfOrderError, StreamedTrace
from testbed.traces.synthesis import content_key

FIELDS = (
    "request_id",
    "arrival_time",
    "prompt_token_ids",
    "prompt_tokens",
    "output_token_ids",
    "output_tokens",
    "priority",
    "tenant",
    "session_id",
    "turn",
    "think_time",
    "cancel_after",
    "deadline",
    "cache_salt",
)
EXACT_FIELDS = ("arrival_ns", "think_ns", "cancel_after_ns", "deadline_ns", "prompt_parts", "output_part")
_FOREIGN = {  # trace=<name>: fields by which a file of another schema is known
    "azure": {"TIMESTAMP", "ContextTokens"},
    "burstgpt": {"Timestamp", "Request tokens"},
    "bailian": {"chat_id", "hash_ids"},
    "mooncake": {"timestamp", "hash_ids"},
    "sharegpt": {"conversations"},
    "lengths": {"num_prefill_tokens", "num_decode_tokens"},
}
_KEY = re.compile("[0-9a-f]{16}")
Record = tuple[str, dict[str, Any]]  # (place, the fields that are there)


@dataclass(slots=True)
class _Draft:
    """A row whose synthetic contents are still to be found: they depend on the turn before."""

    row: TraceRequest
    num_prompt_tokens: int | None  # a count without tokens
    num_output_tokens: int | None


def read_jsonl(path: str | Path, limit: int | None = None) -> Trace:
    """Reads one JSON object a line (plain, .gz, .zst), at most the first `limit`. Raises TraceError on a bad row."""
    return _assemble("jsonl", path, _jsonl_records(path, limit))


def stream_jsonl(path: str | Path, limit: int | None = None) -> StreamedTrace:
    """As read_jsonl, row by row: see _streamed."""
    return _streamed("jsonl", path, lambda: _jsonl_records(path, limit))


def read_csv_trace(path: str | Path, limit: int | None = None) -> Trace:
    """Reads a CSV with a header (plain, .gz, .zst); an empty cell is an absent field; ids: "1 2 3" or "[1, 2, 3]"."""
    return _assemble("csv", path, _csv_records(path, limit))


def stream_csv_trace(path: str | Path, limit: int | None = None) -> StreamedTrace:
    """As read_csv_trace, row by row: see _streamed."""
    return _streamed("csv", path, lambda: _csv_records(path, limit))


def _jsonl_records(path: str | Path, limit: int | None) -> Iterator[Record]:
    for number, line in islice(read_lines(path), limit):
        place = f"{path}:{number}"
        yield place, check.json_object(line, place)


def _csv_records(path: str | Path, limit: int | None) -> Iterator[Record]:
    names = csv_header(path)
    for place, cells in islice(read_csv(path, (), names), limit):
        yield place, {name: cell for name, cell in zip(names, cells, strict=True) if cell is not None}


def read_parquet(path: str | Path, limit: int | None = None) -> Trace:
    """Reads a Parquet file; a null (or NaN in an optional column) is an absent field; places are row numbers from 1.

    A frozen trace (see testbed.traces.frozen) keeps its name and notes, and is checked against its fingerprint. One
    that has lost these is read as any other file, and a note says so.
    """
    from testbed.traces.frozen import (
        frozen_info,
        has_lost_metadata,
        read_frozen,
    )  # frozen traces are read by this module

    info = frozen_info(path)
    if info is not None:
        return read_frozen(path, info, limit)
    trace = _assemble("parquet", path, islice(_parquet_records(path), limit))
    if has_lost_metadata(path):
        note = "the file was a frozen trace; its metadata is gone, so it was not checked against its fingerprint"
        trace = replace(trace, notes=(*trace.notes, note))
    return trace


def read_own(path: str | Path, limit: int | None = None) -> Trace:
    """Reads .jsonl, .csv or .parquet by its extension (.gz and .zst behind it). Raises TraceError on another one."""
    return {"jsonl": read_jsonl, "csv": read_csv_trace, "parquet": read_parquet}[own_format(path)](path, limit)


def own_format(path: str | Path) -> str:
    """jsonl, csv or parquet, by a file's extension. Raises TraceError on another one."""
    existing_file(path)
    name = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}.get(format_suffix(path))
    if name is None:
        raise TraceError(
            f"{path}: unknown extension {format_suffix(path)!r}; expected .jsonl, .csv or .parquet "
            "(.gz and .zst for the first two)"
        )
    return name


def row_from_fields(fields: dict[str, Any], place: str) -> TraceRequest:
    """The row of one record by itself: counts become content keyed by request_id, sessions are not looked at.

    Raises TraceError on a bad value, naming `place` and the field.
    """
    return _fill(_draft(fields, place, ""), None)


def _parquet_records(path: str | Path) -> Iterator[Record]:
    import pyarrow as pa  # heavy, and seldom needed
    import pyarrow.parquet as pq

    existing_file(path)
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for record in batch.to_pylist():
                    number += 1
                    yield (
                        f"{path}:{number}",
                        {name: value for name, value in record.items() if not _is_null(name, value)},
                    )
    except pa.ArrowException as error:
        raise TraceError(f"{path}: not a whole Parquet file: {str(error).splitlines()[0]}") from None


def _is_null(name: str, value: object) -> bool:
    """Whether a Parquet value is absent. pandas writes a missing number as NaN, which an arrival must never be."""
    return value is None or (isinstance(value, float) and math.isnan(value) and name != "arrival_time")


def _assemble(name: str, path: str | Path, records: Iterable[Record]) -> Trace:
    """Reads all rows, then gives contents to those with counts, session by session in turn order."""
    drafts: list[_Draft] = []
    ignored: dict[str, None] = {}
    for place, fields in records:
        drafts.append(_draft(fields, place, str(len(drafts))))
        ignored.update((field, None) for field in fields if field not in FIELDS and field not in EXACT_FIELDS)
    if not drafts:
        raise _no_rows(path)
    rows = [draft.row for draft in drafts]
    filled: list[TraceRequest] = list(rows)
    for positions in sessions_of(rows).values():
        previous: TraceRequest | None = None
        for position in positions:
            previous = filled[position] = _fill(drafts[position], previous)
    for position, row in enumerate(rows):
        if row.session_id is None:
            filled[position] = _fill(drafts[position], None)
    notes = [f"ignored fields: {', '.join(ignored)}"] if ignored else []
    return arrange(name, filled, notes)


def _streamed(name: str, path: str | Path, records: Callable[[], Iterator[Record]]) -> StreamedTrace:
    """The rows of a file as they come. Memory follows the ids, which must differ, and the newest turns of sessions.

    Iterating raises OutOfOrderError where a row, or a turn of a session, is not in its place.
    """

    def make() -> Iterator[TraceRequest]:
        ids: set[str] = set()
        newest: dict[str, TraceRequest] = {}  # turn of each session
        for place, fields in records():
            draft = _draft(fields, place, str(len(ids)))
            previous = newest.get(draft.row.session_id or "")
            row = _fill(draft, previous)
            check_row(row)
            if row.request_id in ids:
                raise used_twice(row)
            ids.add(row.request_id)
            if row.session_id is not None:
                if row.think_ns is not None if previous is None else row.turn != (previous.turn or 0) + 1:
                    raise OutOfOrderError(
                        f"{place}: turn {row.turn} of session {row.session_id!r} follows "
                        f"{'nothing' if previous is None else f'turn {previous.turn}'}; set trace.stream=false: "
                        "the file is then read whole and sorted"
                    )
                row = newest[row.session_id] = check_turn(row, previous)
            yield row
        if not ids:
            raise _no_rows(path)

    first = next(records(), None)
    unknown = [] if first is None else [field for field in first[1] if field not in FIELDS + EXACT_FIELDS]
    return StreamedTrace(name, make, (f"ignored fields: {', '.join(unknown)}",) if unknown else ())


def _no_rows(path: str | Path) -> TraceError:
    return TraceError(f"{path}: no requests; expected at least one row")


def _draft(fields: dict[str, Any], place: str, default_id: str) -> _Draft:
    """Checks every field of a record; what is a count without tokens stays a count."""
    given = {name: value for name, value in fields.items() if value is not None}
    if not any(name in FIELDS or name in EXACT_FIELDS for name in given):
        raise _unknown_fields(given, place)
    request_id = check.name_text(given.get("request_id", default_id), place, "request_id")
    prompt, num_prompt = _content(given, place, "prompt")
    output, num_output = _content(given, place, "output")
    if not prompt and num_prompt is None:
        raise TraceError(
            f"{place}: neither 'prompt_token_ids' nor 'prompt_tokens' is given; expected one of them, "
            f"found {', '.join(given)}"
        )
    think_ns = _optional_ns(given, place, "think")
    arrival_ns = _optional_ns(given, place, "arrival")
    if arrival_ns is None and think_ns is None:
        raise TraceError(
            f"{place}: field 'arrival_time' is missing; found {', '.join(given)}. "
            "Expected it in every row but closed-loop turns (think_time)"
        )
    turn = given.get("turn")
    row = TraceRequest(
        request_id=request_id,
        arrival_ns=arrival_ns or 0,
        prompt=prompt,
        output=output[0] if output else None,
        priority=_priority(given.get("priority", 0), place),
        tenant=_optional_name(given, place, "tenant"),
        session_id=_optional_name(given, place, "session_id"),
        turn=None if turn is None else check.whole_number(turn, place, "turn", 0, 2**31 - 1, "a whole number from 0"),
        think_ns=think_ns,
        cancel_after_ns=_optional_ns(given, place, "cancel_after"),
        deadline_ns=_optional_ns(given, place, "deadline"),
        cache_salt=_optional_name(given, place, "cache_salt"),
        place=place,
    )
    return _Draft(row, num_prompt, num_output)


def foreign_format(names: Iterable[str]) -> str | None:
    """The format of READERS whose fields these are, if they are those of no row of ours."""
    found = set(names)
    if found & {*FIELDS, *EXACT_FIELDS}:
        return None
    return next((name for name, marks in _FOREIGN.items() if marks <= found), None)


def _unknown_fields(given: dict[str, Any], place: str) -> TraceError:
    """The error for a record of another schema, with a hint at what it may be."""
    shown = ", ".join(map(repr, given)) or "nothing"
    shown = shown if len(shown) <= 120 else shown[:117] + "..."
    foreign = foreign_format(given)
    hint = "" if foreign is None else f"; read it with trace={foreign}"
    if len(given) == 1 and any(separator in next(iter(given)) for separator in ";\t|"):
        hint = "; separate the columns by commas"
    return TraceError(f"{place}: no known field; expected arrival_time, prompt_tokens, …, found {shown}{hint}")


def _content(given: dict[str, Any], place: str, side: str) -> tuple[tuple[Part, ...], int | None]:
    """(parts, None) of explicit content, ((), count) of a count, ((), None) if nothing is given."""
    ids_field, count_field = f"{side}_token_ids", f"{side}_tokens"
    exact_field = "prompt_parts" if side == "prompt" else "output_part"
    count = given.get(count_field)
    num_tokens = None if count is None else check.token_count(count, place, count_field)
    if exact_field in given:
        parts = _parts(given[exact_field], place, exact_field)
        total = sum(part.num_tokens for part in parts)
        if num_tokens is not None and num_tokens != total:
            raise check.refuse(place, count_field, count, f"{total}, the length of {exact_field!r}, or absent")
        return parts, None
    if ids_field in given:
        if num_tokens is not None:
            raise TraceError(f"{place}: both {ids_field!r} and {count_field!r} are given; expected one of them")
        return (TokenIds(check.token_ids(given[ids_field], place, ids_field)),), None
    return (), num_tokens


def _parts(value: object, place: str, field: str) -> tuple[Part, ...]:
    """Parts as serialize writes them: {"span": [key in hex, start, length]} or {"ids": [...]}."""
    expected = 'parts as {"span": ["<16 hex digits>", start, length]} or {"ids": [...]}'
    if isinstance(value, str):  # a cell of a CSV or Parquet file
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise check.refuse(place, field, value, expected) from None
    items = [value] if field == "output_part" else value
    if not isinstance(items, list) or not items:
        raise check.refuse(place, field, value, expected)
    parts: list[Part] = []
    for item in items:
        span = item.get("span") if isinstance(item, dict) else None
        if isinstance(item, dict) and "ids" in item:
            parts.append(TokenIds(check.token_ids(item["ids"], place, field)))
        elif isinstance(span, list) and len(span) == 3 and isinstance(span[0], str):
            if _KEY.fullmatch(span[0]) is None:
                raise check.refuse(place, field, item, expected)
            start = check.whole_number(span[1], place, field, 0, 2**62, expected)
            length = check.whole_number(span[2], place, field, 0, check.MAX_NUM_TOKENS, expected)
            parts.append(Span(int(span[0], 16), start, length))
        else:
            raise check.refuse(place, field, item, expected)
    return tuple(parts)


def _optional_ns(given: dict[str, Any], place: str, name: str) -> int | None:
    """`name`_ns, or `name`_time (or `name`, for cancel_after and deadline) in seconds."""
    if f"{name}_ns" in given:
        return check.nanoseconds(given[f"{name}_ns"], place, f"{name}_ns")
    field = name if name in ("cancel_after", "deadline") else f"{name}_time"
    return check.seconds(given[field], place, field) if field in given else None


def _optional_name(given: dict[str, Any], place: str, field: str) -> str | None:
    return check.name_text(given[field], place, field) if field in given else None


def _priority(value: object, place: str) -> int:
    return check.whole_number(value, place, "priority", -(2**31), 2**31 - 1, "a whole number")


def _fill(draft: _Draft, previous: TraceRequest | None) -> TraceRequest:
    """The row with its synthetic contents. previous: the turn before it in its session."""
    row = draft.row
    own_key = content_key("request", row.request_id)
    prompt, output = row.prompt, row.output
    if draft.num_prompt_tokens is not None:
        prompt = _prompt(draft.num_prompt_tokens, previous, own_key)
    if draft.num_output_tokens is not None:
        last = prompt[-1]
        following = (last.key, last.start + last.length) if isinstance(last, Span) else (own_key, 0)
        output = Span(*following, draft.num_output_tokens)
    return replace(row, prompt=prompt, output=output) if prompt is not row.prompt or output is not row.output else row


def _prompt(num_tokens: int, previous: TraceRequest | None, own_key: int) -> tuple[Part, ...]:
    """A prompt of `num_tokens` that begins with the turn before, if it is long enough; else content of its own.

    What is new in a turn goes on with the session's content where that is known: a session is then one long span.
    """
    if previous is None:
        return (Span(own_key, 0, num_tokens),)
    history = previous.prompt if previous.output is None else (*previous.prompt, previous.output)
    num_new = num_tokens - sum(part.num_tokens for part in history)
    if num_new < 0:
        return (Span(own_key, 0, num_tokens),)
    last = history[-1]
    if isinstance(last, Span) and previous.output is not None:
        new = Span(last.key, last.start + last.length, num_new)
    else:
        new = Span(own_key, 0, num_new)
    return join_parts((*history, new))
