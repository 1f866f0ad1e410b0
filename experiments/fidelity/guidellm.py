"""Reports of GuideLLM (`benchmarks.json`): each of its benchmarks is a load.

Read are benchmarks[].requests.successful (errored and incomplete ones are counted), and of each request
request_start_time (older: start_time) in s, request_latency in s (older: from start_time to end_time), prompt_tokens,
output_tokens, time_to_first_token_ms and inter_token_latency_ms (mean of the request, without the first token).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.fidelity.fields import (
    count,
    duration_s,
    instant_s,
    json_value,
    listed,
    mapping,
    request_id,
    required,
)
from experiments.fidelity.measured import MeasuredRequest, MeasuredRun, measured
from testbed.errors import TraceError


def read_guidellm(text: str, file: Path, given: list[str]) -> list[MeasuredRun]:
    report = mapping(json_value(text, str(file)), str(file), "report")
    benchmarks = listed(report.get("benchmarks"), str(file), "benchmarks")
    if not benchmarks:
        raise TraceError(f"{file}: field 'benchmarks' is empty; expected at least one")
    return [
        _one(value, f"{file}: benchmark {i + 1}", f"{file.stem}-{i + 1}", file) for i, value in enumerate(benchmarks)
    ]


def _one(value: Any, place: str, name: str, file: Path) -> MeasuredRun:
    benchmark = mapping(value, place, "benchmark")
    requests = mapping(required(benchmark, "requests", place, "the requests of the benchmark"), place, "requests")
    successful = listed(requests.get("successful"), place, "requests.successful")
    num_failed = sum(
        len(listed(requests[kind], place, f"requests.{kind}"))
        for kind in ("errored", "incomplete")
        if requests.get(kind) is not None
    )
    totals = benchmark.get("run_stats", {}) if isinstance(benchmark.get("run_stats"), dict) else {}
    made = totals.get("requests_made")
    total = made.get("successful") if isinstance(made, dict) else None
    if isinstance(total, int) and total > len(successful):
        raise TraceError(
            f"{place}: field 'requests.successful' holds {len(successful)} of {total} requests; run GuideLLM without "
            "sampling of requests, as all of them are the load"
        )
    rows = [_row(mapping(item, place, "request"), f"{place}: request {i + 1}", i) for i, item in enumerate(successful)]
    notes = ["measured at the client of a server: its time is in TTFT"]
    return measured(name, "GuideLLM", rows, file, (), num_failed, notes)


def _row(values: Mapping[str, Any], place: str, i: int) -> MeasuredRequest:
    field = "request_start_time" if values.get("request_start_time") is not None else "start_time"
    sent_s = instant_s(required(values, field, place, "when it was sent, s"), place, field)
    if values.get("time_to_first_token_ms") is None:
        raise TraceError(
            f"{place}: field 'time_to_first_token_ms' is absent; expected a benchmark of streamed requests"
        )
    latency = values.get("request_latency")
    if latency is None:
        end_s = instant_s(required(values, "end_time", place, "when it ended, s"), place, "end_time")
        latency = end_s - sent_s
    tpot = values.get("inter_token_latency_ms")
    return MeasuredRequest(
        request_id(values, "request_id", place, i), sent_s, count(values, "prompt_tokens", place),
        count(values, "output_tokens", place),
        duration_s(values["time_to_first_token_ms"], place, "time_to_first_token_ms", 1e-3),
        duration_s(latency, place, "request_latency"),
        None if tpot is None else duration_s(tpot, place, "inter_token_latency_ms", 1e-3), None, place,
    )  # fmt: skip
