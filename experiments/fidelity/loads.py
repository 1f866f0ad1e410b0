"""A load: one measured run, its trace, and the configuration that simulates it; from files and from run folders.

For a run folder the configuration is the run's own, the trace keeps shared prefixes, and the steps are kept. Requests
that did not complete are left out of trace and records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from analysis.load import Run, num_replicas
from analysis.measures.notes import replay_notes
from analysis.reading.rows import read_table
from experiments.configuration.compose import compose_from
from experiments.configuration.config import RunConfig
from experiments.configuration.names import choice, device_of_run
from experiments.configuration.saved import TRACE_FILE, is_copy, read_config
from experiments.configuration.structured import freeze
from experiments.fidelity.measured import MeasuredRun, trace_of, write_folder, write_measured
from experiments.fidelity.simulating import composed, replaced
from experiments.runs.repeat import repeating
from experiments.runs.run_folder import check_priced
from experiments.wiring.traces import build_trace
from testbed.core.sampling import SamplingParams
from testbed.errors import RunFolderError
from testbed.records.schema import COMPLETED
from testbed.traces.arrange import arrange
from testbed.traces.fingerprint import fingerprint
from testbed.traces.readers.own import read_jsonl
from testbed.traces.schema import Part, Span, Trace, TraceRequest
from testbed.traces.synthesis import content_key

_KEPT = {  # settings of the run that are kept if the user chooses another option of the group
    "scheduler": ("max_num_seqs", "max_num_batched_tokens", "max_model_len"), "device": ("tensor_parallel_size",)
}  # fmt: skip
_RECORDED = (
    "record.steps=true", "record.token_times=true", "record.decisions=false", "record.operators=false",
    "record.profile=null",
)  # fmt: skip
_SAME_S = 0.1  # two files are repeats of one load if send times differ by at most this
_TIMING = ("backend", "trace", "record", "cost", "seed")  # groups that do not belong to the policy


@dataclass(frozen=True)
class Load:
    """One measured run. place: the name of its folder in the output. trace: of repeats, the first one's. settings: the
    run's own, before the user's overrides. saved: a run folder's configuration.

    key: equal for runs of one trace on one backend. policy: equal for runs under one policy. Repeats have both equal.
    """

    name: str
    place: str
    source: str
    trace: Trace
    measured: Run
    settings: tuple[str, ...]
    saved: dict[str, Any] | None
    key: str
    policy: str
    notes: tuple[str, ...]

    def config(self, overrides: Sequence[str]) -> RunConfig:
        """The configuration of the simulation. Raises ConfigError with a message of one line."""
        if self.saved is None:
            return composed((*_RECORDED, *self.settings), overrides)
        given = replaced(self.settings, overrides)
        config = compose_from(self.saved, [*given, *_carried(self.saved, given), *_RECORDED])
        check_priced(self.measured.path, config, overrides)
        return config


def _carried(saved: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Limits and ranks of the run that would be lost if an override chooses another option of their group."""
    keys = {item.partition("=")[0] for item in overrides}
    return [
        f"{group}.{name}={saved[group][name]}"
        for group, names in _KEPT.items() if group in keys
        for name in names if f"{group}.{name}" not in keys and saved[group].get(name) is not None
    ]  # fmt: skip


# --- from files ---


def file_loads(runs: Sequence[MeasuredRun], overrides: Sequence[str], folder: Path) -> list[Load]:
    """One load for each measured run. Raises TestbedError with a message of one line."""
    loads: list[Load] = []
    for run in runs:
        settings = tuple(choice("model", run.model, run.place, list(overrides)))
        choice("device", None, run.place, list(overrides))
        config = composed((*_RECORDED, *settings), overrides)
        own = trace_of(run)
        alike = (one.trace for one in loads if one.settings == settings and _is_repeat(one.trace, own))
        trace = next(alike, own)
        written = write_measured(run, trace, config.raw, folder / run.name / "measured")
        loads.append(Load(
            run.name, run.name, run.source, trace, written, settings, None, f"file {trace.name}", "as measured",
            run.notes,
        ))  # fmt: skip
    return loads


def _is_repeat(one: Trace, other: Trace) -> bool:
    return len(one) == len(other) and all(
        (a.num_prompt_tokens, a.num_output_tokens) == (b.num_prompt_tokens, b.num_output_tokens)
        and abs(a.arrival_ns - b.arrival_ns) <= _SAME_S * 1e9
        for a, b in zip(one.rows, other.rows, strict=True)
    )


# --- from run folders ---


def folder_load(
    run: Run, name: str, place: str, folder: Path, earlier: Sequence[Load], overrides: Sequence[str]
) -> Load:
    """The load of a run folder: backend real, vllm (also imported), or sim. earlier: the loads that it may repeat.
    overrides: the user's; a warm-up among them holds for the measured run too. Raises TestbedError with one line."""
    if run.manifest.get("status") != "complete":
        raise RunFolderError(
            f"{run.path}: the run is partial, so its load is not known; measure it again, or leave it out"
        )
    if num_replicas(run) > 1 and not run.is_simulated:
        raise RunFolderError(
            f"{run.path}: several engines served it; give the folder of a run of one, or "
            "compare the fleet with its simulation (testbed run from=<folder> backend=sim) by testbed report"
        )
    saved = read_config(run.path)
    simulated = saved if run.is_simulated else {**saved, "backend": {"name": "sim"}}
    recorded = read_table(run.path / "requests.parquet")
    kept = recorded.filter(pc.and_(pc.is_in(recorded["finish_reason"], pa.array(COMPLETED)),
                                   pc.greater(recorded["num_output_tokens"], 0)))  # fmt: skip
    if not len(kept):
        raise RunFolderError(
            f"{run.path}: no request of {name} ended well, so there is nothing to compare; leave this folder out"
        )
    speed, policy = run.config["backend"].get("speed", 1.0), _policy(run)
    key = f"{run.manifest.get('backend')} {run.fingerprint}"
    alike = [one for one in earlier if one.key == key]
    own = _as_it_was(run, simulated, kept, is_whole=len(kept) == len(recorded))
    trace = next((one.trace for one in alike if one.policy == policy), own)
    vocab_size = run.config["trace"].get("vocab_size")
    kept_trace = {"name": "jsonl", "path": str(run.path / TRACE_FILE), "vocab_size": vocab_size, "forced": "lengths"}
    settings = [] if run.is_simulated else ["backend=sim"]
    settings += [f"cache.{name}={run.manifest[name]}" for name in ("num_gpu_blocks", "num_cpu_blocks")
            if run.manifest.get(name) is not None]  # fmt: skip
    there = None if run.is_simulated else device_of_run(str(run.manifest.get("device")))
    if there not in (None, run.config["device"]["name"]):
        settings.append(f"device={there}")
    steps = read_table(run.path / "steps.parquet")
    said = {
        "measured_trace": _settings_of_trace(run, alike[0].place if alike else place, speed),
        "source_fingerprint": _fingerprint(run),
    }
    config = run.config
    if of_report := [item for item in overrides if item.startswith(("report.", "report=", "hydra.searchpath="))]:
        config = {**config, "report": compose_from({**simulated, "trace": kept_trace}, of_report).raw["report"]}
    written = write_folder(folder / place / "measured", kept, steps, config, run.manifest | said, trace)
    return Load(
        name, place, f"backend={run.manifest.get('backend')}", trace, written, tuple(settings),
        {**saved, "trace": kept_trace}, key, policy, tuple(_notes(run, saved, kept, len(recorded), overrides)),
    )  # fmt: skip


def _notes(
    run: Run, saved: dict[str, Any], kept: pa.Table, num_recorded: int, overrides: Sequence[str]
) -> Iterator[str]:
    """What a reader must know of a measured run. kept: those of its requests that are compared."""
    if run.is_simulated:
        yield "was simulated itself: what stands under 'measured' says nothing of a real engine"
    yield from map(str, replay_notes(run.manifest))
    had = f"scheduler={run.config['scheduler']['name']}"
    for chosen in overrides:
        if chosen.startswith("scheduler=") and chosen != had:
            yield f"ran under {had}, and is simulated under {chosen} within the run's limits, unless they are given"
    if len(kept) < num_recorded:
        yield f"{num_recorded - len(kept)} of {num_recorded} requests did not end well and were left out"
    if _ends_freely(saved) and (num_uneven := _num_uneven(saved, kept)):
        yield f"{num_uneven} requests whose sequences ended apart are simulated as if all ended with the last"


def _settings_of_trace(run: Run, place: str, speed: float) -> dict[str, Any]:
    """The settings by which a report tells the run's load from others. A trace that only the run's folder has, as that
    of a log, is called `place`."""
    given = run.config["trace"]
    is_kept = Path(given.get("path") or "").parts[-2:] == (run.path.resolve().name, TRACE_FILE)
    own = {"name": place, "path": None} if is_kept else {}
    return run.manifest.get("measured_trace") or {**given, **own, "rate_scale": given.get("rate_scale", 1.0) * speed}


def _policy(run: Run) -> str:
    """The settings that decide. Sizes of the pool, which follow from the device, and paths only if the sweep of the run
    varies them."""
    kept = {key: value for key, value in run.flat_config.items() if key.split(".")[0] not in _TIMING}
    swept = run.manifest.get("swept") or {}
    return repr(sorted(
        (key, value) for key, value in kept.items() if key in swept or not key.endswith(("_blocks", "_gib", "path"))
    ))  # fmt: skip


def _as_it_was(run: Run, saved: dict[str, Any], kept: pa.Table, *, is_whole: bool) -> Trace:
    """The run's trace with the recorded arrivals and output lengths, with only the kept requests."""
    file = run.path / TRACE_FILE
    with repeating(run.path):
        whole = read_jsonl(file) if file.exists() else build_trace(compose_from(saved, []))
    had = _fingerprint(run)
    if had is not None and (given := fingerprint(whole)) != had:
        source = file if file.exists() else saved["trace"].get("path") or "the trace's generator"
        raise RunFolderError(
            f"{run.path}: {source} no longer gives the trace of the run (fingerprint {given}, the run's was {had}); "
            "bring back the one that it ran, or measure again"
        )
    by_id = {row.request_id: row for row in whole}
    place = {row.request_id: number for number, row in enumerate(whole)}
    columns = [kept[name].to_pylist() for name in ("request_id", "arrival_ns", "num_output_tokens", "num_token_steps")]
    rows = []
    for request_id, arrival_ns, num_output, num_steps in zip(*columns, strict=True):
        row = by_id.get(request_id)
        if row is None:
            raise RunFolderError(
                f"{run.path}: request {request_id!r} is not in the run's trace; was trace.path changed?"
            )
        row = row._replace(arrival_ns=arrival_ns, think_ns=None, cancel_after_ns=None)
        if num_output == num_steps or _ends_freely(saved):
            row = row._replace(output=_output(row, num_steps))
        rows.append(row if is_whole else row._replace(session_id=None, turn=None))
    return arrange(whole.name, sorted(rows, key=lambda row: (row.arrival_ns, place[row.request_id])))


def _ends_freely(saved: Mapping[str, Any]) -> bool:
    """Whether the model ended the outputs of a run with this configuration, which are not those of its trace. It always
    ends those of beams."""
    return bool(saved["trace"].get("forced") == "nothing" or saved["sampling"].get("beam_width"))


def _num_uneven(saved: Mapping[str, Any], kept: pa.Table) -> int:
    """The number of requests whose sequences emitted different numbers of tokens."""
    num_seqs = freeze(SamplingParams, "sampling", saved["sampling"]).num_seqs
    uneven = pc.not_equal(kept["num_output_tokens"], pc.multiply(kept["num_token_steps"], num_seqs))
    return int(pc.sum(uneven).as_py())


def _fingerprint(run: Run) -> str | None:
    """The fingerprint of the trace that the run had; None if it is not known: of a served run that was killed, a log of
    vLLM's own scheduler, a copy of a file's run. The trace of a copy was rewritten; it keeps that of its original."""
    own = None if is_copy(run.path) else run.manifest["trace"].get("fingerprint")
    kept: str | None = run.manifest.get("source_fingerprint", own)
    return kept


def _output(row: TraceRequest, num_tokens: int) -> Part:
    """The row's own output if it has `num_tokens` tokens; else as many tokens of its span, or synthetic ones."""
    part = row.output
    if part is not None and part.num_tokens == num_tokens:
        return part
    return Span(
        part.key if isinstance(part, Span) else content_key("measured", row.request_id, "output"), 0, num_tokens
    )
