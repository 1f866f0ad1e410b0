"""Reads records of AIPerf (`profile_export.jsonl`), one JSON object per request: metadata, metrics with units, error.

Of the metadata it reads request_start_ns, x_request_id, benchmark_phase (warm-up is left out) and was_cancelled; of the
metrics input_sequence_length, output_sequence_length, time_to_first_token, request_latency, inter_token_latency (mean
of the request) and inter_chunk_latency (a list).
"""

from __future__ import annotations

from pathlib import Path

from experiments.fidelity.fields import Fields, json_lines
from experiments.fidelity.measured import AT_CLIENT, MeasuredRequest, MeasuredRun, measured
from testbed.errors import TraceError
from testbed.traces.readers.fields import nanoseconds, refuse
from testbed.wording import count

_COUNTED = "profiling"  # the phase after the warm-up
UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


def read_aiperf(text: str, file: Path) -> list[MeasuredRun]:
    records = list(json_lines(text, file))
    counted = [one for one in records if one.within("metadata").values.get("benchmark_phase", _COUNTED) == _COUNTED]
    notes = [AT_CLIENT]
    if num_warmup := len(records) - len(counted):
        notes.append(f"{count(num_warmup, 'request')} of the warm-up left out")
    return [measured(file.stem, "AIPerf", file, map(_row, counted), notes=notes)]


def _row(record: Fields) -> MeasuredRequest | None:
    about, place = record.within("metadata"), record.place
    if record.get("error") is not None or about.get("was_cancelled"):
        return None
    metrics = record.within("metrics")
    start_ns = nanoseconds(about.required("request_start_ns", "an instant in ns"), place, "request_start_ns")
    if "time_to_first_token" not in metrics.values:
        raise TraceError(f"{place}: metric 'time_to_first_token' is absent; measure with aiperf profile --streaming")
    gaps = None
    if metrics.get("inter_chunk_latency") is not None:
        chunks = metrics.within("inter_chunk_latency")
        gaps = chunks.durations_s("value", _unit_s(chunks))
    has_tpot = "inter_token_latency" in metrics.values
    return MeasuredRequest(
        about.request_id("x_request_id"), start_ns / 1e9, metrics.within("input_sequence_length").count("value"),
        metrics.within("output_sequence_length").count("value"), _latency_s(metrics, "time_to_first_token"),
        _latency_s(metrics, "request_latency"),
        _latency_s(metrics, "inter_token_latency") if has_tpot else None, gaps, place,
    )  # fmt: skip


def _latency_s(metrics: Fields, name: str) -> float:
    metric = metrics.within(name)
    return metric.duration_s("value", _unit_s(metric))


def _unit_s(metric: Fields) -> float:
    unit = metric.get("unit")
    if not isinstance(unit, str) or unit not in UNITS_S:
        raise refuse(metric.place, f"{metric.prefix}unit", unit, f"one of {', '.join(UNITS_S)}")
    return UNITS_S[unit]
