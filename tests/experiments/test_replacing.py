"""With overwrite=true the earlier run stays until the new one is complete."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.load import load_run, load_sweep
from experiments import simulate
from experiments.runs import replacing
from testbed.records.parquet import ParquetFile
from tests.experiments.kit import SHORT, TINY, Said, Say
from tests.experiments.test_full_disks import FullDisk
from tests.experiments.test_sweeps import sweep

POLICY = """
class Ends:
    def __init__(self, error: str, after: int = 0) -> None:
        self.error, self.left = {"fails": RuntimeError("it failed"), "interrupted": KeyboardInterrupt()}[error], after

    def allows(self, seq, running):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return True
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from experiments.runs.replacing import claimed
from tests.experiments.kit import config_of

with claimed(Path(sys.argv[1]), config_of()):
    print(*os.listdir(sys.argv[1]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def earlier(here: Path) -> dict[str, bytes]:
    """The files of a complete run in `run`, with a file of the user's own."""
    (here / "ends.py").write_text(POLICY)
    simulate({"num_requests": 2}, folder="run", cost="constant")
    Path("run", "notes.txt").write_text("mine")
    return files_of(Path("run"))


def again(say: Say, *more: str) -> Said:
    one_by_one = "scheduler.max_num_seqs=1"
    return say("run", *TINY, *SHORT, one_by_one, "cost=constant", "hydra.run.dir=run", "overwrite=true", *more)


@pytest.mark.parametrize("how", ["fails", "interrupted"])
def test_the_earlier_run_comes_back_if_the_new_one_finished_no_request(
    earlier: dict[str, bytes], say: Say, how: str
) -> None:
    said = again(say, f"scheduler.admission={{_target_: ends.Ends, error: {how}}}")
    assert said.status == (130 if how == "interrupted" else 1)
    assert said.err.rstrip().endswith(f"; the run before it stays in {Path('run').absolute()}")
    assert "partial      not kept" in said.out
    assert files_of(Path("run")) == earlier


def test_the_earlier_run_comes_back_if_the_disk_is_full(
    earlier: dict[str, bytes], say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ParquetFile, "close", FullDisk(ParquetFile.close, after=0))
    assert "the disk is full" in (error := again(say).error())
    assert error.endswith(f"; the run before it stays in {Path('run').absolute()}")
    assert files_of(Path("run")) == earlier


def test_the_earlier_run_comes_back_if_the_new_one_cannot_be_begun(
    earlier: dict[str, bytes], say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacing, "claim", FullDisk(lambda *_: None, after=0).__get__(None, object))
    assert "the disk is full" in again(say).error()
    assert files_of(Path("run")) == earlier


def test_with_partial_results_both_runs_stay_until_one_is_complete(earlier: dict[str, bytes], say: Say) -> None:
    kept = Path("run", ".replaced").absolute()
    for after in (5, 4, 0):
        error = again(say, f"scheduler.admission={{_target_: ends.Ends, error: fails, after: {after}}}").error()
        if after:
            assert error.endswith(f"; partial results kept in {kept.parent}; the run before it is in {kept}")
            assert not load_run("run").is_complete
            assert files_of(kept) | {"notes.txt": b"mine"} == earlier
            refused = say("run", *TINY, "hydra.run.dir=run").error()
            assert f"{kept.parent} already holds a run (and in .replaced the one before it)" in refused
    assert files_of(Path("run")) == earlier, "the last one finished no request"
    again(say).success()
    assert not kept.exists()
    assert load_run("run").is_complete
    assert Path("run", "notes.txt").read_text() == "mine"


def test_a_killed_run_leaves_the_earlier_one_which_is_not_lost_without_being_asked(
    earlier: dict[str, bytes], say: Say
) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, "run"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert {*killed.stdout.split()} == {".replaced", "config.yaml", "run.log", "notes.txt"}
    assert load_run(Path("run", ".replaced")).is_complete
    said = "the run did not finish: run its command again with overwrite=true, or that of its sweep as it was; "
    assert f"{said}the run before it is in run/.replaced" in say("timeline", "run").error()
    assert "already holds a run, and" in say("run", *TINY, "hydra.run.dir=run").error()
    assert files_of(Path("run")) == earlier, "the next command put it back"


def test_a_run_whose_move_was_killed_is_put_together_again(earlier: dict[str, bytes], say: Say) -> None:
    Path("run", ".replacing").mkdir()
    for name in ("done", "manifest.json"):
        Path("run", name).rename(Path("run", ".replacing", name))
    assert "already holds a run, and" in say("run", *TINY, "hydra.run.dir=run").error()
    assert files_of(Path("run")) == earlier, "the next command put it back"


def test_of_a_swept_point_that_fails_the_earlier_run_stays(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(say, tmp_path / "s", "seed=0,1")
    before = files_of(tmp_path / "s")
    with monkeypatch.context() as patched:
        patched.setattr(ParquetFile, "close", FullDisk(ParquetFile.close, after=0))
        error = sweep(say, tmp_path / "s", "seed=0,1", "overwrite=true").error()
    assert "the disk is full" in error
    assert "(2 of 2 points failed)" in error
    assert files_of(tmp_path / "s") == before
    assert "2 of 2 points" in sweep(say, tmp_path / "s", "seed=0,1").out
    assert len(load_sweep(tmp_path / "s").runs) == 2


def test_a_swept_point_that_was_killed_is_done_before_as_its_earlier_run_is_put_back(tmp_path: Path, say: Say) -> None:
    sweep(say, tmp_path / "s", "seed=0,1")
    before = files_of(tmp_path / "s")
    for run in load_sweep(tmp_path / "s").runs:
        (run.path / ".new").mkdir()
        for name in files_of(run.path):
            (run.path / name).rename(run.path / ".new" / name)
        (run.path / ".new").rename(run.path / ".replaced")
        (run.path / "run.log").touch()
        (run.path / "manifest.json").write_text('{"status": "partial"}')
    assert "done before  2 of 2 points" in sweep(say, tmp_path / "s", "seed=0,1").out
    assert files_of(tmp_path / "s") == before
