"""Results of `vllm bench serve --save-result --save-detailed` (and --append-result: one a line).

Lists of one entry a request: input_lens, output_lens, ttfts (s), itls (lists of s), start_times (s, when it was sent),
errors (texts, empty: none), latencies (s, newer versions; else TTFT and all gaps together). A request that failed has
no TTFT. A gap is between two chunks of the stream, which may hold several tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.configuration.names import choice
from experiments.fidelity.fields import duration_s, instant_s, json_value, listed, mapping
from experiments.fidelity.measured import MeasuredRequest, MeasuredRun, measured
from testbed.errors import TraceError
from testbed.traces.readers.fields import token_count

MARKS = ("ttfts", "itls", "input_lens")  # any of them, or what the aggregates are called
AGGREGATES = ("mean_ttft_ms", "request_throughput")


def read_vllm_bench(text: str, file: Path, given: list[str]) -> list[MeasuredRun]:
    found = list(_documents(text, file))
    return [_one(values, place, file, f"{file.stem}-{i + 1}" if len(found) > 1 else file.stem, given)
            for i, (values, place) in enumerate(found)]  # fmt: skip


def _documents(text: str, file: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Each result and its place: the file as a whole, or its lines."""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if len(lines) > 1 and lines[0][1].rstrip().endswith("}"):
        for number, line in lines:
            place = f"{file}:{number}"
            yield mapping(json_value(line, place), place, "result"), place
    else:
        yield mapping(json_value(text, str(file)), str(file), "result"), str(file)


def _one(values: Mapping[str, Any], place: str, file: Path, name: str, given: list[str]) -> MeasuredRun:
    columns = _columns(values, place)
    failed = [bool(error) for error in columns["errors"]]
    rows = [_row(columns, i, place) for i, has_failed in enumerate(failed) if not has_failed]
    said = values.get("model_id")
    notes = ["measured at the client of a server: its time is in TTFT"]
    if values.get("max_concurrency") is not None:
        notes.append(
            f"sent by at most {values['max_concurrency']} at once; the simulation sends at the measured instants"
        )
    settings = choice("model", str(said) if said else None, place, given)
    return measured(name, "vllm bench serve", rows, file, settings, sum(failed), notes)


def _columns(values: Mapping[str, Any], place: str) -> dict[str, list[Any]]:
    """The lists, all of one length."""
    if "ttfts" not in values or "input_lens" not in values:
        raise TraceError(f"{place}: no values of single requests; run vllm bench serve with --save-detailed")
    if "start_times" not in values:
        raise TraceError(
            f"{place}: field 'start_times' is absent, so the arrivals cannot be rebuilt; vLLM records it since January "
            "2026 (0.15): measure again with --save-result --save-detailed of a newer version"
        )
    names = ("input_lens", "output_lens", "ttfts", "itls", "start_times")
    columns = {field: listed(values.get(field), place, field) for field in names}
    num = len(columns["input_lens"])
    for field in ("errors", "latencies"):
        columns[field] = [None] * num if values.get(field) is None else listed(values[field], place, field)
    for field, column in columns.items():
        if len(column) != num:
            raise TraceError(f"{place}: field {field!r} has {len(column)} entries; expected {num}, as input_lens has")
    return columns


def _row(columns: dict[str, list[Any]], i: int, place: str) -> MeasuredRequest:
    where = f"{place}: request {i}"
    gaps = tuple(duration_s(gap, where, "itls") for gap in listed(columns["itls"][i], where, "itls"))
    ttft_s = duration_s(columns["ttfts"][i], where, "ttfts")
    latency = columns["latencies"][i]
    return MeasuredRequest(
        str(i), instant_s(columns["start_times"][i], where, "start_times"),
        token_count(columns["input_lens"][i], where, "input_lens"),
        token_count(columns["output_lens"][i], where, "output_lens"), ttft_s,
        ttft_s + sum(gaps) if latency is None else duration_s(latency, where, "latencies"), None, gaps, where,
    )  # fmt: skip
