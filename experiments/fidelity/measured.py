"""Measured runs of any tool: requests with times on the tool's clock, and their conversion to a trace and a run folder.

A reader (one module for each format) returns `MeasuredRun`. `trace_of` makes the trace that the simulator runs, and
`write_folder` the run folder that `analysis` compares. This module does not know the formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from analysis.load import Run, load_run
from experiments.configuration.saved import MEASURED
from experiments.runs.run_folder import as_yaml, write_json
from experiments.wiring.traces import describe_trace
from testbed.errors import TraceError
from testbed.records.latencies import e2e_s, tpot_s, ttft_s
from testbed.records.parquet import schema_of
from testbed.records.schema import REQUEST_COLUMNS, STEP_COLUMNS
from testbed.traces.arrange import arrange
from testbed.traces.readers.fields import refuse
from testbed.traces.schema import MAX_NS, Span, Trace, TraceRequest
from testbed.traces.synthesis import content_key

AT_CLIENT = "measured at the client of a server: its time is in TTFT"  # a note of readers
_ROUNDING_S = 2e-6  # clients round to microseconds, so equal instants of first and last token may differ by this
_NEAR_S, _NEAR_SHARE = 1e-3, 0.05  # of E2E - TTFT, by which TPOT x (tokens - 1) may differ from it: both are rounded
_NEAR_TPOT_S = 5.1e-4  # as TPOT may be given in whole milliseconds


class MeasuredRequest(NamedTuple):
    """One completed request. ttft_s: None: it was not streamed. gaps_s: between the chunks that the client received;
    None: not recorded. row: of its trace, if the file says more of it than lengths and instant."""

    request_id: str
    sent_s: float  # on the file's clock
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: float | None
    e2e_s: float
    tpot_s: float | None  # None: (E2E - TTFT) / (tokens - 1)
    gaps_s: tuple[float, ...] | None
    place: str
    ends_with_token: bool = True  # False: the request ended with its stream, at the last token or later
    row: TraceRequest | None = None

    def checked(self) -> MeasuredRequest:
        """Raises TraceError if the first token comes after the end, or if TPOT contradicts TTFT and E2E."""
        if self.ttft_s is None:
            return self
        if self.ttft_s > self.e2e_s + _ROUNDING_S:
            raise TraceError(
                f"{self.place}: TTFT is {self.ttft_s:g} s; expected at most the request's end-to-end latency, "
                f"{self.e2e_s:g} s: the clocks disagree, leave the row out"
            )
        num_gaps, streamed_s = self.num_output_tokens - 1, self.e2e_s - self.ttft_s
        if self.tpot_s is None or not num_gaps:
            return self
        late_s = self.tpot_s * num_gaps - streamed_s  # how long after the end the last token would have come
        most_s = _NEAR_S + max(_NEAR_SHARE * streamed_s, _NEAR_TPOT_S * num_gaps)
        if abs(late_s) > most_s and (late_s > 0 or self.ends_with_token):
            raise TraceError(
                f"{self.place}: TPOT is {self.tpot_s:g} s; expected (E2E - TTFT) / (tokens - 1), "
                f"{streamed_s / num_gaps:g} s, to within rounding: correct one of the three, or leave TPOT out"
            )
        return self


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One measured run of one load. model: its name in the file, if that has one."""

    name: str
    source: str  # the tool, in words
    place: str
    requests: tuple[MeasuredRequest, ...]  # by sent_s
    model: str | None
    notes: tuple[str, ...]


def measured(
    name: str, source: str, file: Path, requests: Iterable[MeasuredRequest | None], model: str | None = None,
    notes: Sequence[str] = (),
) -> MeasuredRun:  # fmt: skip
    """Makes the result of every reader. requests: None for one that failed. Raises TraceError without any other, for an
    id that occurs twice, or for arrivals too far apart."""
    every = list(requests)
    rows = sorted((row.checked() for row in every if row is not None), key=lambda row: row.sent_s)
    num_failed = len(every) - len(rows)
    if not rows:
        why = f": all {num_failed} failed" if num_failed else ""
        raise TraceError(f"{file}: no request that ended well{why}; expected at least one")
    seen: dict[str, str] = {}
    for row in rows:
        if row.request_id in seen:
            raise refuse(
                row.place, "request_id", row.request_id, f"an id not used before (first at {seen[row.request_id]})"
            )
        seen[row.request_id] = row.place
    if (rows[-1].sent_s - rows[0].sent_s) * 1e9 > MAX_NS:
        raise refuse(
            rows[-1].place, "arrival", rows[-1].sent_s, f"an instant near the first one's, {rows[0].sent_s:g} s"
        )
    said = list(notes)
    if num_failed:
        said.append(f"{num_failed} of {len(every)} requests failed in the measured run and were left out")
    if num_whole := sum(row.ttft_s is None for row in rows):
        said.append(f"{num_whole} of {len(rows)} requests have no TTFT: they are load, and latencies are the others'")
    if any(row.gaps_s is None for row in rows):
        rows = [row._replace(gaps_s=None) for row in rows]
    return MeasuredRun(name, source, str(file), tuple(rows), model, tuple(said))


def arrivals_ns(run: MeasuredRun) -> list[int]:
    """The arrival of each request after the first one, ns."""
    return [round((row.sent_s - run.requests[0].sent_s) * 1e9) for row in run.requests]


def trace_of(run: MeasuredRun) -> Trace:
    """The requests as a trace, with the measured token counts and arrivals: as the file says, or unique synthetic
    prompts."""
    rows = [_trace_row(*one) for one in zip(run.requests, arrivals_ns(run), strict=True)]
    return arrange(run.name, rows, run.notes)


def _trace_row(row: MeasuredRequest, arrival_ns: int) -> TraceRequest:
    if row.row is not None:
        return row.row._replace(arrival_ns=arrival_ns)
    prompt = Span(content_key("measured", row.request_id), 0, row.num_prompt_tokens)
    output = Span(content_key("measured", row.request_id, "output"), 0, row.num_output_tokens)
    return TraceRequest(row.request_id, arrival_ns, (prompt,), output, place=row.place)


def write_measured(run: MeasuredRun, trace: Trace, config: dict[str, Any], folder: Path) -> Run:
    """Writes the measured run as a run folder, without steps. trace: its own, or that of the run that it repeats.
    config: that of its simulation."""
    records = [_record(row, arrival_ns) for row, arrival_ns in zip(run.requests, arrivals_ns(run), strict=True)]
    manifest = {
        "status": "complete", "backend": "real", "measured_with": run.source, "num_replicas": 1,
        "model": config["model"].get("name"), "scheduler": config["scheduler"].get("name"),
        "device": config["device"].get("name"), "num_gpu_blocks": config["cache"].get("num_gpu_blocks"),
        "num_unsent": 0, "replay": None, "measured_trace": {"name": trace.name},
    }  # fmt: skip
    requests = pa.Table.from_pylist(records, schema_of(REQUEST_COLUMNS))
    return write_folder(folder, requests, schema_of(STEP_COLUMNS).empty_table(), config, manifest, trace)


def write_folder(
    folder: Path, requests: pa.Table, steps: pa.Table, config: dict[str, Any], manifest: dict[str, Any], trace: Trace
) -> Run:
    """Writes a run folder, marked as a measured run. trace: replaces that of the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(requests, folder / "requests.parquet")
    pq.write_table(steps, folder / "steps.parquet")
    (folder / "config.yaml").write_text(as_yaml(config))
    write_json(folder / "manifest.json", manifest | {"trace": describe_trace(trace)})
    (folder / "done").write_text(MEASURED)
    return load_run(folder)


def _record(row: MeasuredRequest, arrival_ns: int) -> dict[str, Any]:
    first_ns = None if row.ttft_s is None else arrival_ns + round(row.ttft_s * 1e9)
    finish_ns = max(first_ns or 0, arrival_ns + round(row.e2e_s * 1e9))
    num, own = row.num_output_tokens, _trace_row(row, arrival_ns)
    gaps_ns = None if row.gaps_s is None else [round(gap * 1e9) for gap in row.gaps_s]
    return {
        "request_id": row.request_id, "session_id": own.session_id, "turn": own.turn, "tenant": own.tenant,
        "priority": own.priority, "replica": 0,
        "num_prompt_tokens": row.num_prompt_tokens, "num_output_tokens": num, "num_token_steps": num,
        "num_cached_tokens": 0, "num_preemptions": 0, "num_recomputed_tokens": 0, "finish_reason": "length",
        "arrival_ns": arrival_ns, "queued_ns": arrival_ns, "first_token_ns": first_ns, "finish_ns": finish_ns,
        "token_ns": None if gaps_ns is None else list(accumulate(gaps_ns, initial=first_ns)),
        "ttft_s": None if first_ns is None else ttft_s(arrival_ns, first_ns),
        "tpot_s": _tpot_s(row, first_ns, finish_ns),
        "e2e_s": e2e_s(arrival_ns, finish_ns),
    }  # fmt: skip


def _tpot_s(row: MeasuredRequest, first_ns: int | None, finish_ns: int) -> float | None:
    if row.num_output_tokens < 2 or first_ns is None:
        return None
    return tpot_s(first_ns, finish_ns, row.num_output_tokens) if row.tpot_s is None else row.tpot_s
