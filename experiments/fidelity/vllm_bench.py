"""Reads results of `vllm bench serve --save-result --save-detailed` (with --append-result: one on each line).

Lists with one entry for each request: input_lens, output_lens, ttfts (s), itls (lists of s), start_times (s, when it
was sent), errors (texts, empty for none), latencies (s, in newer versions; else the sum of TTFT and all gaps). A failed
request has no TTFT. A gap is between two chunks of the stream, which may have several tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from experiments.fidelity.fields import Fields, json_value
from experiments.fidelity.measured import AT_CLIENT, MeasuredRequest, MeasuredRun, measured
from testbed.errors import TraceError


def read_vllm_bench(text: str, file: Path) -> list[MeasuredRun]:
    found = list(_documents(text, file))
    return [
        _one(result, file, f"{file.stem}-{i + 1}" if len(found) > 1 else file.stem) for i, result in enumerate(found)
    ]


def _documents(text: str, file: Path) -> Iterator[Fields]:
    """Each result: the whole file, or each of its lines."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if len(lines) > 1 and lines[0][1].rstrip().endswith("}"):
        for number, line in lines:
            place = f"{file}:{number}"
            yield Fields.of(json_value(line, place), place, "result")
    else:
        yield Fields.of(json_value(text, str(file)), str(file), "result")


def _one(result: Fields, file: Path, name: str) -> MeasuredRun:
    rows = [None if row.get("errors") else _row(row, i) for i, row in enumerate(_rows(result))]
    model, most = result.get("model_id"), result.get("max_concurrency")
    notes = [AT_CLIENT]
    if most is not None:
        notes.append(f"sent by at most {most} at once; the simulation sends at the measured instants")
    return measured(name, "vllm bench serve", file, rows, str(model) if model else None, notes)


def _rows(result: Fields) -> list[Fields]:
    """The values of each request in the lists. Raises TraceError if lists are missing or of different lengths."""
    values, place = result.values, result.place
    if "ttfts" not in values or "input_lens" not in values:
        raise TraceError(f"{place}: no values of single requests; run vllm bench serve with --save-detailed")
    if "start_times" not in values:
        raise TraceError(
            f"{place}: field 'start_times' is absent, so the arrivals cannot be rebuilt; vLLM records it since January "
            "2026 (0.15): measure again with --save-result --save-detailed of a newer version"
        )
    names = ("input_lens", "output_lens", "ttfts", "itls", "start_times")
    columns = {field: result.listed(field) for field in names}
    num = len(columns["input_lens"])
    for field in ("errors", "latencies"):
        columns[field] = [None] * num if values.get(field) is None else result.listed(field)
    for field, column in columns.items():
        if len(column) != num:
            raise TraceError(f"{place}: field {field!r} has {len(column)} entries; expected {num}, as input_lens has")
    rows = enumerate(zip(*columns.values(), strict=True))
    return [Fields(dict(zip(columns, row, strict=True)), f"{place}: request {i}") for i, row in rows]


def _row(row: Fields, i: int) -> MeasuredRequest:
    gaps, ttft_s = row.durations_s("itls"), row.duration_s("ttfts")
    e2e_s = ttft_s + sum(gaps) if row.get("latencies") is None else row.duration_s("latencies")
    return MeasuredRequest(
        str(i), row.instant_s("start_times"), row.count("input_lens"), row.count("output_lens"), ttft_s, e2e_s, None,
        gaps, row.place,
    )  # fmt: skip
