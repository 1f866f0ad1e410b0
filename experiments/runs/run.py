"""One run: from a RunConfig to a complete run folder, on any backend. Owns folders, manifest, progress, endings."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from experiments.configuration.config import RunConfig
from experiments.configuration.saved import TRACE_FILE
from experiments.configuration.settings import TraceConfig
from experiments.runs.collector import fewer_collections
from experiments.runs.ending import failure_message, ignored_message, notes_of, reason_of
from experiments.runs.environment import describe_machine, describe_versions
from experiments.runs.identity import identity_of
from experiments.runs.interrupt import interruptible, undisturbed
from experiments.runs.origin import UNKNOWN, Origin
from experiments.runs.prepare import (
    Prepared,
    TraceLike,
    at_speed,
    check_profile,
    prepare_engine,
    prepare_sim,
    replay_speed,
    trace_inbox,
)
from experiments.runs.progress import Progress
from experiments.runs.replacing import claimed, put_back
from experiments.runs.run_folder import ABSENT, locked, refuse_overwrite, write_json, writing
from experiments.wiring import build, engines
from experiments.wiring.build_engine import check_prompts, check_token_ids
from experiments.wiring.costs import CostEstimator, Watch, itemise, kernel_notes, watches_of
from experiments.wiring.engines import batch_limits, status_lines
from experiments.wiring.foreign import policy_failure
from experiments.wiring.traces import build_source, build_trace, describe_trace, end_token_ids
from real.vllm.config import VllmConfig
from sim.cost.profiled_range import RangeWatch
from sim.cost.tables import OriginWatch
from testbed import compiled
from testbed.core.commands import Recorder
from testbed.core.scheduler import Scheduler
from testbed.core.serve import Loop, serve
from testbed.errors import LivelockError, RunFolderError, TestbedError
from testbed.records.operators import OperatorLedger
from testbed.records.recorders import together
from testbed.records.tape import TapeWriter, tape_names
from testbed.traces.schema import Trace
from testbed.traces.serialize import write_jsonl
from testbed.traces.stream import CountedTrace, whole

if TYPE_CHECKING:
    from analysis.measures.notes import Note

INTERRUPTED = 130  # exit status after Ctrl-C, as in shells


class FailedError(TestbedError):
    """A command that did not complete: a run is partial or has requests that can never fit, points of a sweep failed or
    are left, or a policy has no capacity. Its results so far are kept."""

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run. status: complete or partial. message: one line for the user, or empty."""

    folder: Path
    status: str
    exit_status: int
    message: str
    summary: dict[str, Any]
    config: dict[str, Any]  # as in config.yaml
    manifest: dict[str, Any]
    notes: tuple[Note, ...] = ()  # failed checks, changes made to the trace, settings without effect, unsent turns


def execute(
    config: RunConfig,
    folder: Path,
    *,
    command: str = "",
    origin: Origin = UNKNOWN,
    trace: Trace | None = None,
    watch: Recorder | None = None,
    has_summary: bool = True,
) -> RunResult:
    """Runs `config` and writes `folder`. trace: used instead of the configuration's own (from Python). watch: a
    recorder that may end the run by raising a TestbedError; it is not called for vLLM's own scheduler. has_summary:
    False for a run of which the records alone are read; the folder then has none, nor notes, which are from it.

    Raises TestbedError for errors before the run starts. An interrupt or a failure during the run keeps the results so
    far and marks the folder partial.
    """
    folder = folder.absolute()
    put_back(folder)
    refuse_overwrite(folder, config.overwrite)
    check_profile(config)
    if trace is not None:
        config = _reading(config, folder / TRACE_FILE)
        given: TraceLike = trace
    else:
        given = _own_trace(config)
    if isinstance(config.backend, VllmConfig) and config.backend.decides == "vllm":
        return _stock(config, folder, whole(given), command, origin)
    prepared = prepare_sim(config, given) if config.is_simulated else prepare_engine(config, whole(given), folder)
    with closing(prepared):
        estimator = build.build_estimator(config)
        schedulers = [build.build_scheduler(config, prepared.pools, estimator) for _ in prepared.inboxes]
        manifest = _manifest(config, given, prepared, command) | asdict(origin)
        with writing(folder), claimed(folder, config):
            return _run(
                config, folder, given, prepared, schedulers, manifest, watch, estimator, has_summary=has_summary
            )


def _stock(config: RunConfig, folder: Path, trace: Trace, command: str, origin: Origin) -> RunResult:
    """Makes a run with vLLM's own scheduler; the run folder is made from its log."""
    from analysis.load import load_run  # not at the top: Arrow is slow to import
    from experiments.observe.stock import options_of_stock, replay_stock

    check_token_ids(config, trace)
    check_prompts(config, trace)
    told, inbox = options_of_stock(config), trace_inbox(config, at_speed(trace, config.speed))
    with locked(folder):
        failure = replay_stock(config, trace, inbox, folder, command, told)
    origin.state(folder, command)
    run = load_run(folder)
    manifest, summary = run.manifest, run.summary
    message, exit_status = "", 0
    if failure is not None:
        num_finished = int(run.requests["finish_reason"].notna().sum())
        message, exit_status = failure_message(failure, folder, manifest, num_finished), _exit_status(failure)
    notes = notes_of(config, manifest, summary, folder)
    manifest["notes"] = [*map(str, notes)]
    write_json(folder / "manifest.json", manifest)
    return RunResult(folder, manifest["status"], exit_status, message, summary, run.config, manifest, notes)


def _exit_status(failure: BaseException) -> int:
    return INTERRUPTED if isinstance(failure, KeyboardInterrupt) else 1


def _own_trace(config: RunConfig) -> TraceLike:
    """Returns the configuration's trace: whole, or streamed (trace.stream) if a simulation can read it row by row."""
    if not config.is_simulated or config.recorded_run is not None:
        return build_trace(config)  # whole: a tape refers to requests in any order
    source = build_source(config)
    return source if isinstance(source, Trace) else CountedTrace(source, build.check_simulated)


def _reading(config: RunConfig, file: Path) -> RunConfig:
    """Returns the configuration for a trace given in Python, with the path of its copy in the run folder, so that
    `from=` finds it."""
    kept = config.trace
    settings = TraceConfig(name="jsonl", path=str(file), vocab_size=kept.vocab_size, forced=kept.forced)
    return replace(config, trace=settings, raw={**config.raw, "trace": {**asdict(settings), "transforms": []}})


def _log_trace(described: dict[str, Any]) -> None:
    log = logging.getLogger("testbed")
    later = "known at the end"  # for a streamed trace
    num, digest = described["num_requests"], described["fingerprint"]
    log.info("%s: requests: %s, fingerprint: %s", described["name"], later if num is None else num, digest or later)
    for note in described["notes"]:
        log.info("trace: %s", note)


def _run(
    config: RunConfig,
    folder: Path,
    trace: TraceLike,
    prepared: Prepared,
    schedulers: list[Scheduler],
    manifest: dict[str, Any],
    watcher: Recorder | None,
    estimator: CostEstimator,
    *,
    has_summary: bool,
) -> RunResult:
    """Runs the loops; closes the records and completes the folder even after a failure."""
    _log_trace(manifest["trace"])
    records = engines.RunRecords(config.record, folder, len(schedulers), prepared.sender)
    is_fleet = len(schedulers) > 1  # then the router's driver runs the loops of the replicas
    files = [] if config.is_simulated else tape_names(len(schedulers))
    tapes = [TapeWriter(folder / file, is_live=is_fleet) for file in files]
    if tapes or config.trace.path == str(folder / TRACE_FILE):
        write_jsonl(trace, folder / TRACE_FILE)
    progress = Progress(trace.num_requests, manifest["backend"])
    write_json(folder / "manifest.json", manifest)  # early, so that the tape of a killed run can be replayed
    watches = watches_of(prepared.cost)
    ledger = OperatorLedger(folder, itemise(prepared.cost)) if config.record.operators else None
    shared = [one for one in (prepared.checker, *watches, watcher) if one is not None]
    shared += [*batch_limits(config), progress]
    recorders: list[Recorder] = []
    for number, lines in enumerate(status_lines(config.record.status_s, schedulers)):
        replayed = [] if prepared.replay is None else [tapes[number], prepared.replay.lags[number]]
        ops = [] if ledger is None else [ledger.of_engine()]
        one = together([records.recorders[number], *replayed, *shared, *lines, *ops])
        one = prepared.late[number].of(one) if prepared.late else one
        recorders.append(together([one, engines.Checks(schedulers[number])]) if config.record.check else one)
    loops = [serve(*each) for each in zip(prepared.inboxes, schedulers, recorders, strict=True)]
    began = time.monotonic()
    try:
        failure = _drive(config, prepared, schedulers, loops)
    finally:
        with undisturbed():
            unwritten = _close_all(*prepared.late, progress, records, *tapes, *([] if ledger is None else [ledger]))
    failure = failure or unwritten
    if not isinstance(trace, Trace):
        manifest["trace"] = describe_trace(trace)  # again: it was read during the run
    described = engines.describe_engines(schedulers, records)
    manifest |= {
        "status": "complete" if failure is None else "partial",
        "failure": None if failure is None else reason_of(failure, folder),
        "wall_s": round(time.monotonic() - began, 3),
        **described,
        "num_unsent": None if trace.num_requests is None else trace.num_requests - records.num_sent,
        "num_cut_outputs": sum(recorder.num_cut for recorder in records.recorders),
        "num_cut_output_tokens": sum(recorder.num_cut_tokens for recorder in records.recorders),
        **_of_prices(config, watches, None if prepared.cost is None else estimator),
        **({} if prepared.replay is None else prepared.replay.describe(described["num_steps"])),
    }
    with undisturbed():
        return _close(config, folder, manifest, records, failure, has_summary=has_summary)


def _of_prices(config: RunConfig, watches: Sequence[Watch], estimator: CostEstimator | None) -> dict[str, Any]:
    """Returns what the manifest has on the step times. estimator: of a run whose steps are priced."""
    noting = watches if estimator is None else [*watches, estimator]
    notes = [*(note for one in noting for note in one.notes()), *build.pool_notes(config), *kernel_notes(config)]
    return {
        "cost_notes": notes,
        "cost_shares": next((one.shares() for one in watches if isinstance(one, OriginWatch)), None),
        "num_extrapolated_steps": max([one.num_outside for one in watches if isinstance(one, RangeWatch)], default=0),
    }


def _drive(
    config: RunConfig, prepared: Prepared, schedulers: list[Scheduler], loops: list[Loop]
) -> BaseException | None:
    """Runs the loops to their end. Returns the failure that ended them and leaves a partial run: an interrupt, an error
    of the testbed or of a user's own class, too little memory, a failed write. Raises any other error."""
    try:
        with fewer_collections(is_simulation=config.is_simulated), interruptible(loops) as watched:
            prepared.drive(watched, schedulers)
            for late in prepared.late:
                late.catch_up()
            assert not any(scheduler.has_work for scheduler in schedulers), "the loops ended before their requests"
            for scheduler in schedulers:
                scheduler.check_invariants()  # what a user's class took from a block table is missing at the end
    except LivelockError as error:
        return policy_failure(error, config) or error
    except (KeyboardInterrupt, TestbedError, MemoryError) as error:
        return error
    except BaseException as error:  # a user's class may raise any
        failure = policy_failure(error, config) or (error if isinstance(error, OSError) else None)
        if failure is None:
            raise
        return failure
    return None


class _Closable(Protocol):
    def close(self) -> None: ...


def _close_all(*files: _Closable) -> OSError | TestbedError | None:
    """Closes all files, even if one cannot write its last lines; returns the first such failure, or None."""
    failure: OSError | TestbedError | None = None
    for file in files:
        try:
            file.close()
        except (OSError, TestbedError) as error:
            failure = failure or error
    return failure


def _close(
    config: RunConfig,
    folder: Path,
    manifest: dict[str, Any],
    records: engines.RunRecords,
    failure: BaseException | None,
    *,
    has_summary: bool,
) -> RunResult:
    """Writes manifest and summary, and for a complete run the `done` marker.

    Raises RunFolderError if they cannot be written; its message is the run's own failure, if there was one.
    """
    from analysis.load import Run  # not at the top: Arrow is slow to import
    from analysis.measures.notes import doubts_of

    if failure is None and records.ignored:
        is_given = config.trace.path == str(folder / TRACE_FILE)
        manifest["ignored"] = ignored_message(config, manifest["trace"]["num_requests"], records.ignored, is_given)
    try:
        write_json(folder / "manifest.json", manifest)
        summary = Run(folder, config.raw, manifest).summarise() if has_summary else {}
        notes = notes_of(config, manifest, summary, folder) if summary else ()
        if summary:
            write_json(folder / "summary.json", summary)
            manifest["notes"] = [*map(str, notes)]
            write_json(folder / "manifest.json", manifest)
        if failure is None:
            (folder / "done").write_text(manifest["digest"] + "\n")
    except (OSError, RunFolderError) as error:
        raise RunFolderError(failure_message(failure or error, folder, manifest, records.num_finished)) from None
    status, message, exit_status = manifest["status"], "", 0
    if failure is not None:
        message, exit_status = failure_message(failure, folder, manifest, records.num_finished), _exit_status(failure)
    elif records.ignored:
        message, exit_status = manifest["ignored"], 0 if config.allow_ignored else 1
    log = logging.getLogger("testbed")
    for note in notes if summary else doubts_of(manifest):
        if note.text not in manifest["trace"]["notes"]:  # these were logged at the start
            log.warning("%s", note)
    log.info("%s %s", status, message)
    return RunResult(folder, status, exit_status, message, summary, config.raw, manifest, notes)


def _manifest(config: RunConfig, trace: TraceLike, prepared: Prepared, command: str) -> dict[str, Any]:
    return {
        **ABSENT,
        "status": "partial",
        "backend": config.raw["backend"]["name"],
        "created": datetime.now().astimezone().isoformat(timespec="milliseconds"),
        "versions": describe_versions(),
        "core": compiled.current().mode,
        "compiler": compiled.current().why if compiled.current().mode == "compiled" else None,
        "code_version": describe_versions()["llm-serving-testbed"],
        "identity": asdict(identity_of(config)),
        "machine": describe_machine(),
        "command": command or " ".join(sys.argv),
        "started_in": os.getcwd(),
        "seed": config.seed,
        "end_token_ids": [*end_token_ids(config)] or None,
        "trace": describe_trace(trace, replay_speed(config)),
        "model": config.model.name,
        "tensor_parallel_size": config.tensor_parallel_size,
        "scheduler": config.scheduler.name,
        "victim_of_auto": build.victim_of_auto(config),
        "async_scheduling": config.scheduler.async_scheduling,
        **{name: getattr(config.backend, name, None) for name in ("frontend_ns", "frontend_ns_per_token")},
        "estimator": build.estimator_name(config),
        "num_gpu_blocks": prepared.pools.num_gpu_blocks,
        "num_cpu_blocks": prepared.pools.num_cpu_blocks,
        "block_size": config.cache.block_size,
        **engines.describe_router(config),
        **prepared.description,
    }
