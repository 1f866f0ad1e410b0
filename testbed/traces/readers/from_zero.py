"""Files whose clock begins at any instant: they are read such that the first request arrives at 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from testbed.traces.schema import TraceRequest
from testbed.traces.stream import StreamedTrace

Rows = Callable[[], Iterator[TraceRequest]]


def stream_from_zero(
    name: str,
    rows: Rows,
    nothing: Callable[[], str],
    notes: tuple[str, ...] = (),
    *,
    unordered: Rows | None = None,
    counted: Callable[[], Sequence[str]] | None = None,
) -> StreamedTrace:
    """Returns the rows of a file as a stream. rows: in the file's order, on the file's clock. The others: see
    StreamedTrace."""

    def in_order() -> Iterator[TraceRequest]:
        start_ns: int | None = None
        for row in rows():
            start_ns = row.arrival_ns if start_ns is None else start_ns
            yield row._replace(arrival_ns=row.arrival_ns - start_ns)

    def in_any_order() -> Iterator[TraceRequest]:
        found = list((unordered or rows)())
        start_ns = min((row.arrival_ns for row in found), default=0)
        return (row._replace(arrival_ns=row.arrival_ns - start_ns) for row in found)

    return StreamedTrace(name, in_order, notes, nothing=nothing, unordered=in_any_order, counted=counted)
