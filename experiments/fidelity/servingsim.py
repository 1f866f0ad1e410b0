"""Reads requests of LLMServingSim: its own CSV (times in ns), and `requests.jsonl` of its benchmark of a real vLLM.

In the CSV `output` counts prompt and output together, as LLMServingSim's TPOT does; `ITL` is a list of gaps as text. In
requests.jsonl instants are on the engine's monotonic clock, except for arrival_time on the wall clock. The engine
records queued_ts only between two steps. So arrivals are arrival_time, shifted by the smallest difference of the two,
which assumes that the request with the shortest wait did not wait.
"""

from __future__ import annotations

from pathlib import Path

from experiments.fidelity.fields import Fields, csv_rows, duration_s, json_lines
from experiments.fidelity.measured import MeasuredRequest, MeasuredRun, measured
from testbed.errors import TraceError
from testbed.traces.readers.fields import nanoseconds, refuse

BENCH_FIELDS = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")
_OTHER_CLOCK_S = 100_000


def read_servingsim(text: str, file: Path) -> list[MeasuredRun]:
    rows = list(csv_rows(text, file))
    models, instances = {row.get("model") or None for row in rows}, {row.get("instance id") for row in rows}
    if len(models) > 1:
        raise TraceError(f"{file}: requests of {len(models)} models; expected one, split the file")
    notes = [f"{len(instances)} instances served it; see backend.num_replicas"] if len(instances) > 1 else []
    return [measured(file.stem, "LLMServingSim", file, map(_row, rows), next(iter(models), None), notes)]


def _row(row: Fields) -> MeasuredRequest:
    place, num_prompt, num_all = row.place, row.count("input"), row.count("output")
    if num_all <= num_prompt:
        raise refuse(place, "output", num_all, f"more than input ({num_prompt}): it counts prompt and output together")
    gaps = row.durations_s("ITL", 1e-9) if row.get("ITL") else None
    return MeasuredRequest(
        str(row.required("request id", "an id")), nanoseconds(row.get("arrival"), place, "arrival") / 1e9, num_prompt,
        num_all - num_prompt, row.duration_s("TTFT", 1e-9), row.duration_s("latency", 1e-9), None, gaps, place,
    )  # fmt: skip


def read_servingsim_bench(text: str, file: Path) -> list[MeasuredRun]:
    every = list(json_lines(text, file))
    known = [
        row.instant_s("queued_ts") - row.instant_s("arrival_time") for row in every if _ended(row) and _has_wall(row)
    ]
    # the offset from the wall clock to the engine's clock; 0 if both are the same
    offset_s = min(known) if known and abs(min(known)) > _OTHER_CLOCK_S else 0.0
    rows = [_bench_row(row, offset_s) if _ended(row) else None for row in every]
    return [measured(file.stem, "LLMServingSim's benchmark of vLLM", file, rows)]


def _ended(row: Fields) -> bool:
    return bool(row.get("output_toks")) and row.get("first_token_ts") is not None


def _has_wall(row: Fields) -> bool:
    return row.get("arrival_time") is not None


def _bench_row(row: Fields, offset_s: float) -> MeasuredRequest:
    queued_s, first_s, last_s = map(row.instant_s, BENCH_FIELDS[2:])
    arrival_s = row.instant_s("arrival_time") + offset_s if _has_wall(row) else queued_s
    return MeasuredRequest(
        row.request_id(), arrival_s, row.count("input_toks"), row.count("output_toks"),
        duration_s(first_s - arrival_s, row.place, "first_token_ts - arrival"),
        duration_s(last_s - arrival_s, row.place, "last_token_ts - arrival"), None, None, row.place,
    )  # fmt: skip
