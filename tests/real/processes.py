"""Runs that are ended from outside; which ranks a process has started, and whether they are gone. Linux only."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from analysis.load import load_run
from tests.experiments.kit import REAL, TINY, latest, manifest_of

LONG = ("trace.num_requests=9000", "trace.rate=300", "trace.prompt.value=16", "trace.output.value=16")


def stepping(folder: Path, files: Sequence[str], *options: str) -> subprocess.Popen[str]:
    """A long run in a session of its own, as a terminal starts it, once it steps: these files of its folder grow."""
    given = latest(*TINY, *LONG, *REAL, *options, f"hydra.run.dir={folder}")
    command = [sys.executable, "-m", "experiments", "run", *given]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip
    deadline, grow = time.monotonic() + 60, [folder / name for name in files]
    while not all(file.is_file() and file.stat().st_size > 5_000 for file in grow):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def check_end(process: subprocess.Popen[str], folder: Path, status: int, told: str, culprit: str) -> None:
    """It ends with one line, which names the culprit unless it was interrupted, and keeps what was committed."""
    error = process.communicate(timeout=30)[1]
    assert process.returncode == status
    (line,) = [line for line in error.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert told in line
    assert str(folder) in line
    assert (culprit in line) == (status == 1)
    manifest = manifest_of(folder)
    assert manifest["status"] == "partial"
    assert not (folder / "done").exists()
    assert len(load_run(folder).steps) == manifest["num_steps"] > 5


def ranks_of(process: int) -> list[int]:
    """Its children that run as ranks; one that has ended and was not waited for is none."""
    listed = Path(f"/proc/{process}/task").glob("*/children")
    return [child for file in listed for child in map(int, file.read_text().split()) if _is_rank(child)]


def _is_rank(process: int) -> bool:
    return is_running(process) and b"real.parallel.worker" in Path(f"/proc/{process}/cmdline").read_bytes()


def is_running(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def assert_gone(processes: Sequence[int], within_s: float = 15.0) -> None:
    deadline = time.monotonic() + within_s
    while left := [process for process in processes if is_running(process)]:
        assert time.monotonic() < deadline, f"processes {left} are still there"
        time.sleep(0.05)
