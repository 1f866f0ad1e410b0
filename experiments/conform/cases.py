"""Reads files of cases: a configuration, requests and the decisions that a real scheduler made. Checks every field.

One JSON object per line, plain or compressed. docs/conform.md describes the format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from testbed.core.request import Request, SamplingParams
from testbed.errors import TraceError
from testbed.foreign_text import whole
from testbed.traces.readers.fields import json_object, present, refuse, token_ids
from testbed.traces.readers.open_text import existing_file, read_lines

SECOND_NS = 10**9
Decision = dict[str, Any]  # field -> value, beginning with "step"; `scheduled` keeps the system's order


@dataclass(frozen=True, slots=True)
class Case:
    """One case. requests: ordered by arrival, then by numeric id. steps: one decision each, in order of time. aborts:
    (steps planned before it, steps committed before it, request id), in order. resets: of the prefix cache and all
    running requests, as (planned, committed); they follow aborts with the same two numbers."""

    name: str
    system: str
    place: str  # file:line
    config: dict[str, Any]
    requests: tuple[Request, ...]
    steps: tuple[Decision, ...]
    aborts: tuple[tuple[int, int, str], ...] = ()
    resets: tuple[tuple[int, int], ...] = ()


def read_cases(file: Path) -> list[Case]:
    """Reads all cases. Raises TraceError "file:line: reason" for the first malformed case."""
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
    name, system = (_present(fields, place, key, _NAME) for key in ("case", "system"))
    config = _present(fields, place, "config", _OBJECT)
    for key, value in config.items():
        if key not in CONFIG_FIELDS:
            raise TraceError(f"{place}: config has an unknown field {key!r}; known: {', '.join(CONFIG_FIELDS)}")
        if value is not None:
            _checked(value, place, f"config.{key}", CONFIG_FIELDS[key])
    rows = _present(fields, place, "requests", _LIST)
    requests = {request.request_id: request for request in (_request(row, place) for row in rows)}
    if len(requests) != len(rows):
        raise TraceError(f"{place}: a request_id occurs twice in requests; ids must differ")
    steps: list[Decision] = []
    for row in _present(fields, place, "steps", _LIST):
        steps.append(_decision(row, requests, place))
        if len(steps) > 1 and steps[-1]["step"] <= steps[-2]["step"]:
            raise TraceError(f"{place}: step {steps[-1]['step']} follows step {steps[-2]['step']}; steps must increase")
    of_aborts, of_resets = (_checked(fields.get(key, []), place, key, _LIST) for key in ("aborts", "resets"))
    aborts = sorted([_abort(row, requests, place) for row in of_aborts], key=itemgetter(0, 1))
    resets = sorted([_place(row, place, "resets") for row in of_resets])
    in_order = sorted(requests.values(), key=lambda request: (request.arrival_ns, int(request.request_id)))
    return Case(name, system, place, config, tuple(in_order), tuple(steps), tuple(aborts), tuple(resets))


def _request(row: Any, place: str) -> Request:
    row = _checked(row, place, "requests", _OBJECTS)
    request_id = _present(row, place, "request_id", _ID)
    place = f"{place}: request {request_id}"
    arrival = _present(row, place, "arrival_step", _COUNT)
    skips_cache = _checked(row.get("skips_prefix_cache", False), place, "skips_prefix_cache", _FLAG)
    return Request(
        request_id,
        token_ids(present(row, "prompt_token_ids", place), place, "prompt_token_ids"),
        arrival_ns=arrival * SECOND_NS,
        forced_output=token_ids(present(row, "output_token_ids", place), place, "output_token_ids"),
        sampling=SamplingParams(
            n=_checked(row.get("n", 1), place, "n", _POSITIVE),
            max_tokens=None if (most := row.get("max_tokens")) is None else _checked(most, place, "max_tokens", _LEAVE),
            prompt_logprobs=0 if skips_cache else None,  # a request with prompt_logprobs uses no prefix-cache hits
        ),
        priority=_checked(row.get("priority", 0), place, "priority", (whole(-_MOST, _MOST), "a whole number")),
        cache_salt=_checked(row.get("cache_salt", ""), place, "cache_salt", (lambda value: type(value) is str, "text")),
    )


def _abort(row: Any, requests: dict[str, Request], place: str) -> tuple[int, int, str]:
    row = _checked(row, place, "aborts", _OBJECTS)
    name = _present(row, place, "request_id", _ID)
    if name not in requests:
        raise TraceError(f"{place}: aborts name request {name!r}, which the case does not have")
    return *_place(row, f"{place}: abort of {name}", "aborts"), name


def _place(row: Any, place: str, field: str) -> tuple[int, int]:
    row = _checked(row, place, field, _OBJECTS)
    return _present(row, place, "planned", _COUNT), _present(row, place, "committed", _COUNT)


def _decision(row: Any, requests: dict[str, Request], place: str) -> Decision:
    """Reads one step; sorts sets of requests by numeric id."""
    row = _checked(row, place, "steps", _OBJECTS)
    step = _present(row, place, "step", _COUNT)
    place = f"{place}: step {step}"
    present(row, "scheduled", place)
    decision: Decision = {"step": step}
    for key, value in row.items():
        if key not in STEP_FIELDS:
            raise TraceError(f"{place}: unknown field {key!r}; known: {', '.join(STEP_FIELDS)}")
        value = _checked(value, place, key, STEP_FIELDS[key])
        if isinstance(value, dict | list):
            strangers = [name for name in value if name not in requests]
            if strangers:
                raise TraceError(f"{place}: {key} names request {strangers[0]!r}, which the case does not have")
        decision[key] = sorted(value, key=int) if isinstance(value, list) else value
    return decision


# --- kinds of values ---

Kind = tuple[Callable[[Any], bool], str]  # (whether a value is valid, what is expected)


def _checked(value: Any, place: str, field: str, kind: Kind) -> Any:
    is_one, expected = kind
    if not is_one(value):
        raise refuse(place, field, value, expected)
    return value


def _present(fields: dict[str, Any], place: str, field: str, kind: Kind) -> Any:
    return _checked(present(fields, field, place), place, field, kind)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdigit()


_MOST = 2**31 - 1
_ID: Kind = (_is_id, "a decimal number as text")
_NAME: Kind = (_is_text, "a name")
_OBJECT: Kind = (_of(dict), "an object")
_OBJECTS: Kind = (_of(dict), "a list of objects")
_LIST: Kind = (_of(list), "a list")
_FLAG: Kind = (_of(bool), "true or false")
_COUNT: Kind = (whole(0, _MOST), "a whole number from 0")
_POSITIVE: Kind = (whole(1, _MOST), "a whole number from 1")
_LEAVE: Kind = (whole(1, _MOST), "a number from 1, or null")
_COUNTS: Kind = (
    lambda value: isinstance(value, dict) and all(map(_COUNT[0], value.values())),
    "an object of tokens by request",
)
_IDS: Kind = (lambda value: isinstance(value, list) and all(map(_is_id, value)), "a list of request ids")
CONFIG_FIELDS: dict[str, Kind] = {
    "block_size": _POSITIVE,
    "num_gpu_blocks": _POSITIVE,
    "num_cpu_blocks": _COUNT,
    "max_num_batched_tokens": _POSITIVE,
    "max_num_seqs": _POSITIVE,
    "max_model_len": _POSITIVE,
    "prefix_caching": _FLAG,
    "preemption_mode": (_is_text, "recompute, swap or null"),
    "queue_order": _NAME,
    "long_prefill_token_threshold": _COUNT,
    "max_num_partial_prefills": _POSITIVE,
    "watermark": (lambda value: type(value) in (int, float) and 0 <= value < 1, "a share in [0, 1)"),
    "async_scheduling": _FLAG,
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
    "is_prefill": _FLAG,
    "free_blocks": _COUNT,
    "free_cpu_blocks": _COUNT,
    "num_waiting": _COUNT,
    "num_swapped": _COUNT,
    "free_blocks_after_commit": _COUNT,
}
