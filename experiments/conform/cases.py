"""Files of cases: a configuration, requests and the decisions that a real scheduler made. Checks every field.

One JSON object a line, plain or compressed. docs/conform.md describes the format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.core.request import Request, SamplingParams
from testbed.errors import TraceError
from testbed.traces.readers.fields import json_object, present, refuse, token_ids
from testbed.traces.readers.open_text import existing_file, read_lines

SECOND_NS = 10**9
Decision = dict[str, Any]  # field -> value, "step" first; `scheduled` keeps the system's order


@dataclass(frozen=True, slots=True)
class Case:
    """requests: by arrival, ties by numeric id. steps: one decision each, in order of time. aborts: of requests, each
    with the numbers of steps planned and committed before it, in that order."""

    name: str
    system: str
    place: str  # file:line
    config: dict[str, Any]
    requests: tuple[Request, ...]
    steps: tuple[Decision, ...]
    aborts: tuple[tuple[int, int, str], ...] = ()


def read_cases(file: Path) -> list[Case]:
    """Reads all cases. Raises TraceError "file:line: reason" on the first that is malformed."""
    existing_file(file, "a file of cases")
    cases: dict[str, Case] = {}
    for number, line in read_lines(file):
        case = _case(line, f"{file}:{number}")
        if case.name in cases:
            raise TraceError(f"{case.place}: case {case.name!r} is also at {cases[case.name].place}; names must differ")
        cases[case.name] = case
    if not cases:
        raise TraceError(f"{file}: no cases; expected one JSON object on each line")
    return list(cases.values())


def _case(line: str, place: str) -> Case:
    fields = json_object(line, place)
    name, system = (_checked(present(fields, key, place), place, key, _is_text, "a name") for key in ("case", "system"))
    config = _checked(present(fields, "config", place), place, "config", _is_object, "an object")
    for key, value in config.items():
        if key not in CONFIG_FIELDS:
            raise TraceError(f"{place}: config has an unknown field {key!r}; known: {', '.join(CONFIG_FIELDS)}")
        if value is not None:
            _checked(value, place, f"config.{key}", *CONFIG_FIELDS[key])
    rows = _checked(present(fields, "requests", place), place, "requests", _is_list, "a list")
    requests = {request.request_id: request for request in (_request(row, place) for row in rows)}
    if len(requests) != len(rows):
        raise TraceError(f"{place}: a request_id occurs twice in requests; ids must differ")
    decisions = _checked(present(fields, "steps", place), place, "steps", _is_list, "a list")
    steps: list[Decision] = []
    for row in decisions:
        steps.append(_decision(row, requests, place))
        if len(steps) > 1 and steps[-1]["step"] <= steps[-2]["step"]:
            raise TraceError(f"{place}: step {steps[-1]['step']} follows step {steps[-2]['step']}; steps must increase")
    aborts = sorted(_abort(row, requests, place) for row in fields.get("aborts", ()))
    in_order = sorted(requests.values(), key=lambda request: (request.arrival_ns, int(request.request_id)))
    return Case(name, system, place, config, tuple(in_order), tuple(steps), tuple(aborts))


def _request(row: Any, place: str) -> Request:
    row = _checked(row, place, "requests", _is_object, "a list of objects")
    request_id = _checked(present(row, "request_id", place), place, "request_id", _is_id, "a decimal number as text")
    place = f"{place}: request {request_id}"
    arrival = _checked(present(row, "arrival_step", place), place, "arrival_step", _is_count, "a whole number from 0")
    return Request(
        request_id,
        token_ids(present(row, "prompt_token_ids", place), place, "prompt_token_ids"),
        arrival_ns=arrival * SECOND_NS,
        forced_output=token_ids(present(row, "output_token_ids", place), place, "output_token_ids"),
        sampling=SamplingParams(
            n=_checked(row.get("n", 1), place, "n", _is_positive, "a whole number from 1"),
            max_tokens=_checked(row.get("max_tokens"), place, "max_tokens", _is_leave, "a number from 1, or null"),
        ),
        priority=_checked(row.get("priority", 0), place, "priority", _is_whole, "a whole number"),
    )


def _abort(row: Any, requests: dict[str, Request], place: str) -> tuple[int, int, str]:
    row = _checked(row, place, "aborts", _is_object, "a list of objects")
    name = present(row, "request_id", place)
    if name not in requests:
        raise TraceError(f"{place}: aborts name request {name!r}, which the case does not have")
    where = f"{place}: abort of {name}"
    planned, committed = (_checked(present(row, key, where), where, key, *_COUNT) for key in ("planned", "committed"))
    return planned, committed, name


def _decision(row: Any, requests: dict[str, Request], place: str) -> Decision:
    """One step, with sets of requests sorted by numeric id."""
    row = _checked(row, place, "steps", _is_object, "a list of objects")
    step = _checked(present(row, "step", place), place, "step", _is_count, "a whole number from 0")
    place = f"{place}: step {step}"
    present(row, "scheduled", place)
    decision: Decision = {"step": step}
    for key, value in row.items():
        if key not in STEP_FIELDS:
            raise TraceError(f"{place}: unknown field {key!r}; known: {', '.join(STEP_FIELDS)}")
        value = _checked(value, place, key, *STEP_FIELDS[key])
        if isinstance(value, dict | list):
            strangers = [name for name in value if name not in requests]
            if strangers:
                raise TraceError(f"{place}: {key} names request {strangers[0]!r}, which the case does not have")
        decision[key] = sorted(value, key=int) if isinstance(value, list) else value
    return decision


# --- kinds of values ---

Kind = tuple[Callable[[Any], bool], str]  # (whether a value is one, what was expected)


def _checked(value: Any, place: str, field: str, is_one: Callable[[Any], bool], expected: str) -> Any:
    if not is_one(value):
        raise refuse(place, field, value, expected)
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdigit()


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**31


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_positive(value: Any) -> bool:
    return _is_whole(value) and value >= 1


def _is_leave(value: Any) -> bool:
    return value is None or _is_positive(value)


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_id, value))


_COUNT: Kind = (_is_count, "a whole number from 0")
_POSITIVE: Kind = (_is_positive, "a whole number from 1")
_COUNTS: Kind = (_is_counts, "an object of tokens by request")
_IDS: Kind = (_is_ids, "a list of request ids")
CONFIG_FIELDS: dict[str, Kind] = {
    "block_size": _POSITIVE,
    "num_gpu_blocks": _POSITIVE,
    "num_cpu_blocks": _COUNT,
    "max_num_batched_tokens": _POSITIVE,
    "max_num_seqs": _POSITIVE,
    "max_model_len": _POSITIVE,
    "prefix_caching": (_is_flag, "true or false"),
    "preemption_mode": (_is_text, "recompute, swap or null"),
    "queue_order": (_is_text, "a name"),
    "long_prefill_token_threshold": _COUNT,
    "max_num_partial_prefills": _POSITIVE,
    "watermark": (_is_share, "a share in [0, 1)"),
    "async_scheduling": (_is_flag, "true or false"),
}
STEP_FIELDS: dict[str, Kind] = {
    "step": _COUNT,
    "committed": _COUNT,
    "scheduled": _COUNTS,
    "preempted": _IDS,
    "swapped_out": _IDS,
    "num_blocks_swapped_out": _COUNT,
    "num_blocks_swapped_in": _COUNT,
    "num_blocks_copied": _COUNT,
    "ignored": _IDS,
    "cached_tokens": _COUNTS,
    "is_prefill": (_is_flag, "true or false"),
    "free_blocks": _COUNT,
    "free_cpu_blocks": _COUNT,
    "num_waiting": _COUNT,
    "num_swapped": _COUNT,
    "free_blocks_after_commit": _COUNT,
}
