"""The points of a sweep: their folders, whether they are finished, and the jobs of a launcher that run them.

A job takes one point after another that no other job has taken. The launcher's overhead is therefore paid once per job,
and a job that dies loses only its current point. Jobs and sweep communicate only through a folder, the board, so that
any launcher can be used.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import parent_process
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, TextIO

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from experiments.configuration.config import RunConfig
from experiments.configuration.saved import changed_keys, read_manifest
from experiments.runs.identity import Identity, identity_of
from experiments.runs.interrupt import ended_as_interrupted, was_pressed
from experiments.runs.origin import Origin
from experiments.runs.replacing import put_back
from experiments.runs.run import INTERRUPTED, RunResult, execute
from experiments.runs.run_folder import SET_ASIDE, describe_failure, did_not_begin, has_run, is_locked, set_aside
from testbed.errors import RunFolderError, TestbedError
from testbed.records.schema import RUN_FILES

if TYPE_CHECKING:
    from analysis.measures.notes import Note

_AT_WORK = Lock()  # held from a point's taking to its outcome
_WATCH_S = 0.5
_BOARD, _OWNER = ".points-", "owner"
_NAME = re.compile(r"([0-9a-f]{12})-[0-9a-f]{8}")  # the name of a point's folder: Identity.name


@dataclass(frozen=True, slots=True)
class Point:
    """A point. label: its swept overrides. root: the sweep's folder."""

    label: str
    command: str
    raw: dict[str, Any]
    root: str
    origin: Origin

    def place(self, identity: Identity) -> Path:
        return Path(self.root, identity.name)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a point. status: complete, failed (also if requests can never fit), interrupted, elsewhere (another
    process is running it). notes: the fields of each `analysis.measures.notes.Note`."""

    label: str
    status: str
    folder: str = ""
    message: str = ""
    exit_status: int = 0
    notes: tuple[tuple[str, str, float | None], ...] = ()


# --- folders ---


class Known:
    """The point folders in a sweep's folder, by the configuration hash at the start of their names, and by the settings
    that their commands gave: defaults may have changed since."""

    def __init__(self, root: Path) -> None:
        self._by_config: dict[str, list[Path]] = {}
        self._by_settings: dict[frozenset[tuple[str, str]] | None, list[Path]] = {}  # read when it is first asked for
        for folder in sorted(root.iterdir()) if root.is_dir() else ():
            if match := _NAME.fullmatch(folder.name):
                self._by_config.setdefault(match[1], []).append(folder)

    def make_room(
        self, folder: Path, identity: Identity, origin: Origin, raw: dict[str, Any]
    ) -> Iterator[tuple[str, Path]]:
        """Moves aside runs that are in the place of a point; yields (reason, new path). Runs that another process is
        writing are left; folders of runs that did not begin are deleted. raw: the point's resolved configuration."""
        others = self._by_config.get(identity.config[:12], []) + self._given_as(origin)
        for path in (*(path for path in dict.fromkeys(others) if path != folder), folder):
            if did_not_begin(path) and not is_locked(path):
                shutil.rmtree(path, ignore_errors=True)
            if not has_run(path) or is_locked(path):
                continue
            is_partial = not (path / "done").exists()
            if path == folder and (is_partial or _is_damaged(path)):
                yield "partial" if is_partial else "damaged", set_aside(path, path.with_name(f"{path.name}.partial"))
                continue
            why = identity.changes_since(read_manifest(path), changed_keys(path, raw))
            yield f"stale: {why}", set_aside(path, path.parent / SET_ASIDE / path.name)

    def _given_as(self, origin: Origin) -> list[Path]:
        """The folders of runs whose commands gave the same settings."""
        if not self._by_config:
            return []
        from analysis.comparison.groups import settings_given  # not at the top: Arrow is slow to import

        if not self._by_settings:
            for folder in (folder for same in self._by_config.values() for folder in same):
                self._by_settings.setdefault(settings_given(read_manifest(folder)), []).append(folder)
        return self._by_settings.get(settings_given(asdict(origin)), [])


def is_done(folder: Path, identity: Identity) -> bool:
    return (folder / "done").exists() and identity.is_of(read_manifest(folder)) and not _is_damaged(folder)


def _is_damaged(folder: Path) -> bool:
    """Whether a finished run has lost files, or the ends of its tables."""
    return not all(_has_its_end(folder / name) for name in RUN_FILES)


def _has_its_end(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return file.suffix != ".parquet" or (opened.seek(-4, os.SEEK_END) > 0 and opened.read() == b"PAR1")
    except OSError:
        return False


# --- jobs ---


@contextmanager
def board_in(root: Path) -> Iterator[Board]:
    """Context in which the sweep's folder has a board that this process owns and reads."""
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=_BOARD, dir=root))
    try:
        with (folder / "new").open("wb") as owner:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(owner, fcntl.LOCK_EX)
            (folder / "new").rename(folder / _OWNER)  # renamed after locking: never visible without its lock
            yield Board(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def say_killed(root: Path) -> list[Path]:
    """Records a failure for each point that no job had taken when its sweep was killed. Returns the boards of killed
    sweeps, from which jobs on other machines may still take points."""
    boards = [folder for folder in root.glob(f"{_BOARD}*") if _is_left(folder)]
    for board in boards:
        with suppress(OSError, ValueError, TypeError, KeyError):  # a truncated list of points is ignored
            for index, point in enumerate(Board(board).points()):
                if not (board / f"{index}.taken").exists():
                    say_not_begun(point, "its sweep was killed before it began")
    return boards


def _is_left(board: Path) -> bool:
    """Whether the sweep that owned a board has ended; False on a file system without locks, where this is unknown."""
    try:
        with (board / _OWNER).open("rb") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class Board:
    """A folder in which jobs record which points they took, and the results. It is deleted when the sweep ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: set[str] = set()
        self.num_taken = 0  # at the last call of `news`

    def write(self, points: list[Point]) -> None:
        (self.folder / "points").write_text(json.dumps([asdict(point) for point in points]))

    def points(self) -> list[Point]:
        try:
            stored = json.loads((self.folder / "points").read_bytes())
            return [Point(**{**fields, "origin": Origin(**fields["origin"])}) for fields in stored]
        except FileNotFoundError:
            return []

    def take(self, index: int) -> bool:
        """Takes a point; returns False if another job has taken it, or the board is gone."""
        try:
            (self.folder / f"{index}.taken").open("x").close()
        except (FileExistsError, FileNotFoundError):
            return False
        return True

    def say(self, index: int, outcome: Outcome) -> None:
        file = self.folder / f"{index}.said"
        try:
            file.with_suffix(".new").write_text(json.dumps(asdict(outcome)))
            os.replace(file.with_suffix(".new"), file)
        except FileNotFoundError:
            return  # the sweep has ended

    def news(self) -> list[Outcome]:
        """Returns the outcomes since the last call. It is called in a thread, so it imports nothing: two threads that
        import modules of one package may wait for each other."""
        names = os.listdir(self.folder)
        self.num_taken = sum(name.endswith(".taken") for name in names)
        new = sorted(name for name in names if name.endswith(".said") and name not in self._read)
        self._read.update(new)
        said = [json.loads((self.folder / name).read_bytes()) for name in new]
        return [Outcome(**{**fields, "notes": tuple(map(tuple, fields["notes"]))}) for fields in said]


@dataclass(frozen=True, slots=True)
class JobConfigs:
    """In place of Hydra's loader, which launchers ask for the configuration of a job: it is the sweep's own, as the
    points are on the board. Hydra would compose it anew, which takes longer than many a point."""

    root: str

    def load_sweep_config(self, master: DictConfig, overrides: list[str]) -> DictConfig:
        job = deepcopy(master)
        with open_dict(job):
            job.hydra.sweep.update(dir=self.root, subdir=".")
            job.hydra.overrides.task = overrides
        return job


@dataclass(frozen=True, slots=True)
class Share:
    """The task function of a launcher's job: runs points. limit: points that it may take; None: all that are left.
    started_by: the sweep's process. A worker of joblib's ends with it, after the point that it is running."""

    board: str
    limit: int | None
    working_folder: str
    started_by: int

    def __call__(self, node: Any) -> None:
        if os.path.isdir(self.working_folder):
            os.chdir(self.working_folder)  # a launcher may have started this process elsewhere
        if self.working_folder not in sys.path:
            sys.path.append(self.working_folder)  # as cli.main does
        board, num_taken = Board(Path(self.board)), 0
        points = board.points()
        own = HydraConfig.get().job.num * (self.limit or 0)  # each job begins at another point
        is_worker = parent_process() is not None  # not on a cluster, nor where the sweep runs the points itself
        if is_worker:
            _end_with(self.started_by)
        for index in (*range(own, len(points)), *range(own)):
            if num_taken == self.limit or (is_worker and os.getppid() != self.started_by):
                return
            with _AT_WORK:
                if not board.take(index):
                    continue
                num_taken += 1
                outcome = _run(points[index])
                board.say(index, outcome)
            if outcome.status == "interrupted":
                return


@cache
def _end_with(sweep: int) -> None:
    """Has this process end when that of the sweep has, and no point is at work: it would wait for a next task, or for
    somebody to read its result, for ever."""

    def watch() -> None:
        while os.getppid() == sweep:
            time.sleep(_WATCH_S)
        with _AT_WORK:
            os._exit(1)

    Thread(target=watch, daemon=True).start()


def _run(point: Point) -> Outcome:
    """Runs a point without printing: the process that reads the board prints the outcomes."""
    folder = ""
    try:
        config = RunConfig.from_container(point.raw)
        identity = identity_of(config)
        folder = str(point.place(identity))
        if is_done(Path(folder), identity) and not config.overwrite:
            return Outcome(point.label, "complete", folder)
        with redirect_stderr(_NoTerminal(sys.stderr)), ended_as_interrupted():  # though a launcher may handle SIGTERM
            try:
                result = execute(config, Path(folder), command=point.command, origin=point.origin)
            except RunFolderError:  # perhaps another sweep is using the same folder
                if is_locked(Path(folder)):
                    return Outcome(point.label, "elsewhere", folder)
                if is_done(Path(folder), identity) and not config.overwrite:
                    return Outcome(point.label, "complete", folder)
                raise
    except KeyboardInterrupt:
        return Outcome(point.label, "interrupted", folder, exit_status=INTERRUPTED)
    except (TestbedError, OSError, MemoryError) as error:
        message, status = describe_failure(error), error.exit_status if isinstance(error, TestbedError) else 1
        if folder:
            point.origin.say_failed(Path(folder), config, message, point.command)
        return Outcome(point.label, "failed", folder, message, status)
    if was_pressed() or result.exit_status == INTERRUPTED:  # even if this run is complete: do not begin another
        return Outcome(point.label, "interrupted", folder, result.message, INTERRUPTED)
    if result.exit_status:
        return Outcome(point.label, "failed", folder, result.message, result.exit_status, result.notes)
    return Outcome(point.label, "complete", folder, notes=_notes_of(result))


def _notes_of(result: RunResult) -> tuple[Note, ...]:
    """A run's notes, with the error of fitted step times, which the first line of a single run has, and its message."""
    from analysis.measures.notes import Note  # not at the top: Arrow is slow to import

    error, manifest = result.manifest["cost_error"], result.manifest
    of = f"{manifest['model']} on {manifest['device']}, cost={manifest['cost']}"
    of_fit = [] if error is None else [f"{of}: left-out steps are {error['median']:.1%} off, P90 {error['p90']:.1%}"]
    said = [result.message] if result.message else []
    return *(Note(text, of) for text in of_fit), *result.notes, *map(Note.of_text, said)


def say_not_begun(point: Point, why: str) -> None:
    """Records a failure for a point that was not begun, if its folder holds no run and its configuration is valid."""
    with suppress(TestbedError):
        config = RunConfig.from_container(point.raw)
        put_back(folder := point.place(identity_of(config)))
        point.origin.say_failed(folder, config, why, point.command)


class _NoTerminal(io.TextIOBase):
    """Standard error as no terminal, which has no bars."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text)
