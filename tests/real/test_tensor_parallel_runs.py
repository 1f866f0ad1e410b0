"""Whole runs on two ranks, ended from outside: one line says why, what was committed stays, no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.processes import assert_gone, check_end, ranks_of, stepping


def stepping_ranks(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """A run, and the process of its rank 1."""
    process = stepping(folder, ["decisions.jsonl"], "device.tensor_parallel_size=2", "record.decisions=true")
    (rank,) = ranks_of(process.pid)
    return process, rank


def kill_the_rank(driver: int, rank: int) -> None:
    os.kill(rank, signal.SIGKILL)


def press_ctrl_c(driver: int, rank: int) -> None:
    """A terminal sends it to all, and some clusters SIGTERM: the driver alone may say where the run ends."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.kill(rank, number)
    os.killpg(driver, signal.SIGINT)


ENDS = {
    "a rank is killed": (kill_the_rank, 1, "was killed by SIGKILL"),
    "all are interrupted": (press_ctrl_c, 130, "error: interrupted after "),
}


@pytest.mark.parametrize(("end", "status", "told"), ENDS.values(), ids=ENDS)
def test_a_run_that_is_ended_keeps_its_committed_steps(
    tmp_path: Path, end: Callable[[int, int], None], status: int, told: str
) -> None:
    folder = tmp_path / "run"
    driver, rank = stepping_ranks(folder)
    end(driver.pid, rank)
    check_end(driver, folder, status, told, "rank 1")
    assert_gone([rank])


def test_no_rank_outlives_a_driver_that_was_killed(tmp_path: Path) -> None:
    driver, rank = stepping_ranks(tmp_path / "run")
    driver.kill()
    driver.communicate(timeout=30)
    assert_gone([rank])
