"""Requests of LLMServingSim: its own CSV (times in ns), and `requests.jsonl` of its benchmark of a real vLLM.

In the CSV `output` counts prompt and output together, as its own TPOT does; `ITL` is a list of gaps as text. In
requests.jsonl instants are of the engine's monotonic clock, arrival_time of the wall. The engine notes queued_ts only
between two steps, so arrivals are arrival_time, shifted by the smallest difference of the two: the request that waited
least waited not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.configuration.names import choice
from experiments.fidelity.fields import (
    count,
    csv_columns,
    csv_rows,
    duration_s,
    instant_s,
    json_lines,
    request_id,
    required,
)
from experiments.fidelity.measured import MeasuredRequest, MeasuredRun, measured
from testbed.errors import TraceError
from testbed.traces.readers.fields import nanoseconds, refuse

COLUMNS = ("request id", "input", "output", "arrival", "end_time", "latency", "TTFT", "TPOT")
BENCH_FIELDS = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")
_OTHER_CLOCK_S = 100_000


def read_servingsim(text: str, file: Path, given: list[str]) -> list[MeasuredRun]:
    """The CSV. Raises TestbedError in one line."""
    columns = csv_columns(text)
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise TraceError(f"{file}:1: column {missing[0]!r} is absent; expected {', '.join(COLUMNS)}")
    rows: list[MeasuredRequest] = []
    models, instances = dict[str | None, None](), set()
    for values, place in csv_rows(text, file):
        rows.append(_row(values, place))
        models[values.get("model") or None] = None
        instances.add(values.get("instance id"))
    if len(models) > 1:
        raise TraceError(f"{file}: requests of {len(models)} models; expected one, split the file")
    notes = [f"{len(instances)} instances served it; see backend.num_replicas"] if len(instances) > 1 else []
    settings = choice("model", next(iter(models), None), str(file), given)
    return [measured(file.stem, "LLMServingSim", rows, file, settings, 0, notes)]


def _row(values: Mapping[str, Any], place: str) -> MeasuredRequest:
    num_prompt, num_all = count(values, "input", place), count(values, "output", place)
    if num_all <= num_prompt:
        raise refuse(place, "output", num_all, f"more than input ({num_prompt}): it counts prompt and output together")
    gaps = None
    if values.get("ITL"):
        gaps = tuple(duration_s(gap, place, "ITL", 1e-9) for gap in _gaps(values["ITL"], place))
    return MeasuredRequest(
        str(required(values, "request id", place, "an id")), nanoseconds(values["arrival"], place, "arrival") / 1e9,
        num_prompt, num_all - num_prompt, duration_s(values["TTFT"], place, "TTFT", 1e-9),
        duration_s(values["latency"], place, "latency", 1e-9), None, gaps, place,
    )  # fmt: skip


def _gaps(text: str, place: str) -> list[Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise refuse(place, "ITL", text, "a list of ns, as [1, 2]")
    return found


class _Timed(NamedTuple):
    """A request of requests.jsonl: instants of the engine's clock, and when the client sent it, of the wall's."""

    values: Mapping[str, Any]
    wall_s: float | None
    queued_s: float
    first_s: float
    last_s: float
    place: str


def read_servingsim_bench(text: str, file: Path, given: list[str]) -> list[MeasuredRun]:
    """requests.jsonl. Raises TestbedError in one line."""
    timed: list[_Timed] = []
    num_failed = 0
    for values, place in json_lines(text, file):
        if not values.get("output_toks") or values.get("first_token_ts") is None:
            num_failed += 1
        else:
            timed.append(_timed(values, place))
    offset_s = _offset_s(timed)
    rows = [_bench_row(one, offset_s) for one in timed]
    return [measured(file.stem, "LLMServingSim's benchmark of vLLM", rows, file, (), num_failed)]


def _timed(values: Mapping[str, Any], place: str) -> _Timed:
    queued_s, first_s, last_s = (
        instant_s(required(values, field, place, "an instant in s"), place, field)
        for field in ("queued_ts", "first_token_ts", "last_token_ts")
    )
    wall = values.get("arrival_time")
    return _Timed(
        values, None if wall is None else instant_s(wall, place, "arrival_time"), queued_s, first_s, last_s, place
    )


def _offset_s(timed: Sequence[_Timed]) -> float:
    """What turns the wall's clock into the engine's: 0 where they are one."""
    known = [one.queued_s - one.wall_s for one in timed if one.wall_s is not None]
    return min(known) if known and abs(min(known)) > _OTHER_CLOCK_S else 0.0


def _bench_row(one: _Timed, offset_s: float) -> MeasuredRequest:
    values, place = one.values, one.place
    arrival_s = one.queued_s if one.wall_s is None else one.wall_s + offset_s
    return MeasuredRequest(
        request_id(values, "request_id", place, place.rsplit(":", 1)[-1]), arrival_s,
        count(values, "input_toks", place), count(values, "output_toks", place),
        duration_s(one.first_s - arrival_s, place, "first_token_ts - arrival"),
        duration_s(one.last_s - arrival_s, place, "last_token_ts - arrival"), None, None, place,
    )  # fmt: skip
