"""Traces that are never held whole: rows are made, or read, in each iteration.

A streamed source must be in order of arrival. One that is not (a file out of order) is read whole and sorted by
`arrange` instead. Both ways give the same rows, and the same fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import final

from testbed.errors import ConfigError, TraceError
from testbed.traces.arrange import arrange, no_requests, too_late
from testbed.traces.batches import Batches
from testbed.traces.classes import ClassFields
from testbed.traces.fingerprint import Fingerprint
from testbed.traces.schema import MAX_NS, Trace, TraceRequest, TraceSource

MAX_HELD_ROWS = 10_000_000  # of a trace in memory: more would fill it
MAX_STREAMED_ROWS = 1_000_000_000  # of a trace that is made row by row: more would take too long


class OutOfOrderError(TraceError):
    """A row arrives before the row in front of it: the trace must be read whole, and sorted."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class StreamedTrace:
    """A TraceSource that calls `make` for its rows each time that it is iterated.

    make: yields the same rows each time, in order of arrival, with unique ids (which is not checked, as that would need
    all ids in memory); a closed-loop turn has the arrival of the turn before it. num_requests: None if not known.
    Iterating raises OutOfOrderError at a row that is earlier than the one before it, TraceError on no rows, with
    the message `nothing`, and at an arrival beyond MAX_NS.

    unordered: for `whole`, which sorts: yields the rows where `make` cannot bring them into a session's order. counted:
    returns the notes instead of `notes`, with the numbers that are known after all rows were made.
    """

    name: str
    make: Callable[[], Iterator[TraceRequest]]
    notes: tuple[str, ...] = ()
    num_requests: int | None = None
    closed_tail: bool = field(default=False, kw_only=True)
    nothing: str = field(default="", kw_only=True)
    unordered: Callable[[], Iterator[TraceRequest]] | None = field(default=None, kw_only=True)
    counted: Callable[[], Sequence[str]] | None = field(default=None, kw_only=True)

    def __iter__(self) -> Iterator[TraceRequest]:
        latest_ns = -1
        for row in self.make():
            if not latest_ns <= row.arrival_ns <= MAX_NS:
                if row.arrival_ns > MAX_NS:
                    raise too_late(row)
                raise OutOfOrderError(
                    f"{row.place or row.request_id}: the row arrives at {row.arrival_ns / 1e9} s, before the one "
                    f"before it at {latest_ns / 1e9} s; expected rows in order of arrival"
                )
            latest_ns = row.arrival_ns
            yield row
        if latest_ns < 0:
            raise self.without_rows()

    def without_rows(self) -> TraceError:
        return TraceError(self.nothing) if self.nothing else no_requests(self.name, self.notes)

    def derived(
        self, make: Callable[[], Iterator[TraceRequest]], note: str | None, num_requests: int | None = None
    ) -> StreamedTrace:
        """Returns another stream made from this one. note: how it was made."""
        notes = self.notes if note is None else (*self.notes, note)
        return StreamedTrace(self.name, make, notes, num_requests, closed_tail=self.closed_tail)


class CountedTrace:
    """A source that can be iterated once. It counts and fingerprints the rows; the results are known afterwards."""

    def __init__(self, source: TraceSource, check: Callable[[TraceRequest], object] | None = None) -> None:
        """check: called with every row before it is yielded; its errors are raised by the iteration."""
        self._source = source
        self.name, self.notes, self.closed_tail = source.name, source.notes, source.closed_tail
        self._check = check
        self._fingerprint = Fingerprint()
        self._is_done = False
        self.num_read = 0
        self.batches = Batches()  # of the rows that were read
        self._class_fields = ClassFields()

    @property
    def num_requests(self) -> int | None:
        return self.num_read if self._is_done else self._source.num_requests

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the whole trace; None until all rows have been read."""
        return self._fingerprint.hexdigest() if self._is_done else None

    @property
    def differ_in(self) -> list[str] | None:
        """The fields of ClassFields in which the requests differ; None until all rows have been read."""
        return self._class_fields.differing if self._is_done else None

    @property
    def is_closed_loop(self) -> bool | None:
        """Whether there are closed-loop turns; None: none yet, and not all rows have been read."""
        return self.num_read > self.batches.num or (False if self._is_done else None)

    def __iter__(self) -> Iterator[TraceRequest]:
        assert self.num_read == 0, "gone through once"
        update, add, check = self._fingerprint.update, self.batches.add, self._check
        compare = self._class_fields.add
        for row in self._source:
            self.num_read += 1
            update(row)
            add(row)
            compare(row)
            if check is not None:
                check(row)
            yield row
        self._is_done = True


def whole(source: TraceSource) -> Trace:
    """Returns the source as a Trace in memory, with all rows checked and sorted. Raises ConfigError if it has too many
    rows."""
    if isinstance(source, Trace):
        return source
    has_too_many = (source.num_requests or 0) > MAX_HELD_ROWS  # known before any row is made
    made = (source.unordered or source.make)() if isinstance(source, StreamedTrace) else iter(source)
    rows = [] if has_too_many else list(islice(made, MAX_HELD_ROWS + 1))
    if has_too_many or len(rows) > MAX_HELD_ROWS:
        num = f"{source.num_requests:,}" if has_too_many else f"more than {MAX_HELD_ROWS:,}"
        raise ConfigError(
            f"trace {source.name!r} has {num} requests; at most {MAX_HELD_ROWS:,} are held in memory: "
            "lower their number, or set trace.stream=true and leave out what needs the whole trace"
        )
    if not isinstance(source, StreamedTrace):
        return arrange(source.name, rows, source.notes)
    if not rows:
        raise source.without_rows()
    return arrange(source.name, rows, source.notes if source.counted is None else source.counted())
