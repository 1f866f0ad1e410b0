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
from testbed.traces.readers.from_zero import Sizes, numbered
from testbed.traces.readers.open_text import read_csv
from testbed.traces.stream import StreamedTrace


def stream_lengths(
    path: str | Path, limit: int | None = None, arrivals: ArrivalConfig | None = None, seed: int = 0
) -> StreamedTrace:
    """Reads a file of lengths (plain, .gz, .zst), at most its first `limit` rows. arrivals: their process (default:
    Poisson, 4 per second), with `seed`.

    Raises TraceError, with file and line, on a malformed row or a missing column, ConfigError for a negative seed.
    """
    config = arrivals or ArrivalConfig()
    streams(seed)  # rejects a bad seed before any row is read

    def sizes() -> Iterator[Sizes]:
        starts = instants(config, streams(seed))
        for place, cells in islice(read_csv(path, ("num_prefill_tokens", "num_decode_tokens")), limit):
            num_prompt = token_count(cells[0], place, "num_prefill_tokens")
            yield place, next(starts), num_prompt, token_count(cells[1], place, "num_decode_tokens")

    note = f"arrivals are not the file's: {config.says()}, seed {seed}"
    nothing = f"{path}: no requests; expected at least one row after the header"
    return StreamedTrace("lengths", lambda: numbered("lengths", sizes()), (note, *idle_notes(config)), nothing=nothing)
