"""Whole runs on two ranks, ended from outside: one line says why, what was committed stays, no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.load import load_run
from tests.experiments.kit import REAL, TINY, manifest_of
from tests.real.processes import assert_gone, ranks_of

LONG = ("trace.num_requests=9000", "trace.rate=300", "trace.prompt.value=16", "trace.output.value=16")


def stepping(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """A run in a session of its own, as a terminal starts it, once it steps; and the process of its rank 1."""
    command = [sys.executable, "-m", "experiments", "run", *TINY, *LONG, *REAL, "device.tensor_parallel_size=2",
               "record.decisions=true", f"hydra.run.dir={folder}"]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip
    deadline, file = time.monotonic() + 60, folder / "decisions.jsonl"
    while not (file.is_file() and file.stat().st_size > 5_000):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
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
    driver, rank = stepping(folder)
    end(driver.pid, rank)
    error = driver.communicate(timeout=30)[1]
    assert driver.returncode == status
    (line,) = [line for line in error.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert told in line
    assert str(folder) in line
    assert ("rank 1" in line) == (status == 1)
    assert_gone([rank])
    assert manifest_of(folder)["status"] == "partial"
    assert not (folder / "done").exists()
    assert len(load_run(folder).steps) == manifest_of(folder)["num_steps"] > 5


def test_no_rank_outlives_a_driver_that_was_killed(tmp_path: Path) -> None:
    driver, rank = stepping(tmp_path / "run")
    driver.kill()
    driver.communicate(timeout=30)
    assert_gone([rank])


def test_an_llm_on_two_ranks_says_what_it_says_on_one() -> None:
    from experiments import LLM
    from real import SamplingParams

    sampling = SamplingParams(max_tokens=8, temperature=0.8, seed=1)
    said = []
    for num_ranks in (1, 2):
        with LLM("tiny", tensor_parallel_size=num_ranks, device="cpu", num_gpu_blocks=64, max_model_len=128) as llm:
            said.append(
                [output.outputs[0] for output in llm.generate(["hello", "once upon"], sampling, use_tqdm=False)]
            )
            assert len(ranks_of(os.getpid())) == num_ranks - 1
    assert [one.token_ids for one in said[0]] == [one.token_ids for one in said[1]]
    assert not ranks_of(os.getpid())
