"""BurstGPT (Wang et al., KDD 2025): CSV of a campus's ChatGPT and GPT-4 requests.

Uses the columns `Timestamp` (s), `Request tokens` and `Response tokens`; others (newer files have `Session ID`) are
ignored. A request with 0 response tokens failed at the service: it is left out and counted in the notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from testbed.traces.readers.fields import seconds, token_count, whole_number
from testbed.traces.readers.from_zero import Sizes, numbered, stream_from_zero
from testbed.traces.readers.open_text import read_csv
from testbed.traces.schema import MAX_NUM_TOKENS
from testbed.traces.stream import StreamedTrace
from testbed.wording import count


def stream_burstgpt(path: str | Path, limit: int | None = None) -> StreamedTrace:
    """Reads a BurstGPT file, at most its first `limit` rows; the first request arrives at 0.

    Every request is independent: it is not known whether a session's request contains the history before it. Raises
    TraceError, with file and line, on a malformed row or a missing column, or if every request failed.
    """
    num_failed = 0
    expected = f"a whole number of tokens from 0 (a failed request) to {MAX_NUM_TOKENS:,}"

    def sizes() -> Iterator[Sizes]:
        nonlocal num_failed
        num_failed = 0
        for place, cells in islice(read_csv(path, ("Timestamp", "Request tokens", "Response tokens")), limit):
            arrival_ns = seconds(cells[0], place, "Timestamp")
            num_output = whole_number(cells[2], place, "Response tokens", 0, MAX_NUM_TOKENS, expected)
            if num_output == 0:
                num_failed += 1
                continue
            yield place, arrival_ns, token_count(cells[1], place, "Request tokens"), num_output

    def counted() -> list[str]:
        return [f"{count(num_failed, 'failed request')} (0 response tokens) left out"] if num_failed else []

    nothing = f"{path}: no requests; expected at least one that did not fail (0 response tokens)"
    notes = ("failed requests (0 response tokens) are left out",)
    return stream_from_zero("burstgpt", lambda: numbered("burstgpt", sizes()), nothing, notes, counted=counted)
