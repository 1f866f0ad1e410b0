"""Helpers of all transformations: these take a whole or a streamed trace, and return one of that kind with a note."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from testbed.traces.arrange import arrange
from testbed.traces.schema import MAX_NS, Part, Span, Trace, TraceRequest
from testbed.traces.stream import StreamedTrace
from testbed.traces.synthesis import content_key

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


def renamed(row: TraceRequest, *names: str | int, but: Collection[int] = ()) -> TraceRequest:
    """Returns the row with other content keys, except those in `but`: equal keys stay equal, and differ under other
    `names`. Explicit token ids stay as they are."""

    def own(part: Part) -> Part:
        if not isinstance(part, Span) or part.key in but:
            return part
        return Span(content_key("renamed", part.key, *names), part.start, part.length)

    return row._replace(prompt=tuple(map(own, row.prompt)), output=None if row.output is None else own(row.output))
