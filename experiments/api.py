"""Runs from Python: `from experiments import simulate, replay`. Each returns an `analysis.load.Run`."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterable, Mapping
from multiprocessing import parent_process
from os import PathLike
from pathlib import Path
from typing import Any, SupportsIndex

from analysis.load import Run, require_path
from analysis.measures.checks import failures
from experiments.configuration.compose import ONE_AT_A_TIME, compose_config, to_overrides
from experiments.configuration.config import CLASSES, JUDGING
from experiments.configuration.grammar import literal, parsed
from experiments.configuration.options import options
from experiments.configuration.overrides import refuse_swept
from experiments.runs.identity import edited_since_import
from experiments.runs.interrupt import was_pressed
from experiments.runs.origin import Origin
from experiments.runs.run import INTERRUPTED, execute
from experiments.runs.run_folder import refuse_overwrite, require_writable
from experiments.wiring.costs import build_cost
from experiments.wiring.own_traces import checked, of_rows
from sim.cost.base import CostModel
from testbed.errors import ConfigError, RunFolderError, TestbedError, TraceError
from testbed.foreign_text import shown
from testbed.traces.readers import read_trace
from testbed.traces.schema import Trace
from testbed.traces.stream import StreamedTrace

_TEMPORARY: set[Path] = set()  # folders that this process deletes, when it exits at the latest
TraceLike = Trace | str | PathLike[str] | Mapping[str, Any] | Iterable[Mapping[str, Any]]


def simulate(trace: TraceLike, *, folder: str | PathLike[str] | None = None, **settings: Any) -> Run:
    """Simulates a trace and returns the finished run (`.requests`, `.steps`, `.summary`, `.path`).

    trace: a Trace; a file in the testbed's own schema (.jsonl, .csv, .parquet); rows of that schema as dicts; or the
    keys of the `trace` group as one dict, such as {"name": "synthetic", "rate": 8}. settings: the configuration's
    groups, by option name or as a dict of keys: scheduler="decode_first", cache={"block_size": 32}; a class of your
    own: cost={"_target_": "mine.Cost", "base_us": 7}; config_dir="my_conf": a folder with options of your own, as
    --config-dir. folder: the run folder; the default is a new temporary folder, deleted with the Run, or when Python
    exits (give one where a worker process returns a Run). Raises TestbedError with a one-line message, and
    KeyboardInterrupt. A failed check of the records is a RuntimeWarning. Threads take turns.
    """
    given = settings.get("backend", "sim")
    if (given.get("name") if isinstance(given, Mapping) else given) in ("real", "vllm"):
        raise ConfigError(f"simulate runs no engine, and backend is {shown(given)}; call replay, or leave it out")
    with ONE_AT_A_TIME:
        return _run(trace, folder, {"backend": "sim", **settings})


def replay(trace: TraceLike, *, folder: str | PathLike[str] | None = None, **settings: Any) -> Run:
    """Like `simulate`, but runs the trace on the real engine (backend=real)."""
    given = settings.pop("backend", {})
    backend = {"name": given} if isinstance(given, str) else given
    if not isinstance(backend, Mapping) or backend.get("name") == "sim":
        raise ConfigError(f"replay runs an engine, and backend is {shown(given)}; call simulate, or leave it out")
    with ONE_AT_A_TIME:
        return _run(trace, folder, {"backend": {"name": "real", **backend}, **settings})


def cost_model(**settings: Any) -> CostModel:
    """Returns the cost model of a run with these settings, given as to `simulate`, to price single steps with:
    `price(shape)` and `breakdown(shape)` take a `testbed.core.plan.BatchShape`. Raises ConfigError."""
    overrides = to_overrides(settings)
    refuse_swept(overrides)
    return build_cost(compose_config(overrides))


def _run(trace: TraceLike, folder: str | PathLike[str] | None, settings: dict[str, Any]) -> Run:
    rows: Trace | None = None
    settings = {name: value for name, value in settings.items() if value is not None or name not in JUDGING}
    if isinstance(trace, Mapping):
        settings["trace"] = dict(trace)
    else:
        rows = _rows(trace)
    own = [
        f"{group}={literal(settings.pop(group), group)}"
        for group in CLASSES
        if isinstance(settings.get(group), dict) and "_target_" in settings[group]
    ]
    overrides = to_overrides(settings)
    refuse_swept(overrides)
    config = compose_config(overrides, {item.key_or_group: item.value() for item in map(parsed, own)})
    overrides += own
    target = _until_the_end() if folder is None else require_path("folder", folder)
    command = shlex.join(["from", "Python:", *overrides])
    try:
        require_writable(target)
    except OSError as error:
        raise RunFolderError(f"folder is {target}: {error.strerror}; give another") from None
    refuse_overwrite(target, config.overwrite, "folder", "overwrite=True")
    if edited := edited_since_import(config):
        warnings.warn(edited, RuntimeWarning, stacklevel=3)
    was_pressed()  # forgets what came late in an earlier call
    result = execute(config, target, command=command, origin=Origin.of(overrides), trace=rows)
    is_interrupted = was_pressed() or result.exit_status == INTERRUPTED
    if result.status != "complete":
        _TEMPORARY.discard(target.parent)  # the message says that the results so far are there
    if is_interrupted or result.status != "complete":
        raise KeyboardInterrupt(result.message) if is_interrupted else TestbedError(result.message)
    for sentence in [*([result.message] if result.message else []), *failures(result.summary["checks"])]:
        warnings.warn(sentence, RuntimeWarning, stacklevel=3)
    if folder is not None:
        return Run(result.folder, result.config, result.manifest)
    run = _TemporaryRun(result.folder, result.config, result.manifest)
    weakref.finalize(run, _delete, target.parent).atexit = False  # `_delete_temporary` is called then
    return run


class _TemporaryRun(Run):
    """A run whose folder is deleted with it."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if parent_process() is not None and self.path.parent in _TEMPORARY:  # who gets the copy would find no folder
            raise RunFolderError(f"{self.path} is deleted with this worker's run; give simulate a folder")
        return super().__reduce_ex__(protocol)


def _until_the_end() -> Path:
    """Returns a new temporary run folder, deleted when Python exits, unless the run is partial."""
    made = Path(tempfile.mkdtemp(prefix="testbed-"))
    _TEMPORARY.add(made)
    return made / "run"


@atexit.register
def _delete_temporary() -> None:
    for folder in [*_TEMPORARY]:
        _delete(folder)


def _delete(folder: Path) -> None:
    if folder in _TEMPORARY:  # else it is kept, or another process's
        _TEMPORARY.discard(folder)
        shutil.rmtree(folder, ignore_errors=True)


os.register_at_fork(after_in_child=_TEMPORARY.clear)


def _rows(trace: Trace | str | PathLike[str] | Iterable[Mapping[str, Any]]) -> Trace:
    if isinstance(trace, Trace | StreamedTrace):
        return checked(trace)
    if isinstance(trace, str | PathLike):
        if trace in options("trace") and not Path(trace).exists():
            raise TraceError(
                f"trace is {trace!r}, and a string is a file's path; give the group's keys: {{'name': {trace!r}, …}}"
            )
        return read_trace("auto", str(require_path("trace", trace)))
    if not isinstance(trace, Iterable):
        raise TraceError(
            f"trace is {shown(trace)}; give a Trace, a file, rows as dicts, or the trace group's keys as one dict"
        )
    return of_rows(trace)
