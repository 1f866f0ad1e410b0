"""JSONL traces whose clock begins at any instant: they are read such that the first request arrives at 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from testbed.errors import TraceError
from testbed.traces.arrange import arrange
from testbed.traces.schema import Trace, TraceRequest
from testbed.traces.stream import StreamedTrace
from testbed.traces.transforms.timing import shift


def read_from_zero(name: str, path: str | Path, rows: Iterator[TraceRequest]) -> Trace:
    """Returns the whole trace. rows: in the file's order, on the file's clock. Raises TraceError if there are none."""
    found = list(rows)
    if not found:
        raise _no_rows(path)
    trace = arrange(name, found)
    return shift(trace, -trace.rows[0].arrival_ns, note=False)


def stream_from_zero(name: str, path: str | Path, rows: Callable[[], Iterator[TraceRequest]]) -> StreamedTrace:
    """Like read_from_zero, row by row; iterating raises OutOfOrderError if the file is out of order."""

    def make() -> Iterator[TraceRequest]:
        start_ns: int | None = None
        for row in rows():
            start_ns = row.arrival_ns if start_ns is None else start_ns
            yield row._replace(arrival_ns=row.arrival_ns - start_ns)
        if start_ns is None:
            raise _no_rows(path)

    return StreamedTrace(name, make)


def _no_rows(path: str | Path) -> TraceError:
    return TraceError(f"{path}: no requests; expected one JSON object on each line")
