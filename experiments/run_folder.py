"""A run's folder as files: who may write into it, its log, what is written whole or not at all."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from experiments.config import RunConfig
from testbed.errors import RunFolderError
from testbed.records.operators import OPERATORS_FILE

_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # PyYAML's own, where it was built with libyaml

TRACE_FILE = "trace.jsonl"  # of a real run, and of a run whose trace was handed over in Python


def has_run(folder: Path) -> bool:
    """Whether a run, whole or partial, is in the folder."""
    return any((folder / name).exists() for name in ("done", "manifest.json", "requests.parquet"))


def refuse_overwrite(folder: Path, overwrite: bool) -> None:
    if has_run(folder) and not overwrite:
        raise RunFolderError(
            f"{folder} already holds a run, and runs are not overwritten; choose another hydra.run.dir or pass "
            "overwrite=true"
        )


def claim(folder: Path, config: RunConfig) -> None:
    """Makes the folder, removes what an overwritten run left, writes the resolved configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("done", "manifest.json", "summary.json", "requests.parquet", "steps.parquet", "decisions.jsonl",
             "tape.jsonl", OPERATORS_FILE, TRACE_FILE, "run.log", "config.yaml")  # fmt: skip
    for name in names:
        (folder / name).unlink(missing_ok=True)
    (folder / "config.yaml").write_text(yaml.dump(config.raw, Dumper=_Dumper, sort_keys=False))


def set_aside(folder: Path) -> Path:
    """Moves a partial run out of the way, so that the point is run again; nothing is lost."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.partial-{number}")).exists():
        number += 1
    shutil.move(folder, target)
    return target


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes whole or not at all."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def is_same_file(one: Path, other: Path) -> bool:
    """Whether both are there, and are one file."""
    return one.exists() and other.exists() and one.samefile(other)


class _LogFile(logging.FileHandler):
    """A log that cannot be written ends the run as any other file of its folder does, instead of printing a trace."""

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


def describe_failure(error: BaseException) -> str:
    """One line for whatever ended a run."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full ({error.filename or 'while writing'}); free some space and run again"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; choose another folder or file (hydra.run.dir, --out, --output)"
    if isinstance(error, MemoryError):
        return "out of memory; lower trace.limit, or record.token_times=false"
    return str(error) or type(error).__name__
