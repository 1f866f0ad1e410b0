"""BurstGPT (Wang et al., KDD 2025): CSV of a campus's ChatGPT and GPT-4 requests.

Uses the columns `Timestamp` (s), `Request tokens` and `Response tokens`; others (newer files have `Session ID`) are
ignored. A request with 0 response tokens failed at the service: it is left out and counted in the notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from testbed.traces.readers.fields import seconds, token_count, whole_number
from testbed.traces.readers.from_zero import stream_from_zero
from testbed.traces.readers.open_text import read_csv
from testbed.traces.schema import MAX_NUM_TOKENS, Span, TraceRequest
from testbed.traces.stream import StreamedTrace
from testbed.traces.synthesis import numbered_keys
from testbed.wording import count

_key_of = numbered_keys("burstgpt")


def stream_burstgpt(path: str | Path, limit: int | None = None) -> StreamedTrace:
    """Reads a BurstGPT file, at most its first `limit` rows; the first request arrives at 0.

    Every request is independent: it is not known whether a session's request contains the history before it. Raises
    TraceError, with file and line, on a malformed row or a missing column, or if every request failed.
    """
    num_rows = num_failed = 0
    expected = f"a whole number of tokens from 0 (a failed request) to {MAX_NUM_TOKENS:,}"

    def rows() -> Iterator[TraceRequest]:
        nonlocal num_rows, num_failed
        num_rows = num_failed = 0
        for place, cells in islice(read_csv(path, ("Timestamp", "Request tokens", "Response tokens")), limit):
            num_rows += 1
            arrival_ns = seconds(cells[0], place, "Timestamp")
            num_output = whole_number(cells[2], place, "Response tokens", 0, MAX_NUM_TOKENS, expected)
            if num_output == 0:
                num_failed += 1
                continue
            num_prompt = token_count(cells[1], place, "Request tokens")
            i = num_rows - num_failed - 1
            key = _key_of(i)
            prompt, output = Span(key, 0, num_prompt), Span(key, num_prompt, num_output)
            yield TraceRequest(f"burstgpt-{i}", arrival_ns, (prompt,), output, place=place)

    def counted() -> list[str]:
        return [f"{count(num_failed, 'failed request')} (0 response tokens) left out"] if num_failed else []

    def nothing() -> str:
        return f"{path}: no requests; {num_rows} rows, of which {num_failed} are failed requests"

    notes = ("failed requests (0 response tokens) are left out",)
    return stream_from_zero("burstgpt", rows, nothing, notes, counted=counted)
