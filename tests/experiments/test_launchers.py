"""Points side by side, by Hydra's launchers: the same decisions, one line for what dies, and nothing run twice."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis.load import load_sweep
from experiments.sweeps.points import board_in, say_killed
from tests.experiments.kit import SHORT, TINY, Say, latest
from tests.experiments.test_sweeps import POINTS, sweep
from tests.source_tree import ROOT

JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
ORDER = """
import os, signal, time
from contextlib import suppress

from testbed.policies.orders import KeyedQueue


def order():
    open(f"pid-{os.getpid()}", "w").close()
    return KeyedQueue(first_come)


def first_come(seq):
"""
DEADLY = """
    if os.path.exists("armed"):
        os.kill(os.getpid(), signal.SIGKILL)
    return (seq.seq_id,)
"""
KILLS_ITS_SWEEP = """
    sweep = os.getppid()
    with suppress(FileNotFoundError):
        os.rename("armed", "fired")  # only once: an orphan's parent is nobody's sweep
        os.kill(sweep, signal.SIGKILL)
    return (seq.seq_id,)
"""
INTERRUPTS_ITS_SWEEP = """
    with suppress(FileNotFoundError):
        os.rename("armed", "fired")  # only once
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(2)
"""
OWN = "scheduler.queue_order={_target_: deadly.order}"


def arm(folder: Path, what_it_does: str) -> None:
    """An order of the user's that does this once it comes to a sequence."""
    (folder / "deadly.py").write_text(ORDER + what_it_does)
    (folder / "armed").touch()


def of_process(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A sweep in a process of its own, in this folder."""
    given = latest(*TINY, *SHORT, "hydra.sweep.dir=s", *arguments)
    command = [sys.executable, "-m", "experiments", "run", "-m", *given]
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False)


def digests(folder: Path) -> dict[int, str]:
    return {run.manifest["seed"]: run.manifest["digest"] for run in load_sweep(folder).runs}


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Ray makes sockets there, and their names are limited."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_joblib(tmp_path: Path, say: Say) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    sweep(say, tmp_path / "basic", POINTS)
    sweep(say, tmp_path / "joblib", POINTS, *JOBLIB).success()
    assert digests(tmp_path / "joblib") == digests(tmp_path / "basic")
    assert not list((tmp_path / "joblib").glob(".points-*")), "nothing of the launching is left"
    assert "done before  3 of 3" in sweep(say, tmp_path / "joblib", POINTS).out, "whoever ran a point"


def test_a_failing_point_side_by_side(tmp_path: Path, say: Say) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    memory = ("cache.num_gpu_blocks=null", "device.memory_bytes=1000,80000000000")  # none of the first fits
    said = sweep(say, tmp_path / "s", "cache.block_size=4,8", *memory, *JOBLIB)
    assert "(2 of 4 points failed)" in said.error()
    assert "Traceback" not in said.err + said.out
    assert len(load_sweep(tmp_path / "s").runs) == 2


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and ") Z " not in stat.read_text()


def pids_in(folder: Path) -> list[int]:
    return [int(file.name.partition("-")[2]) for file in folder.glob("pid-*")]


def until_ended(pids: list[int]) -> None:
    until = time.monotonic() + 30.0
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(is_running, pids))


linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux says who runs in /proc")
WORKER = """
import multiprocessing, os, time
from pathlib import Path

from experiments.sweeps.points import _AT_WORK, _end_with


def work(is_at_point):
    sweep = os.getppid()
    _end_with(sweep)
    if is_at_point:
        with _AT_WORK:
            Path(f"pid-{os.getpid()}").touch()
            while os.getppid() == sweep:
                time.sleep(0.01)
            time.sleep(2.0)
            Path(f"point-{is_at_point}").touch()
    else:
        Path(f"pid-{os.getpid()}").touch()
    time.sleep(600)


if __name__ == "__main__":
    for is_at_point in (True, False):
        multiprocessing.get_context("spawn").Process(target=work, args=(is_at_point,)).start()
    time.sleep(600)
"""


@linux
def test_the_workers_of_a_killed_sweep_end_with_it(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    arm(tmp_path, KILLS_ITS_SWEEP)
    ended = of_process(tmp_path, "seed=range(0,6)", OWN, *JOBLIB)
    assert ended.returncode == -signal.SIGKILL
    assert pids_in(tmp_path)
    until_ended(pids_in(tmp_path))
    assert len(load_sweep(tmp_path / "s").runs) < 6, "they do not go on without it"


@linux
def test_a_worker_ends_with_its_sweep_whatever_it_waits_for_but_a_point(tmp_path: Path) -> None:
    """As for the reader of its result, where the sweep is killed between two points, or before the first."""
    (tmp_path / "worker.py").write_text(WORKER)
    sweep = subprocess.Popen([sys.executable, "worker.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    until = time.monotonic() + 60.0
    while len(pids_in(tmp_path)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    sweep.kill()
    sweep.wait()
    until_ended(pids_in(tmp_path))
    assert [file.name for file in tmp_path.glob("point-*")] == ["point-True"], "what it was at is done"


@linux
def test_an_interrupted_sweep_ends_its_workers_without_a_process_that_a_second_interrupt_ends(tmp_path: Path) -> None:
    """As `timeout -s INT` sends two at once, to the whole group: `pgrep`, which joblib asks for its workers' children
    where psutil is missing, dies of the second, and the sweep waits for workers that nobody has ended."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    arm(tmp_path, INTERRUPTS_ITS_SWEEP)
    (tmp_path / "pgrep").write_text("#!/bin/sh\nkill -INT $$\n")
    (tmp_path / "pgrep").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ended = of_process(tmp_path, POINTS, OWN, *JOBLIB, PATH=path)
    assert ended.returncode == 130
    (line,) = [line for line in ended.stderr.splitlines() if line.strip()]
    assert line == "error: interrupted; finished points stay, 3 points are left: the same command runs them"
    until_ended(pids_in(tmp_path))


def test_a_killed_worker_is_one_line_and_the_same_command_resumes(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    arm(tmp_path, DEADLY)
    (tmp_path / "armed").unlink()
    assert of_process(tmp_path, "seed=0", OWN).returncode == 0
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("done")}
    (tmp_path / "armed").touch()
    arguments = (POINTS, OWN, *JOBLIB)
    ended = of_process(tmp_path, *arguments)
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.strip()]
    assert line.startswith("error: JoblibLauncher: ")
    assert "2 of 2 are left: the same command runs them" in line
    (tmp_path / "armed").unlink()
    ended = of_process(tmp_path, *arguments)
    assert ended.returncode == 0, ended.stderr
    assert "done before  1 of 3" in ended.stdout
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert len(load_sweep(tmp_path / "s").runs) == 3


def test_a_killed_sweep_leaves_word_of_the_points_that_nobody_came_to(tmp_path: Path, say: Say) -> None:
    arm(tmp_path, DEADLY)
    assert of_process(tmp_path, POINTS, OWN).returncode < 0
    folder = tmp_path / "s"
    (left,) = folder.glob(".points-*")
    assert say_killed(folder) == [left]
    said = [json.loads(file.read_text()) for file in folder.glob("*/manifest.json")]
    failures = [manifest["failure"] for manifest in said if manifest["status"] == "failed"]
    assert failures == ["its sweep was killed before it began"] * 2, "one of three killed it"
    assert left.exists(), "jobs on other machines may outlive their sweep"

    (tmp_path / "armed").unlink()
    assert of_process(tmp_path, POINTS, OWN).returncode == 0
    assert len(load_sweep(folder).runs) == 3
    assert not list(folder.glob(".points-*"))

    with board_in(folder) as board:
        sweep(say, folder, "seed=0")
        assert list(folder.glob(".points-*")) == [board.folder], "that of a living sweep stays"
        assert say_killed(folder) == []
    assert not board.folder.exists()


def test_slurm_s_launcher_by_its_executor_for_one_machine(tmp_path: Path, say: Say) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra `slurm`")
    sweep(say, tmp_path / "basic", POINTS)
    said = of_process(tmp_path, POINTS, "hydra/launcher=submitit_local", "points_per_job=2")
    assert said.returncode == 0, said.stderr
    assert digests(tmp_path / "s") == digests(tmp_path / "basic")
    assert len(list((tmp_path / "s" / ".submitit").glob("[0-9]*"))) == 2, "two points a job"
    assert "done before  3 of 3" in of_process(tmp_path, POINTS, "hydra/launcher=submitit_local").stdout


def test_ray_on_one_machine(tmp_path: Path, say: Say, short_folder: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="needs the extra `ray`")
    sweep(say, tmp_path / "basic", POINTS)
    ray = (
        "hydra/launcher=ray", "points_per_job=2", "+hydra.launcher.ray.init.num_cpus=2",
        "+hydra.launcher.ray.init.include_dashboard=false", f"+hydra.launcher.ray.init._temp_dir={short_folder}",
    )  # fmt: skip
    environment = {"HOME": str(short_folder), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    said = of_process(tmp_path, POINTS, *ray, **environment)
    assert said.returncode == 0, said.stderr
    assert digests(tmp_path / "s") == digests(tmp_path / "basic")


def test_a_launcher_that_is_not_installed_is_named(tmp_path: Path, say: Say) -> None:
    error = sweep(say, tmp_path / "s", POINTS, "hydra/launcher=jblib").error()
    assert "hydra/launcher has no option 'jblib'" in error


@pytest.mark.parametrize("value", ["0", "-1"])
def test_jobs_of_no_points_are_refused(tmp_path: Path, say: Say, value: str) -> None:
    assert "points_per_job is" in sweep(say, tmp_path / "s", POINTS, f"points_per_job={value}").error()


def test_a_terminal_shows_one_bar_and_no_chatter(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (40, 120))
    command = [sys.executable, "-m", "experiments", "run", "-m", *TINY, *SHORT, POINTS, f"hydra.sweep.dir={tmp_path}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while chunk := _read(ours):
        shown += chunk
    os.close(ours)
    assert process.wait() == 0
    text = shown.decode()
    assert "sweep: 100%" in text
    assert "3/3" in text
    assert "0 running, 0 failed" in text
    assert "HYDRA" not in text
    assert "req/s" not in text, "no bars of single points"


FOLLOWING = """
import sys, threading
from pathlib import Path
from experiments.sweeps.points import Board, Outcome
from experiments.sweeps.progress import Followed

board = Board(Path(sys.argv[1]))
board.say(0, Outcome("seed=0", "complete", str(board.folder), notes=(("said", "kind", 1.0),)))
before = set(sys.modules)
with Followed(board, 1) as followed:
    while not followed.outcomes:
        threading.Event().wait(0.01)
print(followed.outcomes[0].notes, *sorted(set(sys.modules) - before))
"""


def test_who_follows_a_sweep_imports_nothing(tmp_path: Path) -> None:
    """It reads in a thread, and a point may import the same package at this moment: each would wait for the other."""
    command = [sys.executable, "-c", FOLLOWING, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "(('said', 'kind', 1.0),)"


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""
