"""What is broken is found: a policy that reads a clock, a changed tape, a torn one, another trace."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from analysis.load import load_run
from experiments.cli import main
from experiments.configuration.config import RunConfig
from experiments.runs.parity import check_parity
from experiments.runs.run import execute
from testbed.errors import RunFolderError, TestbedError
from testbed.policies.compositions.unified import Unified
from testbed.records.tape import read_tape
from tests.analysis.runs import change_manifest
from tests.experiments.kit import config_of, manifest_of, say, trace_of
from tests.parity.kit import real_config, real_run, replay_config, replayed_run


class ReadsTheClock:
    """A composition that breaks the first rule: what it decides depends on when it is asked."""

    def compose(self, step: Any) -> None:
        step.token_budget = 1 + time.perf_counter_ns() // 1000 % 24
        Unified().compose(step)


class OneTokenAt:
    """As unified, but in one step only one token is computed."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._num_composed = 0

    def compose(self, step: Any) -> None:
        if self._num_composed == self._at:
            step.token_budget = 1
        self._num_composed += 1
        Unified().compose(step)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run that is not to be changed."""
    folder = tmp_path_factory.mktemp("parity") / "whole"
    assert real_run(folder, real_config("unified")).status == "complete"
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copied"))


def test_a_policy_that_reads_the_clock_is_caught(tmp_path: Path) -> None:
    config = real_config("unified", scheduler__composition={"_target_": f"{__name__}.ReadsTheClock"})
    assert real_run(tmp_path / "real", config).status == "complete"
    report = check_parity(tmp_path / "real")
    assert report.divergence is not None
    assert report.divergence.reason == "another batch was decided"
    assert report.divergence.step == report.num_steps
    assert report.divergence.recorded != report.divergence.replayed
    replayed = replayed_run(tmp_path / "sim", config, tmp_path / "real")
    assert (replayed.status, replayed.exit_status) == ("partial", 1)
    assert "the replay diverges from the recorded run at step" in replayed.message


@pytest.mark.parametrize("at", [0, 3, 17])
def test_the_first_step_that_differs_is_named(copied: Path, at: int) -> None:
    first = next(  # from `at` on, the first step that has more than one token to lose
        number
        for number, step in enumerate(read_tape(copied / "tape.jsonl").steps)
        if number >= at and sum(step.decision["scheduled"].values()) > 1
    )
    assert first == at, "the trace is too thin for this test"
    assert check_parity(copied).divergence is None
    config = copied / "config.yaml"
    changed = yaml.safe_load(config.read_text())
    changed["scheduler"]["composition"] = {"_target_": f"{__name__}.OneTokenAt", "at": at}
    config.write_text(yaml.safe_dump(changed))
    report = check_parity(copied)
    assert report.divergence is not None
    assert (report.divergence.step, report.num_steps) == (at, at)
    assert report.divergence.replayed is not None
    assert sum(report.divergence.replayed["scheduled"].values()) == 1


# --- a tape that was changed ---


def rewrite(folder: Path, at: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes step `at` of the tape in place."""
    path = folder / "tape.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change([line for line in lines if line["kind"] == "step"][at])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def one_more_token(step: dict[str, Any]) -> None:
    scheduled = step["decision"]["scheduled"]
    scheduled[next(iter(scheduled))] += 1


def a_preemption(step: dict[str, Any]) -> None:
    step["decision"]["preempted"] = ["0"]


def one_block_less(step: dict[str, Any]) -> None:
    step["decision"]["free_blocks"] -= 1


def another_digest(step: dict[str, Any]) -> None:
    step["digest"] = f"{int(step['digest'], 16) ^ 1:016x}"


@pytest.mark.parametrize("change", [one_more_token, a_preemption, one_block_less, another_digest])
@pytest.mark.parametrize("at", [0, 9])
def test_a_planted_change_is_found_at_its_very_step(
    copied: Path, change: Callable[[dict[str, Any]], None], at: int
) -> None:
    rewrite(copied, at, change)
    report = check_parity(copied)
    assert report.divergence is not None
    assert (report.divergence.step, report.num_steps) == (at, at)


@pytest.mark.parametrize(
    ("more", "reason"), [(-1, "the tape has ended, the replay goes on"), (1, "the replay ended before the tape")]
)
def test_a_tape_of_another_length_is_found(
    copied: Path, capsys: pytest.CaptureFixture[str], more: int, reason: str
) -> None:
    path = copied / "tape.jsonl"
    lines = path.read_text().splitlines()
    steps = [line for line in lines if json.loads(line)["kind"] == "step"]
    lines.remove(steps[-1])
    path.write_text("\n".join(lines + steps[-1:] * (more + 1)))
    change_manifest(copied, num_steps=len(steps) + more)
    agree = len(steps) + min(more, 0)
    assert main(["parity", str(copied)]) == 1
    assert capsys.readouterr().out.startswith(f"{agree} steps agree; step {agree} differs: {reason}\n")


def test_an_arrival_that_is_moved_is_found(copied: Path) -> None:
    path = copied / "tape.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    first = next(line for line in lines if line["kind"] == "arrive")
    first["ns"] += 1  # later than the boundary that first saw it
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = check_parity(copied)
    assert report.divergence is not None
    assert report.divergence.step == 0


class Fails:
    """Composes as unified does, until it fails."""

    num_left = 5

    def __init__(self) -> None:
        self._num_left = self.num_left

    def compose(self, step: Any) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            self.fail()
        Unified().compose(step)

    def fail(self) -> None:
        raise ZeroDivisionError("nothing left")


class Exits(Fails):
    def fail(self) -> None:
        raise SystemExit(0)


class Stalls(Fails):
    def compose(self, step: Any) -> None:
        self._num_left -= 1
        if self._num_left >= 0:
            Unified().compose(step)


@pytest.mark.parametrize(("kind", "said"), [("Exits", "SystemExit: 0"), ("Stalls", "nothing can be scheduled")])
def test_a_class_that_ended_the_run_otherwise_is_named_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, said: str
) -> None:
    folder = tmp_path / "real"
    run = real_run(folder, real_config("unified", scheduler__composition={"_target_": f"{__name__}.{kind}"}))
    assert (run.status, run.exit_status) == ("partial", 1)
    assert main(["parity", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("identical: 5 steps")
    assert said in printed


def test_a_class_that_raised_raises_in_the_replay_at_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "real"
    run = real_run(folder, real_config("unified", scheduler__composition={"_target_": f"{__name__}.Fails"}))
    assert (run.status, run.exit_status) == ("partial", 1)
    report = check_parity(folder)
    assert (report.num_steps, report.is_cut, report.divergence) == (5, True, None)
    assert main(["parity", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("identical: 5 steps")
    assert "there the run failed: " in said
    assert "ZeroDivisionError: nothing left" in said
    monkeypatch.setattr(Fails, "num_left", 3)  # it was changed since
    assert main(["parity", str(folder)]) == 1
    assert "ZeroDivisionError: nothing left" in capsys.readouterr().err


def test_a_policy_that_was_changed_since_is_found(copied: Path) -> None:
    config = copied / "config.yaml"
    config.write_text(config.read_text().replace("composition: unified", "composition: prefill_first"))
    report = check_parity(copied)
    assert report.divergence is not None


# --- a run that was cut short ---


def cut(folder: Path, num_steps: int) -> int:
    """Leaves `num_steps` steps of the tape and half a line, as a killed run does; its manifest says partial."""
    path = folder / "tape.jsonl"
    kept: list[str] = []
    for line in path.read_text().splitlines(keepends=True):
        if json.loads(line)["kind"] == "step":
            num_steps -= 1
            if num_steps < 0:
                kept.append(line[: len(line) // 2])
                break
        kept.append(line)
    path.write_text("".join(kept))
    (folder / "done").unlink()
    change_manifest(folder, status="partial")
    return len(read_tape(path).steps)


def test_a_killed_run_is_replayed_to_the_end_of_its_tape(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cut(copied, 11) == 11
    report = check_parity(copied)
    assert (report.divergence, report.num_steps, report.is_cut) == (None, 11, True)
    said = say(capsys, "parity", str(copied))
    assert said.status == 0
    assert "identical: 11 steps" in said.out
    assert "interrupted" in said.out
    replayed = replayed_run(tmp_path / "sim", real_config("unified"), copied)
    assert (replayed.status, replayed.exit_status) == ("partial", 1)
    assert "its tape ends after 11 steps" in replayed.message
    assert replayed.summary["num_requests"] > 0


def test_a_manifest_that_was_cut_is_named(copied: Path) -> None:
    (copied / "manifest.json").write_text((copied / "manifest.json").read_text()[:150])
    with pytest.raises(RunFolderError, match=r"manifest\.json: cannot be read as JSON"):
        check_parity(copied)


def test_a_run_that_was_interrupted_between_two_requests_is_cut(copied: Path, tmp_path: Path) -> None:
    """Whatever had arrived was done: the replay ends by itself, and yet more would have come."""
    (copied / "done").unlink()
    change_manifest(copied, status="partial")
    report = check_parity(copied)
    assert (report.divergence, report.is_cut) == (None, True)
    replayed = replayed_run(tmp_path / "sim", real_config("unified"), copied)
    assert (replayed.status, replayed.exit_status) == ("partial", 1)
    assert "interrupted" in replayed.message


def test_a_whole_run_with_a_torn_tape_is_damaged(copied: Path) -> None:
    cut(copied, 11)
    change_manifest(copied, status="complete")
    num_steps = manifest_of(copied)["num_steps"]
    with pytest.raises(
        RunFolderError, match=rf"tape\.jsonl has 11 steps, and the run had {num_steps}: its end is lost"
    ):
        check_parity(copied)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A real run that was ended by SIGKILL: nothing was closed, nothing was said. Whenever that was, requests were
    under way, as they come several times as fast as 8 at a time can be served."""
    folder = tmp_path / "killed"
    script = (
        "import sys; from pathlib import Path; from tests.parity.kit import real_config, real_run\n"
        "real_run(Path(sys.argv[1]), real_config('unified', trace__num_requests=4000))"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(folder)], stderr=subprocess.DEVNULL)
    tape = folder / "tape.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (tape.is_file() and tape.read_bytes().count(b'"kind":"step"') > 20):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return folder


def test_a_run_that_was_really_killed_has_all_that_parity_needs(
    killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check_parity(killed)
    assert report.divergence is None
    assert report.is_cut
    assert report.num_steps > 10
    assert manifest_of(killed)["status"] == "partial"
    said = say(capsys, "report", str(killed), "--out", str(killed / "report.html"))
    assert "no complete run" in said.error()


def test_the_records_of_a_killed_run_are_written_from_its_tape(
    killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = say(capsys, "explain", str(killed)).error()
    command = re.search(r"its tape has all steps up to there: `testbed (run [^`]+)` writes their records", error)
    assert command is not None, error
    restored = tmp_path / "restored"
    say(capsys, *command[1].split(), f"hydra.run.dir={restored}")
    run = load_run(restored)
    assert not run.is_complete
    assert len(run.steps) == check_parity(killed).num_steps
    assert run.requests.finish_ns.isna().any(), "those that had not ended are there too"


# --- what is no replay at all ---


def test_another_trace_is_refused(whole: Path, tmp_path: Path) -> None:
    other = trace_of(tmp_path, [{"request_id": "0", "arrival_time": 0, "prompt_tokens": 9, "output_tokens": 9}])
    config = replay_config(real_config("unified"), whole)
    with pytest.raises(RunFolderError, match="ran another trace"):
        execute(config, tmp_path / "sim", trace=other)
    assert not (tmp_path / "sim").exists()
    with pytest.raises(RunFolderError, match="ran another trace"):
        execute(replay_config(real_config("unified", seed=1), whole), tmp_path / "sim")


@pytest.mark.parametrize(
    ("group", "name", "value", "key"),
    [
        ("cache", "num_gpu_blocks", 7, "cache.num_gpu_blocks"),
        ("model", "name", "other", "model"),
        ("device", "name", "other", "device"),
    ],
)
def test_what_is_no_setting_of_the_tape_is_refused(
    whole: Path, tmp_path: Path, group: str, name: str, value: object, key: str
) -> None:
    raw = replay_config(real_config("unified"), whole).raw
    config = RunConfig.from_container({**raw, group: {**raw[group], name: value}})
    with pytest.raises(RunFolderError, match=rf"{key} is {value}, and .* ran with \w+: leave it out"):
        execute(config, tmp_path / "sim")
    assert not (tmp_path / "sim").exists()


def test_another_scheduler_is_stopped_where_it_decides_otherwise(whole: Path, tmp_path: Path) -> None:
    replayed = replayed_run(tmp_path / "sim", real_config("prefill_first"), whole)
    assert (replayed.status, replayed.exit_status) == ("partial", 1)
    assert "diverges from the recorded run at step" in replayed.message
    assert (tmp_path / "sim" / "requests.parquet").is_file()


def test_a_trace_of_the_folder_that_was_changed_is_refused(copied: Path) -> None:
    path = copied / "trace.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(TestbedError, match="ran another trace"):
        check_parity(copied)


def test_parity_says_identical_and_exits_with_0(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = say(capsys, "parity", str(whole))
    manifest = manifest_of(whole)
    assert said.status == 0
    expected = f"identical: {manifest['num_steps']} steps, decision digest {manifest['digest']}"
    assert said.out == f"{expected}\n"


def test_parity_shows_the_first_divergence_and_exits_with_1(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(copied, 4, one_more_token)
    said = say(capsys, "parity", str(copied))
    assert said.status == 1
    assert said.out.startswith("4 steps agree; step 4 differs: another batch was decided")
    starred = [line for line in said.out.splitlines() if line.startswith("*")]
    assert len(starred) == 1
    assert starred[0].startswith("* scheduled")
    assert "replayed" in said.out


@pytest.mark.parametrize("damage", ["nothing there", "no tape", "no manifest", "no config", "simulated", "no trace"])
def test_what_is_no_real_run_is_one_line(copied: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    folder = copied
    if damage == "nothing there":
        folder = copied / "nowhere"
    elif damage == "simulated":
        folder = copied.parent / "sim"
        execute(config_of(), folder)
    else:
        names = {"no tape": "tape.jsonl", "no manifest": "manifest.json", "no config": "config.yaml"}
        (copied / names.get(damage, "trace.jsonl")).unlink()
    assert str(folder) in say(capsys, "parity", str(folder)).error()
