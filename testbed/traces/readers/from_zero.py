"""What readers of recorded requests share: requests without content, and clocks that begin at any instant.

A file is read such that its first request arrives at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from testbed.traces.schema import Span, TraceRequest
from testbed.traces.stream import StreamedTrace
from testbed.traces.synthesis import numbered_keys

Rows = Callable[[], Iterator[TraceRequest]]
Sizes = tuple[str, int, int, int]  # place, arrival in ns, tokens of the prompt and of the output


def numbered(name: str, sizes: Iterable[Sizes]) -> Iterator[TraceRequest]:
    """Yields a request for each of `sizes`, outside sessions, with tokens of its own."""
    key_of = numbered_keys(name)
    for number, (place, arrival_ns, num_prompt, num_output) in enumerate(sizes):
        key = key_of(number)
        prompt, output = Span(key, 0, num_prompt), Span(key, num_prompt, num_output)
        yield TraceRequest(f"{name}-{number}", arrival_ns, (prompt,), output, place=place)


def stream_from_zero(
    name: str,
    rows: Rows,
    nothing: str,
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
