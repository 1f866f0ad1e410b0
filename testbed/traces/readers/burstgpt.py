"""BurstGPT (Wang et al., KDD 2025): CSV of a campus's ChatGPT and GPT-4 requests.

Uses the columns `Timestamp` (s), `Request tokens` and `Response tokens`; others (newer files have `Session ID`) are
ignored. A request with 0 response tokens failed at the service: it is left out and counted in the notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from testbed.errors import TraceError
from testbed.traces.arrange import arrange
from testbed.traces.readers.fields import seconds, token_count, whole_number
from testbed.traces.readers.open_text import read_csv
from testbed.traces.schema import MAX_NUM_TOKENS, Span, Trace, TraceRequest
from testbed.traces.stream import StreamedTrace
from testbed.traces.synthesis import numbered_keys
from testbed.wording import count

_Row = tuple[int, int, int, str]  # arrival in ns, prompt tokens, output tokens, place
_key_of = numbered_keys("burstgpt")


def read_burstgpt(path: str | Path, limit: int | None = None) -> Trace:
    """Reads a BurstGPT file, at most its first `limit` rows; the first request arrives at 0.

    Every request is independent: it is not known whether a session's request contains the history before it. Raises
    TraceError, with file and line, on a malformed row or a missing column, or if every request failed.
    """
    failed = [0, 0]
    found = list(_rows(path, limit, failed))
    if not found:
        raise _no_rows(path, failed)
    start_ns = min(row[0] for row in found)
    notes = [f"{count(failed[1], 'failed request')} (0 response tokens) left out"] if failed[1] else []
    return arrange("burstgpt", (_request(i, row, start_ns) for i, row in enumerate(found)), notes)


def stream_burstgpt(path: str | Path, limit: int | None = None) -> StreamedTrace:
    """Like read_burstgpt, row by row; iterating raises OutOfOrderError if the file is out of order."""

    def make() -> Iterator[TraceRequest]:
        failed = [0, 0]
        start_ns: int | None = None
        for i, row in enumerate(_rows(path, limit, failed)):
            start_ns = row[0] if start_ns is None else start_ns
            yield _request(i, row, start_ns)
        if start_ns is None:
            raise _no_rows(path, failed)

    return StreamedTrace("burstgpt", make, ("failed requests (0 response tokens) are left out",))


def _no_rows(path: str | Path, failed: list[int]) -> TraceError:
    return TraceError(f"{path}: no requests; {failed[0]} rows, of which {failed[1]} are failed requests")


def _rows(path: str | Path, limit: int | None, failed: list[int]) -> Iterator[_Row]:
    """Yields the rows that did not fail, in the file's order. failed: is set to [all rows, failed rows] so far."""
    expected = f"a whole number of tokens from 0 (a failed request) to {MAX_NUM_TOKENS:,}"
    for place, cells in islice(read_csv(path, ("Timestamp", "Request tokens", "Response tokens")), limit):
        failed[0] += 1
        arrival_ns = seconds(cells[0], place, "Timestamp")
        num_output = whole_number(cells[2], place, "Response tokens", 0, MAX_NUM_TOKENS, expected)
        if num_output == 0:
            failed[1] += 1
            continue
        yield arrival_ns, token_count(cells[1], place, "Request tokens"), num_output, place


def _request(i: int, row: _Row, start_ns: int) -> TraceRequest:
    arrival_ns, num_prompt, num_output, place = row
    key = _key_of(i)
    prompt, output = Span(key, 0, num_prompt), Span(key, num_prompt, num_output)
    return TraceRequest(f"burstgpt-{i}", arrival_ns - start_ns, (prompt,), output, place=place)
