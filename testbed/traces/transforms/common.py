"""Helpers of all transformations: these take a whole or a streamed trace, and return one of that kind with a note."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

from testbed.traces.arrange import arrange
from testbed.traces.parts import rename_part
from testbed.traces.schema import MAX_NS, Trace, TraceRequest
from testbed.traces.stream import StreamedTrace

S = TypeVar("S", Trace, StreamedTrace)
Rows = Callable[[], Iterator[TraceRequest]]
MAX_S = MAX_NS / 1e9
MAX_FLOAT = sys.float_info.max


def derived(
    trace: S,
    rows: Rows,
    note: str | None,
    *,
    counted: Callable[[list[TraceRequest]], str] | None = None,
    num_requests: int | None = None,
) -> S:
    """Returns the trace with `rows`, of the kind of `trace`: whole, made and checked now; streamed, made on iteration.

    note: what was done. counted: returns a note with numbers instead, from the rows of a whole trace. num_requests: of
    a stream, if it is known.
    """
    if isinstance(trace, StreamedTrace):
        return trace.derived(rows, note, num_requests)
    made = list(rows())
    said = note if counted is None else counted(made)
    return arrange(trace.name, made, trace.notes if said is None else (*trace.notes, said))


def marked(row: TraceRequest, prefix: str, suffix: str) -> TraceRequest:
    session = None if row.session_id is None else f"{prefix}{row.session_id}{suffix}"
    return row._replace(request_id=f"{prefix}{row.request_id}{suffix}", session_id=session)


def renamed(row: TraceRequest, *names: str | int) -> TraceRequest:
    """Returns the row with its contents renamed: different from those of other `names`."""
    output = None if row.output is None else rename_part(row.output, *names)
    return row._replace(prompt=tuple(rename_part(part, *names) for part in row.prompt), output=output)
