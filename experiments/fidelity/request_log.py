"""A log of requests as CSV or JSONL with the columns of docs/fidelity.md, for what has no reader of its own.

arrival_s, num_prompt_tokens, num_output_tokens, ttft_s, e2e_s; optional request_id, tpot_s, token_times_s (the instants
of the tokens after the arrival, a list; in CSV as text) and failed (true, 1: the request is left out).
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.fidelity.fields import count, duration_s, instant_s, listed, required
from experiments.fidelity.measured import MeasuredRequest, MeasuredRun, measured
from testbed.errors import TraceError
from testbed.foreign_text import unknown
from testbed.traces.readers.fields import json_object, refuse

NEEDED = ("arrival_s", "num_prompt_tokens", "num_output_tokens", "ttft_s", "e2e_s")
COLUMNS = ("request_id", *NEEDED, "tpot_s", "token_times_s", "failed")
_FAILED = ("true", "1")


def read_request_log(text: str, file: Path, given: list[str]) -> list[MeasuredRun]:
    """Raises TestbedError in one line."""
    rows: list[MeasuredRequest] = []
    num_failed = 0
    for values, place in _rows(text, file):
        for name in values:
            if name not in COLUMNS:
                raise TraceError(unknown(f"{place}: unknown column {name!r}", str(name), COLUMNS))
        if str(values.get("failed") or "").lower() in _FAILED:
            num_failed += 1
        else:
            rows.append(_row(values, place))
    return [measured(file.stem, "a log of requests", rows, file, (), num_failed)]


def _rows(text: str, file: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    if text.lstrip().startswith("{"):
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield json_object(line, f"{file}:{number}"), f"{file}:{number}"
        return
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    for values in reader:
        if None in values:
            raise TraceError(f"{file}:{reader.line_num}: more values than columns; quote lists")
        yield {name: value for name, value in values.items() if value not in ("", None)}, f"{file}:{reader.line_num}"


def _row(values: Mapping[str, Any], place: str) -> MeasuredRequest:
    known = {name: required(values, name, place, "it, as docs/fidelity.md has it") for name in NEEDED}
    ttft_s = duration_s(known["ttft_s"], place, "ttft_s")
    tpot = values.get("tpot_s")
    return MeasuredRequest(
        str(values.get("request_id") or place.rsplit(":", 1)[-1]), instant_s(known["arrival_s"], place, "arrival_s"),
        count(values, "num_prompt_tokens", place), count(values, "num_output_tokens", place), ttft_s,
        duration_s(known["e2e_s"], place, "e2e_s"), None if tpot is None else duration_s(tpot, place, "tpot_s"),
        _token_gaps(values.get("token_times_s"), place), place,
    )  # fmt: skip


def _token_gaps(value: Any, place: str) -> tuple[float, ...] | None:
    """Gaps between the tokens' instants, which may not run backwards."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise refuse(place, "token_times_s", value, "a list of s, as [0.1, 0.2]") from None
    times = [duration_s(time, place, "token_times_s") for time in listed(value, place, "token_times_s")]
    for before, after in pairwise(times):
        if after < before:
            raise refuse(place, "token_times_s", after, f"an instant not before the one before it, {before:g}")
    return tuple(after - before for before, after in pairwise(times))
