"""How far a report can be trusted: what was not measured is said, and the worst decides."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from analysis.comparison.arms import Arm, infer_arms
from analysis.comparison.effects import Compared
from analysis.comparison.fidelity import error_table
from analysis.comparison.pairs import Pair
from analysis.load import load_run
from analysis.reports.trust import Source, trust
from tests.analysis.runs import write_run, write_runs


@pytest.fixture
def arms(tmp_path: Path) -> list[Arm]:
    folders = write_runs(tmp_path, chunked=[False, True], seed=[*range(5)], num_requests=30)
    return infer_arms([*map(load_run, folders)])


def lights(arms: list[Arm], pairs: list[Pair]) -> dict[str, tuple[str, str]]:
    errors = {pair.label: error_table(pair.sim, pair.real) for pair in pairs}
    return {light.about: (light.level, light.why) for light in trust([Compared("", arms, [], ())], pairs, errors)}


def test_the_lights_say_what_was_not_measured(arms: list[Arm]) -> None:
    found = lights(arms, [])
    assert found["fidelity"] == ("poor", "simulated; how far from a real engine was not measured")
    assert found["step times"][0] == "poor", "those of linear show a mechanism"
    assert found["replicates"] == ("good", "5 replicates")
    assert found["records"] == ("good", "all checks hold")
    assert found["load"][0] == "good"
    nothing = error_table(arms[0].runs[0], arms[0].runs[0]).assign(error=math.nan)
    pair = Pair("a", arms[0].runs[0], arms[0].runs[0])
    said = trust([Compared("", arms, [], ())], [pair], {"a": nothing})[0].why
    assert said.endswith("on this model and device: no error is known, as no latency or rate is in both")
    alone = [Arm(arm.name, arm.levels, arm.runs[:1]) for arm in arms]
    assert lights(alone, [])["replicates"][0] == "poor"


def test_the_load_is_a_poor_one_if_every_arm_is_beyond_its_capacity(arms: list[Arm]) -> None:
    for arm, level in zip(arms, ["fair"] * (len(arms) - 1) + ["poor"], strict=True):
        for run in arm.runs:
            run.summary["steadiness"] = {"is_outrun": True}
        assert lights(arms, [])["load"][0] == level, arm.name
    assert lights(arms, [])["load"][1] == "beyond the capacity of every arm"


def test_a_measured_error_decides_the_light_of_fidelity(arms: list[Arm], tmp_path: Path) -> None:
    sim = arms[0].runs[0]
    for name, noise, level in (("same", 0.0, "good"), ("noisy", 0.6, "poor")):
        real = load_run(write_run(tmp_path / name, "real", chunked=False, num_requests=30, noise=noise))
        assert lights(arms, [Pair("p", sim, real)])["fidelity"][0] == level
    elsewhere = load_run(write_run(tmp_path / "other", "real", chunked=False, num_requests=30))
    elsewhere.manifest["model"] = "another"
    assert lights(arms, [Pair("p", sim, elsewhere)])["fidelity"][0] == "fair"


@pytest.mark.parametrize(("share", "level"), [(0.2, "fair"), (0.8, "poor")])
def test_tables_that_lack_most_of_the_time_are_no_source_of_it(share: float, level: str) -> None:
    manifest = {"cost": "tables", "cost_shares": {"measured": 1 - share, "scaled": 0.0, "roofline": share}}
    found = Source.of(manifest, {})
    assert found.level == level
    assert ("which lack 80.0\u00a0% of the time: that is from a data sheet" in found.said) == (level == "poor")
