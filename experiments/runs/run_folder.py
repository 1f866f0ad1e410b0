"""The files of a run folder: locks, the log, atomic writes, what may be written over (by a new run: replacing.py).

A process that writes holds a lock on the log; the operating system releases it when the process dies.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import yaml

from experiments.configuration.config import RunConfig
from experiments.configuration.saved import TRACE_FILE, read_manifest
from sim.cost.config import RooflineConfig
from testbed.errors import ConfigError, RunFolderError
from testbed.output import whole_file
from testbed.records.operators import OPERATORS_FILE
from testbed.records.schema import REPLACED, STEP_TRACE_FILE

_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the fast one, if PyYAML was built with libyaml

LOG_FILE = "run.log"
REPLACING = ".replacing"  # see replacing.py
_OF_RUNS = ("done", "manifest.json", "requests.parquet", REPLACED, REPLACING)
_WRITTEN = (
    "done", "manifest.json", "requests.parquet", "summary.json", "steps.parquet", "decisions.jsonl", OPERATORS_FILE,
    TRACE_FILE, STEP_TRACE_FILE, "config.yaml", "timeline.json",
)  # fmt: skip
ABSENT: dict[str, Any] = dict.fromkeys((  # entries that not every manifest has: those of other backends
    "cost", "cost_fit", "cost_error", "cost_kernels", "cost_shares", "estimator", "attention", "attention_reasons",
    "weights", "core", "compiler", "router", "replicas", "replay", "host", "digest", "notes",
))  # fmt: skip
SET_ASIDE = ".stale"  # folder in a sweep's folder for finished points with another identity


def has_run(folder: Path) -> bool:
    """Whether the folder holds a run, complete or partial. A run that did not begin does not count."""
    return any((folder / name).exists() for name in _OF_RUNS) and not did_not_begin(folder)


def did_not_begin(folder: Path) -> bool:
    """Whether the folder only records why a run failed before it began."""
    is_alone = not any((folder / name).exists() for name in _OF_RUNS if name != "manifest.json")
    return is_alone and read_manifest(folder).get("status") == "failed"


def refuse_overwrite(
    folder: Path, overwrite: bool, key: str = "hydra.run.dir", allow: str | None = "overwrite=true"
) -> None:
    """Raises RunFolderError if a folder is in use, holds runs, or has files that a run would overwrite. key: the option
    that names the folder; allow: the option that permits replacing a run; None: there is none."""
    if is_locked(folder):
        raise _in_use(folder, key)
    if not has_run(folder) and (point := next(folder.glob("*/manifest.json"), None)) is not None:
        raise RunFolderError(
            f"{folder} holds other runs ({point.parent.name}), which a run there would hide; choose another {key}"
        )
    refuse_run(folder.parent, key)
    if overwrite:
        return
    other = f"choose another {key}" + ("" if allow is None else f" or pass {allow}")
    if has_run(folder):
        more = f" (and in {REPLACED} the one before it)" if (folder / REPLACED).exists() else ""
        raise RunFolderError(f"{folder} already holds a run{more}, and runs are not overwritten; {other}")
    found = [name for name in (*_WRITTEN, LOG_FILE) if (folder / name).exists()]
    was_begun = {LOG_FILE, "config.yaml"}.issubset(found)  # the first files of any run: left by one that was killed
    if found and not was_begun and (found != [LOG_FILE] or (folder / LOG_FILE).stat().st_size):
        raise RunFolderError(f"{folder / found[0]} is no run's, and a run there would write over it; {other}")


def refuse_existing(path: Path | None, overwrite: bool, key: str = "--out") -> None:
    """Raises RunFolderError if a command's output is a file of a run, or exists and `overwrite` is False; OSError if it
    cannot be looked at, as a link to itself. key: the option that names the output."""
    if path is None:
        return
    file = Path(os.path.realpath(path))  # not of a link
    is_of_run = (file.name in (*_WRITTEN, LOG_FILE) and file.name != "timeline.json") or file.match("tape*.jsonl")
    if is_of_run and has_run(file.parent):
        raise RunFolderError(f"{path} is a file of the run there; choose another {key}")
    with suppress(FileNotFoundError):
        path.stat()
        if not overwrite:
            raise RunFolderError(f"{path} exists; choose another {key} or pass --overwrite")


def refuse_run(folder: Path, key: str) -> None:
    """Raises RunFolderError if a folder for several runs itself holds a run: readers would see only that run."""
    if has_run(folder):
        raise RunFolderError(f"{folder} holds a run, and other runs need a folder of their own; choose another {key}")


def check_priced(folder: Path, config: RunConfig, overrides: Sequence[str]) -> None:
    """Raises ConfigError if a run of a served model whose steps cannot be priced is simulated with the roofline model,
    unless the user chose another model. overrides: the user's changes to the run in the folder."""
    why = read_manifest(folder).get("unpriced")
    is_chosen = any(item.partition("=")[0] in ("model", "model.path") for item in overrides)
    if why and config.is_simulated and isinstance(config.cost, RooflineConfig) and not is_chosen:
        raise ConfigError(f"{folder}: {why}; say whose prices to take, as model=llama3.1_8b, or choose another cost")


def named_folder(key: str, value: object) -> Path:
    """Returns the folder that a key names. Raises ConfigError if it is empty: that means the working directory."""
    is_name = isinstance(value, str | int | float) and value != "???"  # OmegaConf's marker of a missing value
    if not is_name or not str(value).strip():
        said = "empty" if is_name else "null" if value is None else "no text"
        raise ConfigError(f"{key} is {said}; name a folder, as {key}=runs/one, or leave it out")
    return Path(str(value))


def require_writable(folder: Path) -> None:
    """Raises OSError if nothing can be written to a folder; called before a long run starts."""
    folder.mkdir(parents=True, exist_ok=True)
    TemporaryFile(dir=folder).close()
    with suppress(OSError):
        folder.rmdir()  # it is made again when something is written


def claim(folder: Path, config: RunConfig) -> None:
    """Makes the folder, removes the files of a run in it, and writes the resolved configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files_of_run(folder):
        file.unlink()
    if (folder / LOG_FILE).exists():
        os.truncate(folder / LOG_FILE, 0)  # not deleted: this file holds the lock
    (folder / "config.yaml").write_text(as_yaml(config.raw))


def files_of_run(folder: Path, more: Sequence[str] = ()) -> list[Path]:
    """Returns the files of a run in the folder, and `more`, but not the log: it holds the lock."""
    named = [folder / name for name in (*_WRITTEN, *more)]
    return [file for file in (*named, *folder.glob("tape*.jsonl")) if os.path.lexists(file)]


def as_yaml(tree: dict[str, Any]) -> str:
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context that makes the folder and locks it against other processes; removes it if nothing was written to it.
    Raises RunFolderError if another process has the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with locking(folder / LOG_FILE, folder):
        try:
            yield
        finally:
            with suppress(OSError):
                if os.listdir(folder) == [LOG_FILE] and not (folder / LOG_FILE).stat().st_size:
                    (folder / LOG_FILE).unlink()
                    folder.rmdir()


@contextmanager
def locking(file: Path, folder: Path, key: str = "hydra.run.dir") -> Iterator[None]:
    """Context that holds the lock of a folder, which is in `file`. Raises RunFolderError if another process has it.
    key: the option that names the folder, for the message."""
    with file.open("ab") as lock:
        is_ours = False
        with suppress(FileNotFoundError):  # the process that had it removed it, and another may have made it again
            is_ours = _lock(lock) and os.path.samestat(os.fstat(lock.fileno()), file.stat())
        if not is_ours:
            raise _in_use(folder, key)
        yield


@contextmanager
def alone(file: Path, out: Path, key: str = "--out") -> Iterator[None]:
    """Context that locks the output `out` of a command against other processes by `file`: itself, or an empty file that
    is removed at the end. Raises RunFolderError if another process has the lock."""
    with locking(file, out, key):
        try:
            yield
        finally:
            with suppress(OSError):
                if file.is_file() and not file.stat().st_size:  # nobody's own
                    file.resolve().unlink()  # a link stays


def is_locked(folder: Path) -> bool:
    """Whether a live process is writing to the folder."""
    try:
        with (folder / LOG_FILE).open("rb") as log:
            return not _lock(log, fcntl.LOCK_SH)
    except OSError:
        return False  # no log, no writer


def refuse_running(folder: Path) -> None:
    """Raises RunFolderError if a live process is writing to the folder: its tables cannot be read before their end."""
    if is_locked(folder):
        raise RunFolderError(f"{folder}: another process is still writing this run; wait for its end")


def _lock(file: IO[bytes], kind: int = fcntl.LOCK_EX) -> bool:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return True  # a device, as /dev/null, which many may write to
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True


def _in_use(folder: Path, key: str) -> RunFolderError:
    return RunFolderError(f"another process is writing to {folder}; wait for its end, or choose another {key}")


def set_aside(folder: Path, target: Path) -> Path:
    """Moves a run to `target-1`, or the next free number, and returns the new path."""
    number = 1
    while (free := target.with_name(f"{target.name}-{number}")).exists():
        number += 1
    free.parent.mkdir(exist_ok=True)
    shutil.move(folder, free)
    return free


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file atomically."""
    with whole_file(path) as part:
        part.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")


def is_same_file(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


class _LogFile(logging.FileHandler):
    """A log file whose write errors end the run, like those of its other files, instead of printing a stack trace."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        raise


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    log = logging.getLogger("testbed")
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


_NO_ROOM = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("the disk quota is used up", "free some space"),
    errno.EFBIG: ("File too large for this shell or file system", "raise the limit (ulimit -f)"),
    errno.EMFILE: ("too many open files", "raise the limit (ulimit -n)"),
}
_OF_NO_FILE = (errno.ENOMEM, errno.EAGAIN)  # of a process that cannot be started


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Context that adds the name of `target` to an OSError without a file name, as some libraries raise it, or of a
    temporary file that cannot be made beside it, or was in a temporary folder that is gone."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            is_of_target = error.errno not in _OF_NO_FILE
        elif error.errno in _NO_ROOM:
            is_of_target = not os.path.lexists(os.path.dirname(os.path.abspath(error.filename)))
        else:
            is_made = error.errno in (errno.EACCES, errno.EROFS) or Path(str(error.filename)).name.startswith(".")
            is_of_target = is_made and _is_absent_beside(error.filename, target)
        if is_of_target:
            error.filename = str(target)
        raise


def _is_absent_beside(file: str, target: Path) -> bool:
    """Whether a file is not there, in the folder of `target`; of others that may not be seen, that is unknown."""
    return os.path.dirname(os.path.abspath(file)) == str(target.absolute().parent) and not os.path.lexists(file)


def describe_failure(error: BaseException, target: Path | str = "while writing") -> str:
    """Describes the exception that ended a run in one line. target: what was written, if the exception has no name."""
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        what, fix = _NO_ROOM[error.errno]
        return f"{what} ({error.filename or target}); {fix} and run again"
    if isinstance(error, OSError) and error.filename is not None:
        why = error.strerror or error
        return f"{error.filename}: {why}; choose another folder or file"
    if isinstance(error, MemoryError):
        return "out of memory; lower trace.limit, or record.token_times=false"
    return str(error) or type(error).__name__


def has_results(folder: Path) -> bool:
    """Whether a run that ended early is worth keeping: a request finished, it was made of a log whose steps all are in
    it, or a tape has the steps of lost records."""
    from analysis.load import load_run  # not at the top: Arrow is slow to import
    from analysis.reading.rows import read_table

    try:
        if "no_profile" in load_run(folder).manifest:  # of logs alone
            return True
        reasons = read_table(folder / "requests.parquet", ["finish_reason"]).column(0)
        return bool(reasons.null_count < len(reasons))
    except RunFolderError:
        return any(file.stat().st_size for file in folder.glob("tape*.jsonl"))


def describe_kept(folder: Path) -> str:
    """Returns what can be read of a run that ended early; its records cannot be read if they were not closed."""
    from analysis.load import load_run, restoring  # not at the top: Arrow is slow to import

    before = ""
    if (folder / REPLACED).exists():
        if not has_results(folder):
            return f"the run before it stays in {folder}"
        before = f"; the run before it is in {folder / REPLACED}"
    try:
        load_run(folder)
    except RunFolderError:
        if command := restoring(folder):
            return f"its records in {folder} cannot be read; `{command}` writes them anew from its tape{before}"
        tape = ", but its tapes can (testbed parity)" if next(folder.glob("tape*.jsonl"), None) else ""
        return f"its records in {folder} cannot be read{tape}; run it again with overwrite=true{before}"
    return f"partial results kept in {folder}{before}"
