"""Records of AIPerf (`profile_export.jsonl`), one JSON object a request: metadata, metrics with their unit, error.

Read are metadata.request_start_ns, request_end_ns, x_request_id and benchmark_phase (warm-up is left out), and of the
metrics input_sequence_length, output_sequence_length, time_to_first_token, request_latency, inter_token_latency (mean
of the request) and inter_chunk_latency (a list).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.fidelity.fields import duration_s, json_lines, listed, mapping, request_id, required
from experiments.fidelity.measured import MeasuredRequest, MeasuredRun, measured
from testbed.errors import TraceError
from testbed.traces.readers.fields import nanoseconds, refuse, token_count

UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


def read_aiperf(text: str, file: Path, given: list[str]) -> list[MeasuredRun]:
    rows: list[MeasuredRequest] = []
    num_failed = num_warmup = 0
    for values, place in json_lines(text, file):
        about = mapping(required(values, "metadata", place, "a record of AIPerf"), place, "metadata")
        if about.get("benchmark_phase", "profiling") != "profiling":
            num_warmup += 1
        elif values.get("error") is not None or about.get("was_cancelled"):
            num_failed += 1
        else:
            rows.append(_row(about, mapping(values.get("metrics"), place, "metrics"), place))
    notes = ["measured at the client of a server: its time is in TTFT"]
    if num_warmup:
        notes.append(f"{num_warmup} requests of the warm-up were left out")
    return [measured(file.stem, "AIPerf", rows, file, (), num_failed, notes)]


def _row(about: Mapping[str, Any], metrics: Mapping[str, Any], place: str) -> MeasuredRequest:
    start_ns = nanoseconds(required(about, "request_start_ns", place, "an instant in ns"), place, "request_start_ns")
    if "time_to_first_token" not in metrics:
        raise TraceError(f"{place}: metric 'time_to_first_token' is absent; measure with aiperf profile --streaming")
    ttft_s = _latency(metrics, "time_to_first_token", place)
    chunks = metrics.get("inter_chunk_latency")
    gaps = None
    if chunks is not None:
        unit_s = _unit(mapping(chunks, place, "inter_chunk_latency"), "inter_chunk_latency", place)
        values = listed(chunks.get("value"), place, "inter_chunk_latency")
        gaps = tuple(duration_s(value, place, "inter_chunk_latency", unit_s) for value in values)
    has_tpot = "inter_token_latency" in metrics
    return MeasuredRequest(
        request_id(about, "x_request_id", place, place.rsplit(":", 1)[-1]), start_ns / 1e9,
        _tokens(metrics, "input_sequence_length", place), _tokens(metrics, "output_sequence_length", place), ttft_s,
        _latency(metrics, "request_latency", place),
        _latency(metrics, "inter_token_latency", place) if has_tpot else None, gaps, place,
    )  # fmt: skip


def _metric(metrics: Mapping[str, Any], name: str, place: str) -> Mapping[str, Any]:
    return mapping(required(metrics, name, place, "the metric with its unit"), place, name)


def _unit(metric: Mapping[str, Any], name: str, place: str) -> float:
    unit = metric.get("unit")
    if not isinstance(unit, str) or unit not in UNITS_S:
        raise refuse(place, f"{name}.unit", unit, f"one of {', '.join(UNITS_S)}")
    return UNITS_S[unit]


def _latency(metrics: Mapping[str, Any], name: str, place: str) -> float:
    metric = _metric(metrics, name, place)
    return duration_s(metric.get("value"), place, name, _unit(metric, name, place))


def _tokens(metrics: Mapping[str, Any], name: str, place: str) -> int:
    return token_count(_metric(metrics, name, place).get("value"), place, name)
