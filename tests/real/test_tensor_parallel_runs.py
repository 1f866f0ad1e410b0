"""Whole runs on two ranks, ended from outside: one line says why, what was committed stays, no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.real.processes import assert_gone, check_end, check_interrupt, losing_a_rank, ranks_of, stepping

FILES = ["decisions.jsonl"]
TWO = ("device.tensor_parallel_size=2", "record.decisions=true")


def stepping_ranks(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """A run, and the process of its rank 1."""
    process = stepping(folder, FILES, *TWO)
    (rank,) = ranks_of(process.pid)
    return process, rank


def test_a_run_whose_rank_is_killed_keeps_its_committed_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    status, error, ranks = losing_a_rank(capsys, signal.SIGKILL, folder, FILES, *TWO)
    check_end(status, error, folder, 1, "was killed by SIGKILL", "rank 1")
    assert_gone(ranks)


def test_a_run_that_is_interrupted_keeps_its_committed_steps(tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to all, and some clusters SIGTERM: the driver alone may say where the run ends."""
    folder = tmp_path / "run"
    driver, rank = stepping_ranks(folder)
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.kill(rank, number)
    check_interrupt(driver, folder, "rank 1")
    assert_gone([rank])


def test_no_rank_outlives_a_driver_that_was_killed(tmp_path: Path) -> None:
    driver, rank = stepping_ranks(tmp_path / "run")
    driver.kill()
    driver.communicate(timeout=30)
    assert_gone([rank])
