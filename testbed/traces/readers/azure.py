"""The Azure LLM inference traces of 2023 and 2024 (Azure/AzurePublicDataset; Splitwise, ISCA 2024; DynamoLLM, 2025).

CSV `TIMESTAMP,ContextTokens,GeneratedTokens`; a timestamp is naive with 7 fractional digits (2023) or has an offset
(2024). There is no content: every request is independent and has its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from testbed.traces.readers.fields import instant, refuse, token_count
from testbed.traces.readers.from_zero import Sizes, numbered, stream_from_zero
from testbed.traces.readers.open_text import read_csv
from testbed.traces.stream import StreamedTrace


def stream_azure(path: str | Path, limit: int | None = None) -> StreamedTrace:
    """Reads a 2023 or 2024 file (plain, .gz, .zst), at most its first `limit` rows; the first request arrives at 0.

    Raises TraceError, with file and line, on a malformed row, a missing column, or a file that mixes instants with and
    without offset.
    """
    nothing = f"{path}: no requests; expected at least one row after the header"
    return stream_from_zero("azure", lambda: numbered("azure", _sizes(path, limit)), nothing)


def _sizes(path: str | Path, limit: int | None) -> Iterator[Sizes]:
    """Yields the rows in the file's order; arrivals count from the year 1."""
    had_offset: bool | None = None
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    for place, (stamp, context, generated) in islice(read_csv(path, columns), limit):
        instant_ns, has_offset = instant(stamp, place, "TIMESTAMP")
        if had_offset not in (None, has_offset):
            raise refuse(place, "TIMESTAMP", stamp, "an offset in all rows or in none")
        had_offset = has_offset
        num_prompt = token_count(context, place, "ContextTokens")
        yield place, instant_ns, num_prompt, token_count(generated, place, "GeneratedTokens")
