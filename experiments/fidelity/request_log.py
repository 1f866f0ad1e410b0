"""Reads a log of requests as CSV or JSONL with the columns of docs/fidelity.md, for tools without their own reader.

arrival_s, num_prompt_tokens, num_output_tokens, ttft_s, e2e_s or tpot_s; optional request_id, token_times_s (a list of
the tokens' instants after the arrival; in CSV as text) and failed (true, 1: the request is left out).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from experiments.fidelity.fields import Fields, csv_rows, json_lines
from experiments.fidelity.measured import MeasuredRequest, MeasuredRun, measured
from testbed.errors import TraceError
from testbed.foreign_text import unknown
from testbed.traces.readers.fields import refuse

NEEDED = ("arrival_s", "num_prompt_tokens", "num_output_tokens", "ttft_s", "e2e_s")
COLUMNS = ("request_id", *NEEDED, "tpot_s", "token_times_s", "failed")
_FAILED, _ENDED_WELL = ("true", "1"), ("false", "0", "")
_NEAR_S = 1e-3  # allowed difference of the first and last token's instants from TTFT and E2E


def read_request_log(text: str, file: Path) -> list[MeasuredRun]:
    return [measured(file.stem, "a log of requests", file, map(_row, _rows(text, file)))]


def _rows(text: str, file: Path) -> Iterator[Fields]:
    if text.lstrip().startswith("{"):
        yield from json_lines(text, file)
        return
    for row in csv_rows(text, file):
        yield Fields({name: value for name, value in row.values.items() if value not in ("", None)}, row.place)


def _has_failed(row: Fields) -> bool:
    value = row.get("failed")
    word = "" if value is None else str(value).strip().lower()
    if word not in (*_FAILED, *_ENDED_WELL):
        raise refuse(row.place, "failed", value, "true, false, 1, 0 or nothing")
    return word in _FAILED


def _row(row: Fields) -> MeasuredRequest | None:
    for name in row.values:
        if name not in COLUMNS:
            raise TraceError(unknown(f"{row.place}: unknown column {name!r}", str(name), COLUMNS))
    if _has_failed(row):
        return None
    tpot_s = None if row.get("tpot_s") is None else row.duration_s("tpot_s")
    for name in NEEDED:
        if name != "e2e_s" or tpot_s is None:
            row.required(name, "it, as docs/fidelity.md has it")
    num_output, ttft_s = row.count("num_output_tokens"), row.duration_s("ttft_s")
    if tpot_s is None or row.get("e2e_s") is not None:
        e2e_s = row.duration_s("e2e_s")
    else:
        e2e_s = ttft_s + tpot_s * (num_output - 1)
    request = MeasuredRequest(
        row.request_id(), row.instant_s("arrival_s"), row.count("num_prompt_tokens"), num_output, ttft_s, e2e_s, tpot_s,
        None, row.place,
    ).checked()  # fmt: skip
    if row.get("token_times_s") is None:
        return request
    return request._replace(gaps_s=_token_gaps(row.durations_s("token_times_s"), request))


def _token_gaps(times: tuple[float, ...], row: MeasuredRequest) -> tuple[float, ...]:
    """The gaps between the tokens' instants. Raises TraceError unless there is one instant for each token, ascending,
    from the row's TTFT to its E2E."""
    place = row.place
    if len(times) != row.num_output_tokens:
        has = f"field 'token_times_s' has {len(times)} instants"
        raise TraceError(f"{place}: {has}; expected {row.num_output_tokens}, as num_output_tokens says")
    for before, after in pairwise(times):
        if after < before:
            raise refuse(place, "token_times_s", after, f"an instant not before the one before it, {before:g}")
    for which, time, name, wanted in (
        ("first", times[0], "ttft_s", row.ttft_s),
        ("last", times[-1], "e2e_s", row.e2e_s),
    ):
        if abs(time - wanted) > _NEAR_S:
            raise refuse(
                place, "token_times_s", time, f"its {which} instant within {_NEAR_S:g} s of {name}, {wanted:g}"
            )
    return tuple(after - before for before, after in pairwise(times))
