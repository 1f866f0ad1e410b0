"""Reads a log of requests of one's own: a CSV or JSONL in the testbed's own schema (docs/traces.md), whose rows also
have what was measured. `trace.columns` and `trace.where` name and choose its fields as in `testbed run`.

ttft_s, e2e_s or tpot_s, or these in ms (ttft_ms); optional token_times_s (a list of the tokens' instants after the
arrival; in CSV as text) and failed (true, 1: the request is left out). A row without TTFT was not streamed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.configuration.grammar import parsed
from experiments.fidelity.fields import Fields
from experiments.fidelity.measured import MeasuredRequest, MeasuredRun, measured
from testbed.errors import TraceError
from testbed.foreign_text import nearest
from testbed.traces.readers.fields import listed, refuse
from testbed.traces.readers.open_text import Record
from testbed.traces.readers.own import of_log, own_records
from testbed.traces.readers.own_log import Columns, Log, Where, check_columns, check_where
from testbed.traces.schema import Span, TraceRequest
from testbed.traces.stream import whole

_SOURCE = "a log of requests"
_UNITS_S = {"s": 1.0, "ms": 1e-3}
_LATENCIES = ("ttft", "e2e", "tpot")
MEASURED = (*(f"{name}_{unit}" for name in _LATENCIES for unit in _UNITS_S), "token_times_s", "failed")
_OLDER = {"arrival_s": "arrival_time", "num_prompt_tokens": "prompt_tokens", "num_output_tokens": "output_tokens"}
_FAILED, _ENDED_WELL = ("true", "1"), ("false", "0", "")
_NEAR_S = 1e-3  # allowed difference of the first and last token's instants from TTFT and E2E


def read_request_log(
    text: str, file: Path, columns: Columns | None = None, where: Where | None = None
) -> list[MeasuredRun]:
    records = list(own_records(file, columns, where, is_csv=not text.lstrip().startswith("{")))
    _rename(records, {*(columns or {}).values()})
    failed: dict[str, None] = {}

    def ended_well(place: str, fields: dict[str, Any]) -> bool:
        if has_failed := _has_failed(fields, place):
            failed[place] = None
        return not has_failed

    log = Log(lambda: iter(records), None, columns, where, also=MEASURED, keeps=ended_well)
    of_place = dict(log)
    if failed and not of_place:
        return [measured(file.stem, _SOURCE, file, [None] * len(failed))]
    trace = whole(of_log(file.stem, file, log))
    _check_streamed(of_place.values(), file)
    rows = [_measured(row, Fields(of_place[row.place], row.place)) for row in trace]
    notes = [*trace.notes]
    if all(row.session_id is None and isinstance(row.prompt[0], Span) for row in trace):
        notes.append("no row has a session_id: prefixes that prompts shared do not hit in the simulated cache")
    return [measured(file.stem, _SOURCE, file, [*rows, *[None] * len(failed)], notes=notes)]


def _rename(records: list[Record], named: Collection[str | None]) -> None:
    """Gives our names to fields that have their older ones, if no record has ours. named: what the user named."""
    there = {name for _, fields in records for name in fields}
    older = {old: new for old, new in _OLDER.items() if old in there and old not in named and new not in there}
    for _, fields in records if older else ():
        for old, new in older.items():
            if old in fields:
                fields[new] = fields.pop(old)


def log_settings(overrides: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns what the overrides say of logs, `columns` and `where`, and the other overrides. Raises ConfigError."""
    found: dict[str, Any] = {}
    others: list[str] = []
    for item in overrides:
        key = item.partition("=")[0]
        if key in ("trace.columns", "trace.where"):
            found[key.removeprefix("trace.")] = parsed(item).value()
        else:
            others.append(item)
    check_columns(found.get("columns", {}), MEASURED)
    check_where(found.get("where", {}))
    return found, others


def _has_failed(fields: Mapping[str, Any], place: str) -> bool:
    value = fields.get("failed")
    word = "" if value is None else str(value).strip().lower()
    if word not in (*_FAILED, *_ENDED_WELL):
        raise refuse(place, "failed", value, "true, false, 1, 0 or nothing")
    return word in _FAILED


def _check_streamed(records: Iterable[Mapping[str, Any]], file: Path) -> None:
    """Raises TraceError if no row has a TTFT: the column is missing, or has another name."""
    names = dict.fromkeys(name for fields in records for name, value in fields.items() if value not in (None, ""))
    if names.keys().isdisjoint(("ttft_s", "ttft_ms")):
        near = nearest("ttft_s", list(names))
        raise TraceError(
            f"{file}: no row has 'ttft_s' or 'ttft_ms'; {near}found {listed(names)}; say what has another name: "
            "trace.columns={ttft_s: <its name>}"
        )


def _measured(row: TraceRequest, fields: Fields) -> MeasuredRequest:
    output = row.output
    if output is None:
        raise TraceError(f"{row.place}: field 'output_tokens' is absent; expected it, as docs/fidelity.md has it")
    if row.think_ns is not None:
        row = row._replace(think_ns=None)  # it arrives when it did
    num_output = output.num_tokens
    ttft_s, e2e_s, tpot_s = (_latency_s(fields, name) for name in _LATENCIES)
    if e2e_s is None:
        if tpot_s is None or ttft_s is None:
            raise TraceError(f"{row.place}: field 'e2e_s' is absent; expected it, or 'ttft_s' and 'tpot_s'")
        e2e_s = ttft_s + tpot_s * (num_output - 1)
    request = MeasuredRequest(
        row.request_id, row.arrival_ns / 1e9, row.num_prompt_tokens, num_output, ttft_s, e2e_s, tpot_s, None, row.place,
        row=row,
    ).checked()  # fmt: skip
    if fields.get("token_times_s") is None or ttft_s is None:
        return request
    return request._replace(gaps_s=_token_gaps(fields.durations_s("token_times_s"), request))


def _latency_s(fields: Fields, name: str) -> float | None:
    """A latency in s, in either unit; None if the row has none."""
    given = [unit for unit in _UNITS_S if fields.get(f"{name}_{unit}") not in (None, "")]
    if len(given) > 1:
        raise TraceError(f"{fields.place}: both '{name}_s' and '{name}_ms' are given; expected one of them")
    return fields.duration_s(f"{name}_{given[0]}", _UNITS_S[given[0]]) if given else None


def _token_gaps(times: tuple[float, ...], row: MeasuredRequest) -> tuple[float, ...]:
    """The gaps between the tokens' instants. Raises TraceError unless there is one instant for each token, ascending,
    from the row's TTFT to its E2E."""
    place = row.place
    if len(times) != row.num_output_tokens:
        has = f"field 'token_times_s' has {len(times)} instants"
        raise TraceError(f"{place}: {has}; expected {row.num_output_tokens}, as output_tokens says")
    for before, after in pairwise(times):
        if after < before:
            raise refuse(place, "token_times_s", after, f"an instant not before the one before it, {before:g}")
    for which, time, name, wanted in (
        ("first", times[0], "ttft_s", row.ttft_s),
        ("last", times[-1], "e2e_s", row.e2e_s),
    ):
        if wanted is not None and abs(time - wanted) > _NEAR_S:
            raise refuse(
                place, "token_times_s", time, f"its {which} instant within {_NEAR_S:g} s of {name}, {wanted:g}"
            )
    return tuple(after - before for before, after in pairwise(times))
