"""Traces that a user makes: rows as dicts, and what a user's own class or function returns. Checks every row."""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from numbers import Integral, Real
from operator import index
from pathlib import Path
from typing import Any

from experiments.configuration.own_class import instantiate, parameters, place_in_own_code, told
from testbed.errors import TestbedError, TraceError
from testbed.foreign_text import shown
from testbed.traces.readers import read_trace
from testbed.traces.schema import (
    MAX_NS,
    MAX_NUM_TOKENS,
    MAX_PRIORITY,
    Part,
    Span,
    TokenIds,
    Trace,
    TraceRequest,
    TraceSource,
)
from testbed.traces.stream import StreamedTrace, whole

_SOURCE = ("name", "notes", "num_requests", "closed_tail", "__iter__")
_BOUNDS = {
    **dict.fromkeys(("arrival_ns", "think_ns", "cancel_after_ns", "deadline_ns"), (0, MAX_NS)),
    "max_tokens": (1, MAX_NUM_TOKENS),
    **dict.fromkeys(("priority", "turn"), (-MAX_PRIORITY - 1, MAX_PRIORITY)),
}

_GIVEN = "the rows given"  # what errors call their file


def make_trace(values: dict[str, Any], seed: int) -> TraceSource:
    """Returns the trace that a class or function of the user's own makes. values: its `_target_` and parameters; a
    parameter `seed` without a value is `seed`. Raises TraceError for what is no trace."""
    target = str(values["_target_"])
    takes_seed = "seed" in (parameters(target) or ()) and "seed" not in values
    made = instantiate("trace", values, **({"seed": seed} if takes_seed else {}))
    if isinstance(made, Trace):
        return checked(made)
    if all(hasattr(made, name) for name in _SOURCE):  # in order of arrival, and maybe too long to be held
        return _with_checks(made)
    if isinstance(made, Iterable) and not isinstance(made, Mapping | str | bytes):
        return of_rows(made, target.rpartition(".")[2])
    raise TraceError(
        f"trace: {target} returned {shown(made)}; it must return a testbed.traces.schema.Trace, or rows (TraceRequest, "
        "or dicts in the testbed's own schema: docs/traces.md)"
    )


def of_rows(rows: Iterable[object], name: str = "") -> Trace:
    """Returns rows as a trace: TraceRequests, or rows of the testbed's own schema as dicts. Raises TraceError, which
    names the row."""
    with _faults_named():
        given = list(rows)
    if given and isinstance(given[0], TraceRequest):
        return whole(StreamedTrace(name or "rows", lambda: _rows(given)))
    with tempfile.TemporaryDirectory(prefix="testbed-") as scratch:
        file = Path(scratch) / "rows.jsonl"
        file.write_text("".join(map(_line, given)))
        try:
            trace = read_trace("jsonl", file)
        except TraceError as error:
            raise TraceError(str(error).replace(str(file), _GIVEN)) from None
    return Trace(
        name or trace.name,
        tuple(row._replace(place=row.place.replace(str(file), _GIVEN)) for row in trace.rows),
        trace.notes,
    )


def checked(source: TraceSource) -> Trace:
    """Returns the source as a Trace with all rows checked and in order. Raises TraceError, which names the row."""
    return whole(_with_checks(source))


def _with_checks(source: TraceSource) -> StreamedTrace:
    """Returns the source as a stream that checks each row when it is read."""
    if not isinstance(source, StreamedTrace):
        return StreamedTrace(
            source.name, lambda: _rows(source), tuple(source.notes), source.num_requests, closed_tail=source.closed_tail
        )
    make, unordered = source.make, source.unordered
    if unordered is not None:
        return replace(source, make=lambda: _rows(make()), unordered=lambda: _rows(unordered()))
    return replace(source, make=lambda: _rows(make()))


def _rows(source: Iterable[object]) -> Iterator[TraceRequest]:
    with _faults_named():
        for number, row in enumerate(source):
            yield _checked(row, number)


@contextmanager
def _faults_named() -> Iterator[None]:
    """Context in which the user's code makes rows: what it raises becomes a TraceError of one line, with the place."""
    try:
        yield
    except TestbedError:
        raise
    except Exception as error:
        if place := place_in_own_code(error):
            raise TraceError(f"trace: {place}: {told(error)}; mend it there") from error
        raise


def _line(row: object) -> str:
    """Returns a row as a line of JSON. Raises TraceError if it is not a mapping of JSON values."""
    if not isinstance(row, Mapping):
        raise TraceError(
            f"the trace has {shown(row)} where a row is expected; give rows as dicts, of a DataFrame "
            "df.to_dict('records')"
        )
    try:
        return json.dumps(dict(row), default=_number) + "\n"
    except TypeError as error:
        raise TraceError(f"the trace's row {shown(row)}: {error}; give numbers and texts") from None


def _number(value: object) -> int | float:
    """Returns a number of another package, as numpy's, as Python's own."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _checked(row: object, number: int) -> TraceRequest:
    """Returns a row whose numbers are Python's own ints. Raises TraceError for a field that is not what it must be."""
    if not isinstance(row, TraceRequest):
        raise TraceError(f"row {number} is {shown(row)}; a row of a Trace is a testbed.traces.schema.TraceRequest")
    if not isinstance(row.request_id, str) or not row.request_id:
        raise TraceError(f"row {number} has the request_id {shown(row.request_id)}; it must be a name")
    where = row.place or f"request {row.request_id!r}"
    numbers: dict[str, Any] = {}
    for name, (low, high) in _BOUNDS.items():
        value = getattr(row, name)
        if value is not None or name in ("arrival_ns", "priority"):
            numbers[name] = _whole(value, low, high, where, name)
    for name in ("tenant", "session_id", "cache_salt"):
        if (value := getattr(row, name)) is not None and not isinstance(value, str):
            raise TraceError(f"{where}: {name} is {shown(value)}; it must be a text, or None")
    if isinstance(row.prompt, Span | TokenIds) or not isinstance(row.prompt, tuple | list):
        raise TraceError(
            f"{where}: prompt is {shown(row.prompt)}; it must be a tuple of parts, as (Span(key, 0, 100),)"
        )
    prompt = tuple(_part(where, "prompt", part) for part in row.prompt)
    output = None if row.output is None else _part(where, "output", row.output)
    return row._replace(prompt=prompt, output=output, **numbers)


def _part(where: str, name: str, part: object) -> Part:
    if isinstance(part, Span):
        return Span(
            _whole(part.key, 0, 2**64 - 1, where, name, "key"),
            _whole(part.start, 0, MAX_NS, where, name, "start"),
            _whole(part.length, 0, MAX_NUM_TOKENS, where, name, "length"),
        )
    if not isinstance(part, TokenIds):
        raise TraceError(f"{where}: the {name} has {shown(part)}; a part is a testbed.traces.schema.Span or TokenIds")
    if isinstance(part.ids, array) and part.ids.typecode == "i" and min(part.ids, default=0) >= 0:
        return part
    if not isinstance(part.ids, Iterable):
        raise TraceError(f"{where}: {name} ids is {shown(part.ids)}; it must be token ids, as array('i', [1, 2])")
    return TokenIds(array("i", [_whole(token, 0, 2**31 - 1, where, name, "token") for token in part.ids]))


def _whole(value: Any, low: int, high: int, where: str, *what: str) -> int:
    """Returns a whole number, maybe numpy's, as Python's own. what: the field, for the message."""
    if type(value) is int and low <= value <= high:
        return value
    with suppress(TypeError):
        if low <= (number := index(value)) <= high:
            return number
    raise TraceError(f"{where}: {' '.join(what)} is {shown(value)}; it must be a whole number from {low:,} to {high:,}")
