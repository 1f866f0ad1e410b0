"""Reads reports of GuideLLM (`benchmarks.json`); each of its benchmarks is a load.

It reads benchmarks[].requests.successful (errored and incomplete requests are only counted), and of each request
request_start_time (older: start_time) in s, request_latency in s (older: from start_time to end_time), prompt_tokens,
output_tokens, time_to_first_token_ms and inter_token_latency_ms (from the first token to the last over tokens - 1; the
latency ends with the stream, which may be later).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.fidelity.fields import Fields, duration_s, json_value
from experiments.fidelity.measured import AT_CLIENT, MeasuredRequest, MeasuredRun, measured
from testbed.errors import TraceError


def read_guidellm(text: str, file: Path) -> list[MeasuredRun]:
    benchmarks = Fields.of(json_value(text, str(file)), str(file), "report").listed("benchmarks")
    if not benchmarks:
        raise TraceError(f"{file}: field 'benchmarks' is empty; expected at least one")
    return [
        _one(Fields.of(value, f"{file}: benchmark {i + 1}", "benchmark"), f"{file.stem}-{i + 1}", file)
        for i, value in enumerate(benchmarks)
    ]


def _one(benchmark: Fields, name: str, file: Path) -> MeasuredRun:
    place, requests = benchmark.place, benchmark.within("requests")
    successful = requests.listed("successful")
    others = [kind for kind in ("errored", "incomplete") if requests.get(kind) is not None]
    num_failed = sum(len(requests.listed(kind)) for kind in others)
    totals: Any = benchmark.get("run_stats")
    for key in ("requests_made", "successful"):
        totals = totals.get(key) if isinstance(totals, dict) else None
    if isinstance(totals, int) and totals > len(successful):
        raise TraceError(
            f"{place}: field 'requests.successful' holds {len(successful)} of {totals} requests; run GuideLLM without "
            "sampling of requests, as all of them are the load"
        )
    rows = [_row(Fields.of(item, f"{place}: request {i + 1}", "request"), i) for i, item in enumerate(successful)]
    return measured(name, "GuideLLM", file, [*rows, *[None] * num_failed], notes=[AT_CLIENT])


def _row(request: Fields, i: int) -> MeasuredRequest:
    sent_s = request.instant_s("start_time" if request.get("request_start_time") is None else "request_start_time")
    if request.get("time_to_first_token_ms") is None:
        raise TraceError(
            f"{request.place}: field 'time_to_first_token_ms' is absent; expected a benchmark of streamed requests"
        )
    latency = request.get("request_latency")
    if latency is None:
        latency = request.instant_s("end_time") - sent_s
    has_tpot = request.get("inter_token_latency_ms") is not None
    return MeasuredRequest(
        request.request_id(otherwise=i), sent_s, request.count("prompt_tokens"), request.count("output_tokens"),
        request.duration_s("time_to_first_token_ms", 1e-3), duration_s(latency, request.place, "request_latency"),
        request.duration_s("inter_token_latency_ms", 1e-3) if has_tpot else None, None, request.place,
        ends_with_token=False,
    )  # fmt: skip
