"""A run in place of another: the earlier one stays until the new one is complete.

While the new run is written, the files of the earlier one are in the folder `.replaced` beside them. They are deleted
when the new run is complete, and come back if it ends without results; with partial results, both stay. They are moved
by way of `.replacing`, so that they are together again after a process that was killed at any moment:

    .replacing            the move was not ended; the run in it belongs to the rest in the folder
    .replaced, no `done`  the run in it is the earlier one; what is in the folder is of a new one that has not ended
    .replaced, `done`     the new run is complete; the earlier one is left over
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from experiments.configuration.config import RunConfig
from experiments.runs.interrupt import undisturbed
from experiments.runs.run_folder import (
    LOG_FILE,
    REPLACING,
    claim,
    did_not_begin,
    files_of_run,
    has_results,
    locked,
    log_to,
)
from testbed.errors import RunFolderError
from testbed.records.schema import REPLACED


@contextmanager
def claimed(folder: Path, config: RunConfig) -> Iterator[None]:
    """Context that locks and claims the folder and opens its log. Raises RunFolderError if another process has it."""
    with locked(folder), replacing(folder):
        claim(folder, config)
        with log_to(folder / LOG_FILE):
            yield


@contextmanager
def replacing(folder: Path, more: Sequence[str] = ()) -> Iterator[None]:
    """Context in which a run is written to a folder, which is locked, perhaps in place of another. more: files that its
    writer writes beside those of all runs."""
    try:
        _set_earlier_aside(folder, more)
        yield
    finally:
        with undisturbed():
            _settle(folder, more)


def put_back(folder: Path) -> None:
    """Puts the earlier run of a folder back if the new one was killed without results."""
    if any((folder / name).exists() for name in (REPLACED, REPLACING)):
        with suppress(RunFolderError), locked(folder), undisturbed():  # unless another process is writing to it
            _settle(folder, ())


def _set_earlier_aside(folder: Path, more: Sequence[str]) -> None:
    earlier, moving = folder / REPLACED, folder / REPLACING
    _move_back(folder)  # of a killed process
    if (folder / "done").exists() and earlier.exists():
        shutil.rmtree(earlier)
    if earlier.exists() or did_not_begin(folder) or not (files := files_of_run(folder, more)):
        return  # with `earlier`: what is in the folder is of a run that has not ended, and makes room for the new one
    moving.mkdir()
    for file in files:
        file.rename(moving / file.name)
    if (folder / LOG_FILE).exists():
        shutil.copyfile(folder / LOG_FILE, moving / LOG_FILE)
    moving.rename(earlier)


def _settle(folder: Path, more: Sequence[str]) -> None:
    earlier = folder / REPLACED
    _move_back(folder)  # only if the move was interrupted
    if not earlier.exists():
        return
    if (folder / "done").exists():
        shutil.rmtree(earlier)
    elif not has_results(folder):
        for file in files_of_run(folder, more):
            file.unlink()
        earlier.rename(folder / REPLACING)
        _move_back(folder)


def _move_back(folder: Path) -> None:
    moving = folder / REPLACING
    if not moving.exists():
        return
    for file in list(moving.iterdir()):
        if file.name == LOG_FILE:  # the file in the folder holds the lock
            shutil.copyfile(file, folder / LOG_FILE)
            file.unlink()
        else:
            file.rename(folder / file.name)
    moving.rmdir()
