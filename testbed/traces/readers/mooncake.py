"""Mooncake traces (Qin et al., FAST 2025; kvcache-ai/Mooncake): conversation, tool-agent and synthetic.

JSONL `timestamp` (ms), `input_length`, `output_length`, `hash_ids`: one global id for each block of 512 tokens, rounded
up, so the last block may be partial. A later request whose ids continue those of an earlier one shares its prompt, but
not its generated tokens, which the file does not identify.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from testbed.traces.readers.fields import present, token_count, whole_number
from testbed.traces.readers.from_zero import stream_from_zero
from testbed.traces.readers.hash_blocks import BlockSemantics, HashBlocks
from testbed.traces.readers.open_text import read_objects
from testbed.traces.schema import MAX_NS, Span, Trace, TraceRequest
from testbed.traces.stream import StreamedTrace, whole
from testbed.traces.synthesis import numbered_keys
from testbed.traces.transforms.timing import spread

SEMANTICS = BlockSemantics(block_tokens=512, rounding="ceil", scope="global")
_output_key_of = numbered_keys("mooncake-output")
_NS_PER_MS = 10**6
_MAX_MS = MAX_NS // _NS_PER_MS
_STAMPS = f"whole milliseconds from 0 to {_MAX_MS:,}"


def stream_mooncake(path: str | Path, limit: int | None = None, spread_batches: bool = False) -> StreamedTrace | Trace:
    """Reads a Mooncake file (plain, .gz, .zst), at most its first `limit` rows; the first request arrives at 0.

    spread_batches: the published timestamps come in batches, about 3 s apart; this spreads each batch evenly up to the
    next one, and adds a note. The trace is then held whole: the new arrival of a row depends on the rows after it.
    Raises TraceError, with file and line, on a malformed row.
    """
    nothing = f"{path}: no requests; expected one JSON object on each line"
    source = stream_from_zero("mooncake", lambda: _rows(path, limit), nothing)
    return spread(whole(source)) if spread_batches else source


def _rows(path: str | Path, limit: int | None) -> Iterator[TraceRequest]:
    """Yields the rows in the file's order, on the file's clock."""
    blocks = HashBlocks("mooncake", SEMANTICS)
    for i, (place, fields) in enumerate(islice(read_objects(path), limit)):
        stamp = present(fields, "timestamp", place)
        stamp_ms = whole_number(stamp, place, "timestamp", 0, _MAX_MS, _STAMPS)
        num_prompt = token_count(present(fields, "input_length", place), place, "input_length")
        num_output = token_count(present(fields, "output_length", place), place, "output_length")
        prompt = blocks.prompt(present(fields, "hash_ids", place), num_prompt, place, 0)
        output = Span(_output_key_of(i), 0, num_output)
        yield TraceRequest(f"mooncake-{i}", stamp_ms * _NS_PER_MS, prompt, output, place=place)
