"""What a report says under Reproduce makes its runs again: of a sweep one command, which has the same points."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from analysis.load import load_sweep
from analysis.reports.report import commands_of
from experiments.configuration.grammar import parsed
from experiments.configuration.overrides import check, combinations
from experiments.sweeps.sweep import _choices
from tests.experiments.kit import Say, manifest_of
from tests.experiments.test_sweeps import POINTS, sweep

OWN = """
class AtMost:
    def __init__(self, n):
        self.n = n

    def allows(self, seq, running):
        return len(running) < self.n
"""


def commands_in(folder: Path) -> list[str]:
    return commands_of(load_sweep(folder).runs)


def points_of(overrides: list[str]) -> set[tuple[str, ...]]:
    """What each point of a sweep is given."""
    keys = check(overrides, is_sweep=True)
    return {tuple(own) for _, own in combinations(_choices(list(map(parsed, overrides)), keys.library), keys)}


def given_in(folder: Path) -> set[tuple[str, ...]]:
    manifests = [manifest_of(run.path) for run in load_sweep(folder).runs]
    return {tuple(f"{key}={value}" for key, value in manifest["given"].items()) for manifest in manifests}


def test_what_a_sweep_is_judged_by_anew_is_what_makes_it_again(tmp_path: Path, say: Say) -> None:
    def judged(*points: str, ttft_s: float, question: str, margin: float) -> None:
        by = (f"slo.ttft_s={ttft_s}", f"report.question={question}", f"report.margin={margin}")
        sweep(say, tmp_path / "s", *points, *by).success()

    both = ("scheduler=unified,decode_first", "seed=0,1")
    judged(*both, ttft_s=0.5, question="old?", margin=0.05)
    judged(*both, ttft_s=0.006, question="new?", margin=0.01)
    (command,) = commands_in(tmp_path / "s")
    assert command.startswith("testbed run -m ")
    assert all(said in command for said in ("slo.ttft_s=0.006", "'report.question=new?'", "report.margin=0.01"))
    judged(both[0], "seed=1", ttft_s=0.1, question="some?", margin=0.01)
    first, second = commands_in(tmp_path / "s")
    assert "seed=0" in first
    assert "report.question=new?" in first
    assert "seed=1" in second
    assert "report.question=some?" in second


def test_a_point_that_another_command_names_otherwise_is_made_again_by_that_one(tmp_path: Path, say: Say) -> None:
    sweep(say, tmp_path / "s", POINTS)
    sweep(say, tmp_path / "s", POINTS, "allow_ignored=false")
    (command,) = commands_in(tmp_path / "s")
    assert "allow_ignored=false" in command


@pytest.mark.parametrize(
    "swept",
    [
        ("trace.transforms=[{name: window, start_s: 0, end_s: 0.01}],[{name: window, start_s: 0.005}]",
         "report.replicates=[trace.transforms]", "scheduler=unified,decode_first"),
        ("scheduler.admission=watermark,{_target_: reproduced_policy.AtMost, n: 16}", "seed=0,1"),
        ("report.question='Which is it, then?'", "trace.rate=400,5e2", "cache.watermark=null,0.1"),
    ],
    ids=["windows", "own class", "odd values"],
)  # fmt: skip
def test_the_command_of_a_report_has_the_points_of_the_sweep(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch, swept: tuple[str, ...]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "reproduced_policy.py").write_text(OWN)
    sweep(say, tmp_path / "s", *swept).success()
    (command,) = commands_in(tmp_path / "s")
    testbed, run, flag, *overrides, into = shlex.split(command)
    assert (testbed, run, flag, into) == ("testbed", "run", "-m", f"hydra.sweep.dir={tmp_path / 's'}")
    assert points_of(overrides) == given_in(tmp_path / "s")
    assert len(given_in(tmp_path / "s")) == 4
    said = say("run", "-m", *overrides, into)
    assert "done before  4 of 4 points" in said.out
