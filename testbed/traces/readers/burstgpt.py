"""BurstGPT (Wang et al., KDD 2025): CSV of a campus's ChatGPT and GPT-4 requests.

Columns `Timestamp` (s), `Request tokens`, `Response tokens`, and in newer files `Session ID`; the rest is not used. A
request with 0 response tokens failed at the service: it is left out and counted in the notes.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from testbed.errors import TraceError
from testbed.traces.arrange import arrange
from testbed.traces.readers.fields import MAX_NUM_TOKENS, seconds, token_count, whole_number
from testbed.traces.readers.open_text import read_csv
from testbed.traces.schema import Span, Trace, TraceRequest
from testbed.traces.synthesis import content_key


def read_burstgpt(path: str | Path, limit: int | None = None) -> Trace:
    """Reads a BurstGPT file, at most its first `limit` rows; the first request arrives at 0.

    Every request is independent: the file does not say whether a session's request holds the history before it.
    Raises TraceError, naming file and line, on a malformed row or a missing column, or if every request failed.
    """
    found: list[tuple[int, int, int, str]] = []
    num_failed = num_rows = 0
    for place, cells in islice(read_csv(path, ("Timestamp", "Request tokens", "Response tokens")), limit):
        num_rows += 1
        arrival_ns = seconds(cells[0], place, "Timestamp")
        expected = f"a whole number of tokens from 0 (a failed request) to {MAX_NUM_TOKENS:,}"
        num_output = whole_number(cells[2], place, "Response tokens", 0, MAX_NUM_TOKENS, expected)
        if num_output == 0:
            num_failed += 1
            continue
        found.append((arrival_ns, token_count(cells[1], place, "Request tokens"), num_output, place))
    if not found:
        raise TraceError(f"{path}: no requests; {num_rows} rows, of which {num_failed} are failed requests")
    start_ns = min(row[0] for row in found)
    rows = []
    for i, (arrival_ns, num_prompt, num_output, place) in enumerate(found):
        key = content_key("burstgpt", i)
        prompt, output = Span(key, 0, num_prompt), Span(key, num_prompt, num_output)
        rows.append(TraceRequest(f"burstgpt-{i}", arrival_ns - start_ns, (prompt,), output, place=place))
    notes = [f"{num_failed} failed requests (0 response tokens) were left out"] if num_failed else []
    return arrange("burstgpt", rows, notes)
