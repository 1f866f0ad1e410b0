"""Runs that are ended from outside; which ranks a process has started, and whether they are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from analysis.load import load_run
from real.parallel.processes import WORKER
from tests.experiments.kit import REAL, TINY, latest, manifest_of, say

LONG = ("trace.num_requests=9000", "trace.rate=300", "trace.prompt.value=16", "trace.output.value=16")


def long_run(folder: Path, *options: str) -> list[str]:
    return ["run", *latest(*TINY, *LONG, *REAL, *options, f"hydra.run.dir={folder}")]


def stepping(folder: Path, files: Sequence[str], *options: str) -> subprocess.Popen[str]:
    """A long run in a session of its own, as a terminal starts it, once it steps: these files of its folder grow."""
    command = [sys.executable, "-m", "experiments", *long_run(folder, *options)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip
    wait_for_steps(folder, files, process.poll)
    return process


def wait_for_steps(folder: Path, files: Sequence[str], ended: Callable[[], object] = lambda: None) -> None:
    deadline, grow = time.monotonic() + 60, [folder / name for name in files]
    while not all(file.is_file() and file.stat().st_size > 5_000 for file in grow):
        assert ended() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def losing_a_rank(
    capsys: pytest.CaptureFixture[str], number: int, folder: Path, files: Sequence[str], *options: str
) -> tuple[int, str, list[int]]:
    """A long run in this process, whose last rank gets this signal once it steps: status, standard error, all ranks."""

    def send() -> list[int]:
        wait_for_steps(folder, files)
        ranks = ranks_of(os.getpid())
        os.kill(ranks[-1], number)
        return ranks

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        said = say(capsys, *long_run(folder, *options))
    return said.status, said.err, sent.result()


def check_end(returned: int, error: str, folder: Path, status: int, told: str, culprit: str) -> None:
    """It ends with one line, which names the culprit unless it was interrupted, and keeps what was committed."""
    assert returned == status
    (line,) = [line for line in error.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert told in line
    assert str(folder) in line
    assert (culprit in line) == (status == 1)
    manifest = manifest_of(folder)
    assert manifest["status"] == "partial"
    assert not (folder / "done").exists()
    assert len(load_run(folder).steps) == manifest["num_steps"] > 5


def check_interrupt(driver: subprocess.Popen[str], folder: Path, culprit: str) -> None:
    """Ctrl-C in its terminal, which all of its processes get."""
    os.killpg(driver.pid, signal.SIGINT)
    error = driver.communicate(timeout=30)[1]
    check_end(driver.returncode, error, folder, 130, "error: interrupted after ", culprit)


def ranks_of(process: int) -> list[int]:
    """Its children that run as ranks; one that has ended and was not waited for is none."""
    return [child.pid for child in psutil.Process(process).children() if _is_rank(child)]


def _is_rank(process: psutil.Process) -> bool:
    try:
        return WORKER in process.cmdline()
    except psutil.Error:  # it has ended
        return False


def is_running(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(processes: Sequence[int], within_s: float = 15.0) -> None:
    deadline = time.monotonic() + within_s
    while left := [process for process in processes if is_running(process)]:
        assert time.monotonic() < deadline, f"processes {left} are still there"
        time.sleep(0.05)
