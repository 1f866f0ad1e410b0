"""Loads run folders into frames: one run, or every run below some folders. docs/analysis.md lists their columns.

Every fault of a folder is a RunFolderError of one line. A partial run can be loaded (`is_complete` is False), but a
sweep never mixes partial runs with complete ones: it lists them separately.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from analysis.describe import run_lines, sweep_lines
from analysis.measures.occupancy import run_end_ns
from analysis.measures.slo import SLO
from analysis.measures.summary import SUMMARY_VERSION, summarise
from analysis.naming import align, as_cell
from analysis.reading.files import read_json, read_manifest, read_said
from analysis.reading.frames import as_frame
from analysis.reading.request_columns import STRINGS, RequestColumns
from analysis.reading.rows import FileRows, naming, read_table, whole
from testbed.errors import ConfigError, RunFolderError
from testbed.foreign_text import shown, some
from testbed.records.schema import REPLACED, REQUEST_COLUMNS, RUN_FILES, STEP_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

_REPEAT = "run its command again with overwrite=true, or that of its sweep as it was"
_MARKS = ("manifest.json", "requests.parquet", "steps.parquet", "run.log")


def _in_notebook(self: object, **_: object) -> dict[str, str]:
    """What a notebook's cell shows of an object: what `print` does."""
    return {"text/plain": str(self)}


@dataclass(frozen=True)
class Run:
    """One run; `print(run)` shows the main facts. The frames are read on first use and have the columns of
    `testbed.records.schema`."""

    path: Path
    config: dict[str, Any] = field(repr=False)
    manifest: dict[str, Any] = field(repr=False)
    _under: dict[SLO, dict[str, Any]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_complete(self) -> bool:
        """Whether the run reached its end: the `done` marker exists and the manifest's status is not "partial"."""
        return (self.path / "done").exists() and self.manifest.get("status") != "partial"

    @property
    def is_simulated(self) -> bool:
        """Whether a simulation made the run's times; a real engine's are of a clock and vary from run to run."""
        return self.manifest.get("backend") == "sim"

    @property
    def notes(self) -> list[str]:
        """What was told with the run's numbers at its end, as settings without effect; also in its `run.log`."""
        return [*(self.manifest.get("notes") or ())]

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the trace as it was sent: two runs have the same load if and only if these are equal."""
        trace: dict[str, str | None] = self.manifest["trace"]
        return trace.get("sent_fingerprint", trace.get("fingerprint"))

    @cached_property
    def requests(self) -> pd.DataFrame:
        """The content of `requests.parquet`; token_ns stays an Arrow list column."""
        return read_frame(self.path / "requests.parquet", REQUEST_COLUMNS)

    @cached_property
    def steps(self) -> pd.DataFrame:
        return read_frame(self.path / "steps.parquet", STEP_COLUMNS)

    @cached_property
    def has_swapped(self) -> bool:
        """Whether any step swapped a sequence out; reads only that column."""
        batches = FileRows(self.path / "steps.parquet").batches(["num_swapped_out"])
        return any(whole(array).any() for (array,) in batches)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json` if this version of `summarise` wrote it, else computed from the records."""
        with suppress(RunFolderError):  # absent or damaged
            stored = read_json(self.path / "summary.json")
            if stored.get("summary_version") == SUMMARY_VERSION:
                return stored
        return self.summarise()

    @property
    def warmup_s(self) -> float:
        """The time after the first arrival whose requests count in no latency."""
        return self.flat_config.get("report.warmup_s") or 0.0

    @property
    def slo(self) -> SLO | None:
        """The SLO in the run's configuration; None if it sets no limit."""
        return SLO.parse({item.name: self.flat_config.get(f"slo.{item.name}") for item in fields(SLO)})

    def summary_under(self, slo: SLO | None) -> dict[str, Any]:
        """The summary with attainment and goodput under `slo` (None: the run's own SLO); computed once for each SLO."""
        if slo is None or slo == self.slo:
            return self.summary
        if slo not in self._under:
            self._under[slo] = self.summarise(slo)
        return self._under[slo]

    def summarise(self, slo: SLO | None = None) -> dict[str, Any]:
        """Computes the summary from the records, without reading summary.json, under `slo` or the run's own SLO. The
        files are read in batches, so neither a long run nor a sweep needs to fit in memory."""
        requests, steps = FileRows(self.path / "requests.parquet", STRINGS), FileRows(self.path / "steps.parquet")
        return summarise(requests, steps, self.manifest, slo or self.slo, self.warmup_s)

    @cached_property
    def counted(self) -> tuple[RequestColumns, int]:
        """The requests of which the summary's latencies are, those sent after the warm-up, and the run's end in ns."""
        end_ns = run_end_ns(self.requests, FileRows(self.path / "steps.parquet"))
        requests = RequestColumns.of(self.requests)
        arrival = requests.whole("arrival_ns")
        start_ns = arrival.min(initial=end_ns) + round(self.warmup_s * 1e9)
        is_counted = (arrival >= start_ns) & (arrival <= end_ns)
        return requests.where(is_counted), end_ns

    @cached_property
    def flat_config(self) -> dict[str, Any]:
        """The configuration with dotted keys. The trace's are those of the measured run that this one repeats, if it
        does. The model's recommended sampling is left out: it has no effect by itself, as `sampling` states what was
        used."""
        repeated = self.manifest.get("measured_trace")
        config = self.config if repeated is None else {**self.config, "trace": repeated}
        return {key: value for key, value in flatten(config).items() if not key.startswith("model.recommended.")}

    @property
    def frame(self) -> pd.DataFrame:
        """The numbers of the summary in one row; see `Sweep.frame`."""
        return Sweep(self.path, (self,), ()).frame

    def __str__(self) -> str:
        return "\n".join(run_lines(self))

    _repr_mimebundle_ = _in_notebook


@dataclass(frozen=True)
class Sweep:
    """Every run at or below some folders: the complete ones, and (path, reason) for each of the others. `print(sweep)`
    shows the main facts. path: the folder that contains all of them."""

    path: Path
    runs: tuple[Run, ...] = field(repr=False)
    incomplete: tuple[tuple[Path, str], ...]

    @cached_property
    def swept(self) -> list[str]:
        """The dotted configuration keys whose values differ between the runs."""
        return swept_keys(self.runs)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row for each run: `run` (relative path), the swept keys, and the summary's numbers with dotted names."""
        import pandas as pd  # not at the top: it is slow to import

        rows = []
        for run in self.runs:
            numeric = {k: v for k, v in flatten(run.summary).items() if isinstance(v, int | float) or v is None}
            rows.append(self._names(run) | numeric)
        return pd.DataFrame(rows)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """The requests of all runs: `run` and the swept keys, then the columns of `Run.requests`."""
        return self._joined([run.requests for run in self.runs])

    @cached_property
    def steps(self) -> pd.DataFrame:
        """The steps of all runs: `run` and the swept keys, then the columns of `Run.steps`."""
        return self._joined([run.steps for run in self.runs])

    def __str__(self) -> str:
        return "\n".join(sweep_lines(self.path, self.runs, self.incomplete, self.swept))

    _repr_mimebundle_ = _in_notebook

    def _names(self, run: Run) -> dict[str, Any]:
        values = {key: as_cell(run.flat_config.get(key)) for key in self.swept}
        return {"run": relative(run.path, self.path)} | values

    def _joined(self, frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
        import pandas as pd

        names = pd.DataFrame([self._names(run) for run in self.runs])
        rows = names.loc[names.index.repeat([len(frame) for frame in frames])].reset_index(drop=True)
        return pd.concat([rows, pd.concat(frames, ignore_index=True)], axis=1)


def num_replicas(run: Run) -> int:
    """The number of replicas (engines) that served the run's trace."""
    return max(int(run.manifest.get("num_replicas") or 1), 1)


def load(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Run | Sweep:
    """Loads a run's folder as a `Run`; any other folder, or several folders, as one `Sweep` of all runs at or below.

    Raises RunFolderError for a folder without any complete run. A run that is found twice counts once.
    """
    if isinstance(paths, str | os.PathLike) or not isinstance(paths, Iterable):
        folder = require_path("the run folder", paths)
        return load_run(folder) if any((folder / mark).exists() for mark in _MARKS) else load_sweep(folder)
    sweeps = [_found(path) for path in paths]
    if not sweeps:
        raise RunFolderError("no run folder given")
    align([run.flat_config for sweep in sweeps for run in sweep.runs])
    runs = {run.path.resolve(): run for sweep in sweeps for run in sweep.runs}
    incomplete = {path.resolve(): (path, reason) for sweep in sweeps for path, reason in sweep.incomplete}
    above = Path(os.path.commonpath([sweep.path.resolve() for sweep in sweeps]))
    return Sweep(above, tuple(runs.values()), tuple(incomplete.values()))


def require_path(name: str, value: object) -> Path:
    """The argument `value`, called `name` in the error, as a Path. Raises ConfigError if it is not a path."""
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name} is {shown(value)}; give a path, as a string or a pathlib.Path")
    if value == "":
        raise ConfigError(f"{name} is empty; name one")
    if "\0" in str(value):
        raise ConfigError(f"{name} is {shown(str(value))}; a path has no NUL character")
    return Path(value)


def load_run(path: str | os.PathLike[str]) -> Run:
    """The run in folder `path`. Raises RunFolderError if it is not a run folder, lacks a file, or a file is damaged."""
    folder = require_path("the run folder", path)
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: no such run folder")
    missing = [name for name in RUN_FILES if not (folder / name).exists()]
    if len(missing) == len(RUN_FILES):
        if below := [str(path) for path in run_folders(folder) if path != folder]:
            raise RunFolderError(f"{folder} is no run, but has {len(below)} below it; name one: {some(below)}")
        log = folder / "observed.jsonl"
        hint = f"; of vLLM's log there is a run to be made: testbed observe import {log}" if log.exists() else ""
        raise RunFolderError(f"{folder}: not a run folder (it has none of {', '.join(RUN_FILES)}){hint}")
    if missing:
        has_ended = (folder / "done").exists()
        why = _cure(folder, "the run ended, and its files were deleted since") if has_ended else _cure(folder)
        raise RunFolderError(f"{folder}: {', '.join(missing)} missing; {why}")
    try:
        _check_schema(folder / "requests.parquet", REQUEST_COLUMNS)
        _check_schema(folder / "steps.parquet", STEP_COLUMNS)
    except RunFolderError:
        if (folder / "done").exists():
            raise
        raise RunFolderError(f"{folder}: its records end in the middle; {_cure(folder)}") from None
    return Run(folder, read_said(folder / "config.yaml"), read_said(folder / "manifest.json"))


def _cure(folder: Path, why: str = "the run did not finish") -> str:
    """What a user can do about a run that did not reach its end. Requests that a live vLLM served cannot be served
    again, but the tape has all decisions."""
    if str(read_manifest(folder).get("command")).startswith("scheduler_cls="):
        return (
            f"the vLLM that it is of still serves, or ended before its requests did: `testbed parity {folder}` replays "
            f"its tape, and `testbed run from={folder} backend=sim` simulates its requests"
        )
    if command := restoring(folder):
        return f"{why}, but its tape has all steps up to there: `{command}` writes their records"
    before = f"; the run before it is in {folder / REPLACED}" if (folder / REPLACED).exists() else ""
    return f"{why}: {_REPEAT}{before}"


def restoring(folder: Path) -> str:
    """The command that writes the records of a real run anew, from its tape; "" if there is no tape of one engine."""
    is_taped = (folder / "tape.jsonl").exists()
    words = ["testbed", "run", f"from={folder}", "backend=sim", "cost=recorded", f"cost.run={folder}"]
    return shlex.join(words) if is_taped else ""


def load_sweep(path: str | os.PathLike[str]) -> Sweep:
    """Every run at or below `path`. Raises RunFolderError if none is complete.

    Runs are in path order. Within a folder, sweep points are ordered by their number in the sweep, and by command if
    several commands have points of the same number.
    """
    sweep = _found(path)
    align([run.flat_config for run in sweep.runs])
    return sweep


def _found(path: str | os.PathLike[str]) -> Sweep:
    """As `load_sweep`, with configurations that are not aligned yet."""
    root = require_path("the run folder", path)
    if not root.is_dir():
        raise RunFolderError(
            f"{root}: {'a file; give a run folder, or a folder of runs' if root.is_file() else 'no such folder'}"
        )
    runs, incomplete = [], []
    for folder in run_folders(root):
        if _was_made_again(folder):
            continue
        try:
            run = load_run(folder)
        except RunFolderError as error:
            incomplete.append((folder, _failure(folder) or str(error).removeprefix(f"{folder}: ")))
            continue
        if run.is_complete:
            runs.append(run)
        else:
            why = _failure(folder) or _cure(folder, "the run is partial (interrupted or still going)")
            incomplete.append((folder, why))
    incomplete.sort(key=lambda one: (one[0].parent, read_manifest(one[0]).get("point") or 0))
    if not runs:
        found = f"; {len(incomplete)} incomplete, the first: {incomplete[0][1]}" if incomplete else ""
        raise RunFolderError(f"{root}: no complete run folder at or below it{found}")
    return Sweep(root, tuple(_in_order(runs)), tuple(incomplete))


def _failure(folder: Path) -> str:
    """The reason in the manifest for which the run did not reach its end; "" if there is none."""
    return str(read_manifest(folder).get("failure") or "")


def _was_made_again(folder: Path) -> bool:
    """Whether this is an unfinished sweep point that was set aside and has been run to its end since."""
    name, _, number = folder.name.rpartition(".partial-")
    return bool(name) and number.isdigit() and (folder.parent / name / "done").exists()


def same_trace(runs: Sequence[Run]) -> str:
    """The trace fingerprint that all `runs` share. Raises RunFolderError if they differ or one has none."""
    first = runs[0]
    for run in runs:
        if not run.fingerprint:
            raise RunFolderError(f"{run.path}: manifest.json has no trace fingerprint, so the run cannot be paired")
        if run.fingerprint != first.fingerprint:
            raise RunFolderError(
                f"{first.path} and {run.path} ran different traces (fingerprints {first.fingerprint} and "
                f"{run.fingerprint}); pair runs of one trace only"
            )
    return str(first.fingerprint)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as a flat one with dotted keys; lists stay values, empty mappings are dropped."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def swept_keys(runs: Sequence[Run]) -> list[str]:
    """The dotted configuration keys whose values differ between runs, in the order of the configuration files.

    Hydra's own keys, and values that contain the run's folder, do not count.
    """

    def is_of_folder(key: str) -> bool:
        values = [(run.flat_config.get(key), run.path.name) for run in runs]
        return any(isinstance(value, str) and os.sep in value and name in Path(value).parts for value, name in values)

    keys = differing_keys([run.flat_config for run in runs])
    return [key for key in keys if not key.startswith("hydra.") and not is_of_folder(key)]


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values differ between flat configurations, or that some lack, in order of occurrence."""
    absent = object()
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if any(one.get(key, absent) != configs[0].get(key, absent) for one in configs[1:])]


def relative(path: Path, start: Path) -> str:
    """`path` relative to the folder `start`, with forward slashes."""
    return Path(os.path.relpath(path.resolve(), start.resolve())).as_posix()


def run_folders(root: Path) -> list[Path]:
    """Every folder at or below `root` that has a file of a run, in path order; hidden folders are not searched."""
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        if any(mark in files for mark in _MARKS):
            found.append(Path(folder))
    return found


def _in_order(runs: Sequence[Run]) -> list[Run]:
    places = {folder: number for number, folder in enumerate(dict.fromkeys(run.path.parent for run in runs))}

    def place(run: Run) -> tuple[int, int, str]:
        folder, number = places[run.path.parent], run.manifest.get("point")
        return (folder, -1, "") if number is None else (folder, number, str(run.manifest.get("command")))

    return sorted(runs, key=place)


def _check_schema(file: Path, columns: Mapping[str, str]) -> None:
    with naming(file):
        names = set(pq.read_schema(file).names)
    missing = [name for name in columns if name not in names]
    if missing:
        raise RunFolderError(
            f"{file}: columns missing: {', '.join(missing)}; another version of the testbed wrote it: repeat the run "
            f"with this one (testbed run from={file.parent})"
        )


def read_frame(file: Path, columns: Iterable[str]) -> pd.DataFrame:
    """Those of `columns` that the file of records has. Raises RunFolderError if it cannot be read."""
    return as_frame(read_table(file, columns))
