"""Writes the records of one run, or of two, as a timeline for Perfetto: `testbed timeline`, docs/timeline.md.

Owns what is drawn: one process for each run and replica. It has the steps and where the time of each went, preemptions
and swaps, counters, and each request from its arrival to its end. Instants stay on the run's own clock, whose 0 is the
start of the run, so two runs start together. Rows are read in batches: memory does not grow with the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from analysis.load import Run, load_run, same_trace
from analysis.measures.occupancy import TIME_PARTS, Presence, run_end_ns
from analysis.measures.replicas import split
from analysis.progress import progress
from analysis.reading.request_columns import Requests
from analysis.reading.rows import FileRows, whole
from analysis.timelines.chrome_trace import ChromeTrace, Track
from analysis.timelines.device_trace import draw_profile, offset_ns, read_profile
from testbed.errors import ConfigError, RunFolderError
from testbed.foreign_text import parsed, shortened
from testbed.output import written
from testbed.records.schema import STEP_TRACE_FILE

STEPS, REQUESTS, DECISIONS = "steps.parquet", "requests.parquet", "decisions.jsonl"
STEP_ARGS = (
    "step", "num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens", "decode_context_tokens",
    "num_emitted", "num_running", "num_waiting", "num_swapped", "free_gpu_blocks", "free_cpu_blocks", "num_admitted",
    "num_cached_tokens", "blocked_by", *(f"{name}_ns" for name in TIME_PARTS),
)  # fmt: skip
POOLS = {"KV blocks GPU": "free_gpu_blocks", "KV blocks CPU": "free_cpu_blocks"}
SEQUENCES = {"running": "num_running", "waiting": "num_waiting", "swapped": "num_swapped"}
TOKENS = {"decode": "num_decode_tokens", "prefill": "num_prefill_tokens"}
EVENTS = {  # name -> field of decisions.jsonl; steps.parquet has the counts
    name: name.replace(" ", "_") for name in ("preempted", "swapped out", "swapped in", "ignored")
}
PHASES = {  # each lasts from its instant to that of the next
    "arrival": "arrival_ns",
    "queued": "queued_ns",
    "prefill": "first_scheduled_ns",
    "decode": "first_token_ns",
}
REQUEST_ARGS = (
    "request_id", "session_id", "turn", "tenant", "priority", "num_prompt_tokens", "num_output_tokens",
    "num_cached_tokens", "num_preemptions", "num_recomputed_tokens", "finish_message", "ttft_s", "tpot_s", "e2e_s",
)  # fmt: skip
LATEST_S = 9e9  # a little less than 2**63 ns

Row = dict[str, Any]


@dataclass(frozen=True)
class Window:
    """The part that is drawn: all that overlaps [from_s, to_s), or each engine from the first to the last of `steps`.

    Slices are not cut. Raises ConfigError for an empty window.
    """

    from_s: float = 0.0
    to_s: float = LATEST_S
    steps: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.from_s < self.to_s <= LATEST_S:
            until = "the end" if self.to_s == LATEST_S else f"{self.to_s:g} s"
            raise ConfigError(f"from {self.from_s:g} s to {until} is no window; give 0 <= --from < --to")
        if self.steps is not None and not 0 <= self.steps[0] <= self.steps[1]:
            first, last = self.steps
            raise ConfigError(f"steps {first}:{last} are no window; give --steps first:last, from 0 on")

    def __str__(self) -> str:
        until = "" if self.to_s == LATEST_S else f" to {self.to_s:g} s"
        return f"from {self.from_s:g} s{until}"


@dataclass
class Engine:
    """A replica of a run, which is drawn within [low_ns, high_ns)."""

    pid: int
    presence: Presence  # of its requests
    num_blocks: dict[str, int | None]  # of each pool
    marks_events: bool  # draw events from the steps' counts; else from decisions.jsonl, which has request ids
    low_ns: int
    high_ns: int
    _end_ns: int = 0  # of the step before
    _is_empty: bool = False  # whether no request was left at its end
    _shown: dict[str, dict[str, int]] = field(default_factory=dict)  # current values of the counters

    @property
    def steps(self) -> Track:
        return Track(self.pid, 1)

    @property
    def events(self) -> Track:
        return Track(self.pid, 2)

    def draw(self, trace: ChromeTrace, row: Row, is_empty: bool) -> None:
        """Draws a step. is_empty: no request is left at its end."""
        start_ns, end_ns = row["start_ns"], row["end_ns"]
        if end_ns <= self.low_ns:
            return
        self.rest(trace, start_ns)
        if start_ns >= self.high_ns:
            self._shown = {}  # no counters from here on
            return
        args = {name: row[name] for name in STEP_ARGS if row[name] is not None}
        if row["digest"] is not None:
            args["digest"] = f"{row['digest']:016x}"
        trace.slice(self.steps, kind_of(row), start_ns, end_ns, args)
        self._draw_parts(trace, row)
        self._count(trace, start_ns, row)
        if self.marks_events:
            for name, told in EVENTS.items():
                if num := row[f"num_{told}"]:
                    trace.instant(self.events, name, start_ns, {"step": row["step"], "num_requests": num})
        self._end_ns, self._is_empty = end_ns, is_empty

    def _draw_parts(self, trace: ChromeTrace, row: Row) -> None:
        """Draws where the time went. Only the lengths of the parts are recorded, so they are drawn one after the other
        from the step's start. If their sum is longer than the step, they end with it, and host time spent during the
        step before is cut off."""
        lengths_ns = {name: row[f"{name}_ns"] or 0 for name in TIME_PARTS}
        at_ns = min(row["start_ns"], row["end_ns"] - sum(lengths_ns.values()))
        for name, length_ns in lengths_ns.items():
            from_ns, at_ns = max(at_ns, row["start_ns"]), at_ns + length_ns
            if at_ns > from_ns:
                trace.slice(self.steps, name, from_ns, at_ns)

    def rest(self, trace: ChromeTrace, until_ns: int) -> None:
        """Sets the counters to idle from the end of the step before, if that is earlier than `until_ns`."""
        if not self._shown or until_ns <= self._end_ns:
            return
        row: Row = dict.fromkeys(TOKENS.values(), 0)
        if self._is_empty:
            row |= dict.fromkeys(SEQUENCES.values(), 0) | {POOLS[name]: num for name, num in self.num_blocks.items()}
        self._count(trace, self._end_ns, row)

    def _count(self, trace: ChromeTrace, at_ns: int, row: Row) -> None:
        """Draws the counters that have changed; unknown values are left out."""
        counters = {
            name: {of: row[column] for of, column in columns.items() if row.get(column) is not None}
            for name, columns in (("sequences", SEQUENCES), ("tokens per step", TOKENS))
        }
        for name, num in self.num_blocks.items():
            if num and (free := row.get(POOLS[name])) is not None:
                counters[name] = {"used": num - free, "free": free}
        for name, values in counters.items():
            if values and self._shown.get(name) != values:
                trace.counter(self.pid, name, at_ns, values)
                self._shown[name] = values


def kind_of(row: Row) -> str:
    """The kind of a step: decode, prefill, mixed, or `moves` if it computes nothing (only swaps, copies, preempts)."""
    if row["num_decodes"]:
        return "mixed" if row["num_prefills"] else "decode"
    return "prefill" if row["num_prefills"] else "moves"


def write_timeline(
    folders: Sequence[Path], out: Path | None = None, window: Window | None = None, *, overwrite: bool = False
) -> str:
    """Writes the timeline of one run, or of two of the same trace, and returns a line that describes the file.

    out: the file (default: timeline.json in the first run's folder), compressed if it ends in .gz. Raises
    RunFolderError for a folder that is no run, for different traces, if the file exists, or if nothing is to be drawn.
    """
    window = window or Window()
    runs = [load_run(folder) for folder in folders]
    if len(runs) > 1:
        same_trace(runs)
    file = out or runs[0].path / "timeline.json"
    if file.exists() and not file.is_file():
        raise RunFolderError(f"{file} is no file; choose another --out")
    if file.exists() and not overwrite:
        raise RunFolderError(f"{file} exists; choose another --out or pass --overwrite")
    with written(file) as text:
        trace = ChromeTrace(text, {f"run {number}": _described(run) for number, run in enumerate(runs, 1)})
        num_processes = 0
        for run in runs:
            num_processes += _draw(trace, run, window, num_processes + 1)
        trace.close()
    notes = [f"; {run.path} is partial" for run in runs if not run.is_complete]
    bare = [run for run in runs if run.manifest.get("num_steps") and not FileRows(run.path / STEPS).num_rows]
    notes += [f"; {run.path} has requests only: run again with record.steps=true for its steps" for run in bare]
    size = f"{trace.num_events:,} events, {file.stat().st_size / 1e6:,.1f} MB"
    return f"{file}: {size}{''.join(notes)}; open it at https://ui.perfetto.dev or in chrome://tracing"


def _described(run: Run) -> dict[str, Any]:
    names = ("backend", "scheduler", "model", "device", "status", "created", "code_version", "seed", "trace", "digest")
    return {"folder": str(run.path)} | {name: run.manifest.get(name) for name in names}


def _draw(trace: ChromeTrace, run: Run, window: Window, pid: int) -> int:
    """Draws a run; returns the number of processes, whose pids start at `pid`. RunFolderError if it draws nothing."""
    requests, steps = FileRows(run.path / REQUESTS), FileRows(run.path / STEPS)
    end_ns = run_end_ns(requests, steps)
    engines = _engines(run, requests, steps, window, pid)
    _name(trace, run, engines)
    num_before = trace.num_events
    with progress("timeline", "row", steps.num_rows + requests.num_rows) as bar:
        for rows in _rows(run.path / STEPS, steps, engines):
            for row, empty in zip(rows, _is_empty(rows, engines), strict=True):
                engines[row["replica"]].draw(trace, row, empty)
            bar.update(len(rows))
        for engine in engines.values():
            engine.rest(trace, round(LATEST_S * 1e9))
        for rows in _rows(run.path / REQUESTS, requests, engines):
            for row in rows:
                _draw_request(trace, engines[row["replica"]], row, end_ns)
            bar.update(len(rows))
    _draw_decisions(trace, run.path / DECISIONS, engines)
    num_processes = len(engines) + _draw_profile(trace, run, steps, engines, pid + len(engines))
    if trace.num_events == num_before:
        if not steps.num_rows + requests.num_rows:
            raise RunFolderError(f"{run.path}: the run has neither steps nor requests, so there is nothing to draw")
        raise RunFolderError(f"{run.path}: nothing happens {window}; the run ends at {end_ns / 1e9:g} s")
    return num_processes


def _engines(run: Run, requests: FileRows, steps: FileRows, window: Window, pid: int) -> dict[int, Engine]:
    """The engines of the run by replica number."""
    seen = Requests.of(requests).where(lambda piece: piece.is_known("queued_ns"))
    num_blocks = dict(zip(POOLS, (run.manifest.get(f"num_{pool}_blocks") for pool in ("gpu", "cpu")), strict=True))
    marks_events = not (run.path / DECISIONS).exists()
    low_ns, high_ns = round(window.from_s * 1e9), round(window.to_s * 1e9)
    engines = {
        number: Engine(pid + number, Presence(part), num_blocks, marks_events, low_ns, high_ns)
        for number, part in enumerate(split(seen, run.manifest))
    }
    if window.steps is not None:
        _cut_by_steps(run, steps, engines, *window.steps)
    return engines


def _draw_profile(trace: ChromeTrace, run: Run, steps: FileRows, engines: dict[int, Engine], pid: int) -> int:
    """Draws the profile of the run's steps, if there is one. Returns the number of processes drawn."""
    file = run.path / STEP_TRACE_FILE
    if not file.exists() or len(engines) != 1:
        return 0
    launched_ns: dict[int, int] = {}
    for arrays in steps.batches(["step", "start_ns", "schedule_ns"]):
        step, start_ns, schedule_ns = map(whole, arrays)
        launched_ns |= dict(zip(step.tolist(), (start_ns + schedule_ns).tolist(), strict=True))
    seen = read_profile(file)
    shift_ns = offset_ns(seen, launched_ns)
    if shift_ns is None:
        return 0
    (engine,) = engines.values()
    draw_profile(trace, pid, f"profiled steps, {run.path}", seen, shift_ns, (engine.low_ns, engine.high_ns))
    return 1


def _cut_by_steps(run: Run, steps: FileRows, engines: dict[int, Engine], first: int, last: int) -> None:
    """Limits each engine to steps `first` to `last`; an engine without any of them is not drawn."""
    for engine in engines.values():
        engine.low_ns, engine.high_ns = engine.high_ns, 0
    num_steps = 0
    for arrays in steps.batches(["replica", "step", "start_ns", "end_ns"]):
        replica, step, start_ns, end_ns = map(whole, arrays)
        num_steps = max(num_steps, int(step.max(initial=-1)) + 1)
        for number, engine in engines.items():
            rows = (step >= first) & (step <= last) & ((replica == number) | (len(engines) == 1))
            engine.low_ns = min(engine.low_ns, int(start_ns[rows].min(initial=engine.low_ns)))
            engine.high_ns = max(engine.high_ns, int(end_ns[rows].max(initial=0)))
    if not any(engine.high_ns for engine in engines.values()):
        has = f"steps 0 to {num_steps - 1}" if num_steps else "no steps in its records"
        raise RunFolderError(f"{run.path}: no step is in {first}:{last}; the run has {has}")


def _name(trace: ChromeTrace, run: Run, engines: dict[int, Engine]) -> None:
    for number, engine in engines.items():
        what = f"{run.manifest.get('backend')} {run.manifest.get('scheduler')}, {run.path}"
        trace.name_process(engine.pid, what + (f", replica {number}" if len(engines) > 1 else ""))
        trace.name_track(engine.steps, "steps")
        trace.name_track(engine.events, "preemptions and swaps")


def _rows(file: Path, rows: FileRows, engines: dict[int, Engine]) -> Iterator[list[Row]]:
    """Batches of rows. Raises RunFolderError for a row of an unknown replica, or without its instants."""
    needed = ("start_ns", "end_ns") if file.name == STEPS else ("arrival_ns",)
    names = sorted(rows.names - {"token_ns"})
    for arrays in rows.batches(names):
        batch = pa.Table.from_arrays(arrays, names).to_pylist()
        for row in batch:
            row["replica"] = (row["replica"] or 0) if len(engines) > 1 else 0
            if row["replica"] not in engines:
                knows = f"manifest.json knows {len(engines)} of them"
                raise RunFolderError(f"{file}: a row of replica {row['replica']}; {knows}")
            if any(row[name] is None for name in needed):
                raise RunFolderError(f"{file}: a row lacks its {' or '.join(needed)}; run it again")
        yield batch


def _is_empty(rows: list[Row], engines: dict[int, Engine]) -> list[bool]:
    """For each step whether its engine has no request at the step's end."""
    replica = np.array([row["replica"] for row in rows], dtype=np.int64)
    end_ns = np.array([row["end_ns"] for row in rows], dtype=np.int64)
    is_empty = np.zeros(len(rows), dtype=np.bool_)
    for number, engine in engines.items():
        own = replica == number
        if own.any():
            is_empty[own] = ~engine.presence.at(end_ns[own])
    return is_empty.tolist()


def _draw_request(trace: ChromeTrace, engine: Engine, row: Row, run_end_ns: int) -> None:
    """Draws a request; one that has not ended lasts until the end of the run."""
    begins = [(name, row[column]) for name, column in PHASES.items() if row[column] is not None]
    last_ns = max(at_ns for _, at_ns in begins)
    end_ns = max(last_ns, run_end_ns if row["finish_ns"] is None else row["finish_ns"])
    start_ns = begins[0][1]
    if start_ns >= engine.high_ns or end_ns < engine.low_ns:
        return
    args = {name: row[name] for name in REQUEST_ARGS if row[name] is not None}
    args["finish_reason"] = row["finish_reason"] or "unfinished"
    pid, key = engine.pid, row["request_id"]
    trace.begin(pid, key, "request", start_ns, args)
    ends = [at_ns for _, at_ns in begins[1:]] + [end_ns]
    for (name, from_ns), until_ns in zip(begins, ends, strict=True):
        if until_ns > from_ns:
            trace.begin(pid, key, name, from_ns)
            trace.end(pid, key, name, until_ns)
    trace.end(pid, key, "request", end_ns)


def _draw_decisions(trace: ChromeTrace, file: Path, engines: dict[int, Engine]) -> None:
    """Marks each request that was admitted, preempted, swapped or ignored, at the plan's instant, if `file` exists."""
    if not file.exists():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                decided = parsed(json.loads, line)
                engine, at_ns = engines[decided.get("replica", 0)], round(decided["time_s"] * 1e9)
                which = {name: [str(key) for key in decided[told]] for name, told in EVENTS.items()}
                admitted, args = list(decided["cached_tokens"]), {"step": int(decided["step"])}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                reason = shortened(f"{type(error).__name__}: {error}")
                raise RunFolderError(f"{file}:{number}: not a line of decisions ({reason}); remove the file") from None
            if engine.low_ns <= at_ns < engine.high_ns:
                for name, keys in (which | {"admitted": admitted}).items():
                    for key in keys:
                        trace.mark(engine.pid, key, name, at_ns, args)
                        if name in EVENTS:
                            trace.instant(engine.events, name, at_ns, args | {"request_id": key})
