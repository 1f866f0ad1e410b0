"""Ctrl-C keeps what there is, says so in one line, and exits as shells expect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis.load import load_run
from experiments.configuration.compose import compose_raw
from experiments.runs.interrupt import interruptible, undisturbed, was_pressed
from experiments.runs.origin import UNKNOWN
from experiments.sweeps import points
from experiments.sweeps.points import Board, Outcome, Point
from experiments.sweeps.progress import Followed
from testbed.core.commands import Resume, WaitUntil
from testbed.core.serve import Loop
from tests.experiments.kit import REAL, TINY, Say, latest, manifest_of, needs_engine

LONG = ("trace.num_requests=20000", "trace.rate=300", "trace.prompt.value=16", "trace.output.value=16")
BACKENDS = [
    pytest.param((), id="sim"),
    pytest.param(("backend.num_replicas=3", "backend.router=least_loaded"), id="fleet"),
    pytest.param(REAL, id="real", marks=needs_engine),
]


def interrupted(
    folder: Path, *arguments: str, signals: tuple[signal.Signals, ...] = (signal.SIGINT,)
) -> tuple[int, list[str]]:
    """Exit status and lines of standard error of a run that gets these signals, a moment apart, once it steps."""
    command = [sys.executable, "-m", "experiments", "run", *latest(*TINY, *LONG, *arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not _has_stepped(folder):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.1 * (len(signals) > 1))
    error = process.communicate(timeout=60)[1]
    return process.returncode, [line for line in error.splitlines() if line.strip()]


@pytest.fixture(autouse=True)
def not_under_nohup() -> Iterator[None]:
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, former)


def _has_stepped(folder: Path) -> bool:
    return any(file.stat().st_size > 20_000 for file in folder.rglob("decisions.jsonl"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ctrl_c_keeps_partial_results(tmp_path: Path, say: Say, backend: tuple[str, ...]) -> None:
    folder = tmp_path / "run"
    status, lines = interrupted(folder, *backend, "record.decisions=true", f"hydra.run.dir={folder}")
    assert status == 130
    assert len(lines) == 1
    assert lines[0].startswith("error: interrupted after ")
    assert str(folder) in lines[0]
    assert manifest_of(folder)["status"] == "partial"
    assert not (folder / "done").exists()
    run = load_run(folder)
    assert not run.is_complete
    assert len(run.steps) == manifest_of(folder)["num_steps"] > 10
    finished = run.requests["finish_reason"].notna()
    assert 0 < finished.sum() < 20_000
    assert f"after {finished.sum()} of 20000 requests" in lines[0]
    assert run.summary["status"] == "partial"
    if backend == REAL:
        said = say("parity", str(folder)).success()
        assert f"identical: {len(run.steps)} steps" in said


@pytest.mark.parametrize(("job", "is_made"), [((), False), (("hydra.job.name=one",), True)], ids=["ours", "Hydra's"])
def test_ctrl_c_before_anything_is_written_leaves_no_folder(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch, job: tuple[str], is_made: bool
) -> None:
    def pressed(*arguments: object) -> None:
        assert (tmp_path / "run").is_dir() == is_made, "Hydra makes it"
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.runs.run.prepare_sim", pressed)
    assert say("run", *TINY, *LONG, *job, f"hydra.run.dir={tmp_path / 'run'}").status == 130
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGINT,) * 3], ids=["SIGTERM", "impatient Ctrl-C"])
def test_a_cluster_s_signal_and_an_impatient_user_lose_nothing(
    tmp_path: Path, signals: tuple[signal.Signals, ...]
) -> None:
    folder = tmp_path / "run"
    _, lines = interrupted(folder, "record.decisions=true", f"hydra.run.dir={folder}", signals=signals)
    assert len(lines) == 1, lines
    run = load_run(folder)
    assert run.manifest["status"] == "partial"
    assert len(run.steps) == run.manifest["num_steps"] > 10
    assert (folder / "summary.json").exists()


LOOPS = """
import time

class Loops:
    def choose(self, running):
        open("began", "w").close()
        while True:
            time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("signals", "told"),
    [
        ((signal.SIGINT, signal.SIGINT), "stops once this step ends, at "),
        ((signal.SIGTERM,), "this step has not ended in 3 s, at "),
        ((signal.SIGHUP,), "this step has not ended in 3 s, at "),
    ],
    ids=["Ctrl-C twice", "SIGTERM", "SIGHUP"],
)
def test_a_policy_that_loops_is_told_of_and_ended(
    tmp_path: Path, signals: tuple[signal.Signals, ...], told: str
) -> None:
    (tmp_path / "mine.py").write_text(LOOPS)
    given = latest(
        *TINY, "trace.num_requests=20", "trace.arrival=all_at_once", "cache.num_gpu_blocks=60",
        "scheduler.victim={_target_: mine.Loops}", "hydra.run.dir=run",
    )  # fmt: skip
    command = [sys.executable, "-m", "experiments", "run", *given]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (tmp_path / "began").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signals[0])
    assert process.stderr is not None
    said = next(line for line in process.stderr if line.strip())
    assert told in said
    assert "mine.py:" in said
    for number in signals[1:]:
        process.send_signal(number)
    assert process.wait(60) == 130


def test_ctrl_c_ends_a_sweep_and_its_points_are_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    arguments = ("-m", "seed=0,1", "record.decisions=true", f"hydra.sweep.dir={folder}")
    status, lines = interrupted(folder, *arguments)
    assert (status, len(lines)) == (130, 1)
    assert "2 points are left: the same command runs them" in lines[0]
    said = {manifest["status"]: manifest["failure"] for manifest in map(manifest_of, folder.iterdir())}
    assert said == {"partial": "interrupted", "failed": "interrupted before it began"}, "the sweep ends, not one point"
    assert not list(folder.rglob("done"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_any_command_is_ended_by_each_signal_as_by_ctrl_c_in_one_line(
    monkeypatch: pytest.MonkeyPatch, say: Say, number: signal.Signals
) -> None:
    def press(*_: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(1)

    monkeypatch.setattr("experiments.commands.listing.print_listing", press)
    said = say("list")
    assert said.status == 130
    assert said.error() == "interrupted"


def test_a_command_under_nohup_goes_on(monkeypatch: pytest.MonkeyPatch, say: Say) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr("experiments.commands.listing.print_listing", lambda *_: os.kill(os.getpid(), signal.SIGHUP))
    say("list").success()


@pytest.mark.parametrize("hangup", [signal.SIG_DFL, signal.SIG_IGN], ids=["plain", "nohup"])
def test_a_press_while_records_are_closed_is_not_lost(hangup: signal.Handlers) -> None:
    signal.signal(signal.SIGHUP, hangup)
    with undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
    assert was_pressed()
    assert not was_pressed(), "asked once"


def test_a_signal_that_the_caller_handles_stays_the_caller_s() -> None:
    heard: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with interruptible([]):
            signal.raise_signal(signal.SIGTERM)
        with undisturbed():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert heard == [signal.SIGTERM] * 2
    assert not was_pressed()


def test_a_point_is_interrupted_though_its_launcher_handles_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submitit ignores SIGTERM in its jobs."""
    monkeypatch.setattr(points, "execute", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    point = Point("one", "testbed run", compose_raw([*TINY]), str(tmp_path), UNKNOWN)
    former = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert points._run(point).status == "interrupted"
    finally:
        signal.signal(signal.SIGTERM, former)


def test_ctrl_c_ends_the_wait_of_a_single_loop_at_once() -> None:
    def waits() -> Loop:
        while True:
            yield WaitUntil(None)

    with interruptible([waits()]) as (alone,):
        next(alone)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with interruptible([waits(), waits()]) as (one, _):
        next(one)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            one.send(Resume(0))


def test_a_point_that_ended_as_ctrl_c_was_pressed_is_not_left(tmp_path: Path) -> None:
    names = ("whole", "whole but interrupted", "interrupted", "failed")
    outcomes = [Outcome(name, name.split()[-1], str(tmp_path / name)) for name in names]
    for name in names[:2]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "done").touch()
    followed = Followed(Board(tmp_path), len(names))
    followed.outcomes = [*outcomes, Outcome("refused", "failed")]
    assert followed.num_done == 2
