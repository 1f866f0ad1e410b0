"""Mooncake traces (Qin et al., FAST 2025; kvcache-ai/Mooncake): conversation, tool-agent and synthetic.

JSONL `timestamp` (ms), `input_length`, `output_length`, `hash_ids`: one global id for each block of 512 tokens, rounded
up, so the last block may be partial. A later request whose ids continue an earlier one's shares its prompt, but not the
tokens that were generated: the file does not say what they were.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from testbed.errors import TraceError
from testbed.traces.arrange import arrange
from testbed.traces.readers.fields import json_object, present, token_count, whole_number
from testbed.traces.readers.hash_blocks import HashBlocks
from testbed.traces.readers.open_text import read_lines
from testbed.traces.schema import MAX_NS, Span, Trace, TraceRequest
from testbed.traces.synthesis import content_key

BLOCK_TOKENS = 512
_NS_PER_MS = 10**6


def read_mooncake(path: str | Path, limit: int | None = None, spread_batches: bool = False) -> Trace:
    """Reads a Mooncake file (plain, .gz, .zst), at most its first `limit` rows; the first request arrives at 0.

    spread_batches: the published timestamps come in batches, about 3 s apart; this spreads each batch evenly up to the
    next one, and says so in the notes. Raises TraceError, naming file and line, on a malformed row.
    """
    blocks = HashBlocks("mooncake", BLOCK_TOKENS)
    rows: list[TraceRequest] = []
    for i, (number, line) in enumerate(islice(read_lines(path), limit)):
        place = f"{path}:{number}"
        fields = json_object(line, place)
        stamp = present(fields, "timestamp", place)
        stamp_ms = whole_number(stamp, place, "timestamp", 0, MAX_NS // _NS_PER_MS, "whole milliseconds, 0 or above")
        num_prompt = token_count(present(fields, "input_length", place), place, "input_length")
        num_output = token_count(present(fields, "output_length", place), place, "output_length")
        rest_key = content_key("mooncake-rest", i)
        prompt = blocks.prompt(present(fields, "hash_ids", place), num_prompt, place, rest_key)
        output = Span(content_key("mooncake-output", i), 0, num_output)
        rows.append(TraceRequest(f"mooncake-{i}", stamp_ms * _NS_PER_MS, prompt, output, place=place))
    if not rows:
        raise TraceError(f"{path}: no requests; expected one JSON object on each line")
    trace = arrange("mooncake", rows)
    return to_zero(trace, spread_batches)


def to_zero(trace: Trace, spread_batches: bool) -> Trace:
    """Shifts the first arrival to 0; with `spread_batches` also spreads the rows of one instant up to the next."""
    from testbed.traces.transforms import shift, spread  # transforms know no readers: no cycle

    shifted = shift(trace, -trace.rows[0].arrival_ns, note=False)
    return spread(shifted) if spread_batches else shifted
