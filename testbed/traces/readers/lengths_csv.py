"""Pairs of lengths without arrivals (project-etalon/etalon, `sharegpt_8k` and others): the reader samples the arrivals.

CSV `num_prefill_tokens,num_decode_tokens`, other columns are ignored. There is no content: every request has its own
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from testbed.traces.arrivals import ArrivalConfig, idle_notes, instants
from testbed.traces.draws import streams
from testbed.traces.readers.fields import token_count
from testbed.traces.readers.open_text import read_csv
from testbed.traces.schema import Span, TraceRequest
from testbed.traces.stream import StreamedTrace
from testbed.traces.synthesis import numbered_keys

_key_of = numbered_keys("lengths")


def stream_lengths(
    path: str | Path, limit: int | None = None, arrivals: ArrivalConfig | None = None, seed: int = 0
) -> StreamedTrace:
    """Reads a file of lengths (plain, .gz, .zst), at most its first `limit` rows. arrivals: their process (default:
    Poisson, 4 per second), with `seed`.

    Raises TraceError, with file and line, on a malformed row or a missing column, ConfigError for a negative seed.
    """
    config = arrivals or ArrivalConfig()
    streams(seed)  # rejects a bad seed before any row is read

    def make() -> Iterator[TraceRequest]:
        starts = instants(config, streams(seed))
        for i, (place, cells) in enumerate(islice(read_csv(path, ("num_prefill_tokens", "num_decode_tokens")), limit)):
            num_prompt = token_count(cells[0], place, "num_prefill_tokens")
            num_output = token_count(cells[1], place, "num_decode_tokens")
            key = _key_of(i)
            prompt, output = Span(key, 0, num_prompt), Span(key, num_prompt, num_output)
            yield TraceRequest(f"lengths-{i}", next(starts), (prompt,), output, place=place)

    note = f"arrivals are not the file's: {config.says()}, seed {seed}"
    nothing = f"{path}: no requests; expected at least one row after the header"
    return StreamedTrace("lengths", make, (note, *idle_notes(config)), nothing=lambda: nothing)
