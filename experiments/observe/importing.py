"""Makes a run folder from an observer's log: configuration, records, trace, case, profile."""

from __future__ import annotations

import json
import os
from array import array
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from analysis.load import Run
from experiments.configuration.compose import compose_config, to_overrides
from experiments.configuration.config import RunConfig
from experiments.configuration.saved import MODEL_FOLDER, TRACE_FILE
from experiments.conform.replay import case_settings, composition_of
from experiments.conform.systems import SYSTEMS
from experiments.observe.case import case_of, config_of, system_of, why_no_case
from experiments.observe.log import ObservedLog, ObservedRequest, Sender, read_log
from experiments.observe.records import LoggedStep, replay
from experiments.runs.environment import describe_machine
from experiments.runs.identity import identity_of
from experiments.runs.in_vllm import device_of, manifest_in_vllm, why_unpriced, with_model
from experiments.runs.replacing import replacing
from experiments.runs.run_folder import claim, refuse_overwrite, write_json
from experiments.wiring.traces import describe_trace
from testbed.core.commands import Recorder
from testbed.errors import IllegalTransitionError, RunFolderError, TestbedError
from testbed.foreign_text import shortened
from testbed.records.recorder import RunRecorder
from testbed.specs.profiles import ProfileManifest, number_repeats, write_profile
from testbed.traces.arrange import arrange
from testbed.traces.schema import Span, TokenIds, Trace, TraceRequest
from testbed.traces.serialize import write_jsonl
from testbed.wording import count

CASE_FILE, PROFILE_FILE = "case.jsonl", "profile.parquet"
_OF_LOGS = (CASE_FILE, PROFILE_FILE)  # files of a log's run beside those of all runs


def import_log(
    file: Path, folder: Path, *, device: str | None = None, overwrite: bool = False, command: str = ""
) -> list[str]:
    """Makes the run folder of a log from any vLLM server; returns lines to print. Raises TestbedError with a one-line
    message if the log is not usable; then nothing was written."""
    folder = folder.absolute()
    refuse_overwrite(folder, overwrite, key="--out", allow="--overwrite")
    log = _read(file)
    trace, device = trace_of(log, file.name), device or device_of(log.header)
    with TemporaryDirectory() as trial:  # errors are raised before the folder is made
        _config(log, Path(trial), device)
        _try(log, file)
    folder.mkdir(parents=True, exist_ok=True)
    config, unpriced = _config(log, folder, device)
    with replacing(folder, _OF_LOGS):
        return _make_folder(log, file, folder, config, trace, unpriced, command)


def import_own(
    file: Path, folder: Path, config: RunConfig, trace: Trace, sender: Sender, measured: dict[str, Any], *,
    is_cut: bool, command: str,
) -> None:  # fmt: skip
    """Makes the run folder of a log that a run of ours wrote, whose configuration and trace are known. sender: the
    requests that it sent. measured: the entries `replay` and `host` of the manifest. is_cut: whether it ended early."""
    log = _read(file, sender)
    log.is_cut = is_cut
    known = measured | {  # not known for another server's log; `identity` is that of the configuration asked for
        "identity": asdict(identity_of(config)), "machine": describe_machine(),
        "started_in": os.getcwd(),
    }  # fmt: skip
    unpriced = why_unpriced(log.header, config)
    with replacing(folder, _OF_LOGS):
        _make_folder(log, file, folder, _by_rules_of(log, config), trace, unpriced, command, known)


def _read(file: Path, sender: Sender | None = None) -> ObservedLog:
    log = read_log(file, sender)
    if not log.steps:
        raise RunFolderError(f"{file} has no step that was finished: nothing to import")
    return log


def _make_folder(
    log: ObservedLog, file: Path, folder: Path, config: RunConfig, trace: Trace, unpriced: str, command: str,
    known: dict[str, Any] | None = None,
) -> list[str]:  # fmt: skip
    """Writes all files of the folder; returns lines to print. known: further entries of the manifest."""
    claim(folder, config)
    for name in (CASE_FILE, PROFILE_FILE):  # from an earlier run; the new one may write neither
        (folder / name).unlink(missing_ok=True)
    write_jsonl(trace, folder / TRACE_FILE)
    recorder = RunRecorder(folder, decisions=True, explains=True)  # as the run cannot be repeated for them later
    with closing(recorder):
        measured = replay(log, recorder)
    lines = _write_case(log, folder, file)
    no_profile = unpriced or _why_no_profile(log)
    if no_profile:
        lines.append(f"no profile   {no_profile}")
    else:
        probe = known["replay"]["probe"] if known else None
        lines.append(_write_profile(log, folder, config, measured, command, (probe or {}).get("probe_ns")))
    manifest = _manifest(log, config, trace, recorder, command, unpriced) | {"no_profile": no_profile or None}
    manifest |= known or {}
    write_json(folder / "manifest.json", manifest)
    write_json(folder / "summary.json", Run(folder, config.raw, manifest).summarise())
    if not log.is_cut:
        (folder / "done").write_text("observed\n")
    num_preempted = sum(len(step.preempted) for step in log.steps)
    counts = (len(log.requests), "request"), (len(log.steps), "step"), (num_preempted, "preemption")
    head = ", ".join(count(num, noun) for num, noun in counts)
    if log.num_open:
        head += f"; {log.open_note}"
    return [head, *lines, f"imported     {folder}"]


def _try(log: ObservedLog, file: Path) -> None:
    """Raises RunFolderError if the steps of the log are inconsistent."""
    try:
        replay(log, Recorder())
        if not why_no_case(log):
            case_of(log, file.name)
    except (ArithmeticError, LookupError, TypeError, ValueError, IllegalTransitionError, TestbedError) as error:
        raise RunFolderError(f"{file}: its steps do not fit together ({shortened(error)}); it was changed") from None


def trace_of(log: ObservedLog, name: str) -> Trace:
    """Returns the requests in order of arrival with vLLM's outputs, without requests that emitted no token."""
    rows = [_row(one) for one in log.requests.values() if one.wanted]
    missing = len(log.requests) - len(rows)
    notes = [f"{count(missing, 'request')} left out: nothing was emitted"] if missing else []
    notes += [log.open_note] if log.num_open else []
    notes += [log.note] if log.note else []
    return arrange(name, rows, notes)


def _row(one: ObservedRequest) -> TraceRequest:
    """Returns a request as a row of a trace. An aborted one ends after the tokens that it had emitted, as after a stop
    string, or at the time of its abort if that is earlier."""
    prompt = Span(one.number + 1, 0, one.prompt) if isinstance(one.prompt, int) else TokenIds(one.prompt)
    cancelled_ns = None if one.aborted is None else max(1, (one.ended_ns or 0) - one.arrival_ns)
    return TraceRequest(
        one.name, one.arrival_ns, (prompt,), TokenIds(array("i", one.output or one.wanted)), priority=one.priority,
        cache_salt=one.salt or None, cancel_after_ns=cancelled_ns,
    )  # fmt: skip


def _config(log: ObservedLog, folder: Path, device: str) -> tuple[RunConfig, str]:
    """Returns the configuration, and why the model's steps cannot be priced (empty if they can). A run of such a model
    is imported all the same."""
    return with_model(log.header, folder / MODEL_FOLDER, lambda model: _composed(log, folder, device, model))


def _by_rules_of(log: ObservedLog, config: RunConfig) -> RunConfig:
    """Returns the configuration with the composition of the vLLM version that ran, so that a simulation of the run
    makes the same decisions."""
    system = SYSTEMS[system_of(log)]
    settings = {"scheduler": {"name": system.preset, **composition_of(system.options)}}
    composition = compose_config(to_overrides(settings)).raw["scheduler"]["composition"]
    scheduler = config.raw["scheduler"] | {"composition": composition}
    return RunConfig.from_container(config.raw | {"scheduler": scheduler})


def _composed(log: ObservedLog, folder: Path, device: str, model: dict[str, Any]) -> RunConfig:
    """Returns the configuration with which the testbed would run these requests."""
    system = SYSTEMS[system_of(log)]
    settings = case_settings(system.preset, config_of(log), system.options) | {
        "model": model,
        "device": {"name": device, "tensor_parallel_size": log.header["device"]["tensor_parallel_size"]},
        "trace": {"name": "jsonl", "path": str(folder / TRACE_FILE)},
        "backend": {"name": "vllm", "decides": "vllm"},
    }
    return compose_config(to_overrides(settings))


def _write_case(log: ObservedLog, folder: Path, file: Path) -> list[str]:
    why = why_no_case(log)
    if why:
        return [f"no case      {why}: `testbed conform` has nothing to compare"]
    (folder / CASE_FILE).write_text(json.dumps(case_of(log, file.name.split(".")[0]), separators=(",", ":")) + "\n")
    return [f"case         testbed conform {folder / CASE_FILE}"]


def _why_no_profile(log: ObservedLog) -> str:
    """Returns why the log gives no time for each single step; empty if it does."""
    if log.header["config"]["async_scheduling"]:
        return (
            "asynchronous steps overlap: what each costs by itself is not known, unless vLLM plans none ahead (its "
            "--no-async-scheduling; of `testbed run` scheduler.async_scheduling=false)"
        )
    if log.left_out:
        return f"{log.note}, and what they cost is within that of the steps"
    if log.header["unknown"]:
        return f"vLLM ran with {', '.join(log.header['unknown'])}: what steps computed is not known"
    return ""


def _write_profile(
    log: ObservedLog, folder: Path, config: RunConfig, measured: list[LoggedStep], command: str, probe_ns: int | None
) -> str:
    said = log.header["device"]
    # in which vLLM computed, as the checkpoint's may be another; FP8 weights stay FP8
    dtype = "fp8" if config.model.dtype == "fp8" else log.header["model"]["dtype"]
    kv_dtype = log.header["config"]["kv_dtype"]
    manifest = ProfileManifest(
        device=config.device.name, model=asdict(config.model) | {"dtype": dtype}, block_size=config.cache.block_size,
        dtype=dtype, tensor_parallel_size=said["tensor_parallel_size"],
        kv_dtype=None if kv_dtype == "auto" else kv_dtype, probe_ns=probe_ns, attention="vllm",
        device_description=said["name"], versions={"vllm": log.header["vllm"]}, date=_date(log), command=command,
    )  # fmt: skip
    steps = [(one.shape, one.spans, one.period_ns) for one in measured if not one.shape.is_empty]
    write_profile(folder / PROFILE_FILE, manifest, number_repeats(steps))
    return f"profile      testbed calibrate fit {folder / PROFILE_FILE} --out fit.json"


def _date(log: ObservedLog) -> str:
    return datetime.fromtimestamp(int(log.header["unix_ns"]) / 1e9, UTC).isoformat(timespec="seconds")


def _manifest(
    log: ObservedLog, config: RunConfig, trace: Trace, recorder: RunRecorder, command: str, unpriced: str
) -> dict[str, Any]:
    said = log.header
    queried = sum(len(prompt) if isinstance(prompt := one.prompt, array) else prompt for one in log.requests.values())
    first: dict[str, int] = {}
    for step in log.steps:
        for name, start in step.admitted.items():
            first.setdefault(name, start)
    return manifest_in_vllm(said, config, command) | {
        "status": "partial" if log.is_cut else "complete",
        "created": _date(log),
        "wall_s": round(log.steps[-1].end_ns / 1e9, 3),
        "machine": {"gpu": None if said["device"]["type"] == "cpu" else said["device"]["name"]},
        "trace": describe_trace(trace, config.speed),
        "model": Path(said["model"]["name"]).name if unpriced else config.model.name,
        "unpriced": unpriced or None,
        "num_steps": len(log.steps),
        "num_sent": recorder.num_sent,
        "num_unsent": max(0, trace.num_requests - recorder.num_sent),  # 0 for a trace made from the log itself
        "prefix_cache": {"queried_tokens": queried, "hit_tokens": sum(first.values())},
    }
