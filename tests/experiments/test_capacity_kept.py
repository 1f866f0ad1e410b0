"""A search for capacity that is kept: it goes on, comes to the same, and compares policies seed by seed."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.measures.slo import LIMITS
from experiments import find_capacity
from experiments.capacity import study
from experiments.capacity.command import OVERLOAD, policies_table
from experiments.capacity.found import Capacity
from testbed.errors import ConfigError, RunFolderError
from tests.experiments.capacity_kit import BUSY, ends
from tests.experiments.documented_files import DOCS, check_keys
from tests.experiments.kit import Say


def files_of(folder: Path) -> dict[str, bytes]:
    names = ("capacity.json", "points.csv", "capacity.svg")
    return {name: (folder / name).read_bytes() for name in names}


TWO = (
    *(item for item in BUSY if not item.startswith("scheduler")), "scheduler=vllm_v1,sarathi", "slo.ttft_s=0.2",
    "slo.attainment=0.9", "seed=0,1",
)  # fmt: skip
COARSE = 0.1  # tolerance: what is looked at here shows in a few rates


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Capacity:
    """At once, by one process."""
    return find_capacity(*TWO, folder=tmp_path_factory.mktemp("searched"), tolerance=COARSE)


def test_the_same_command_goes_on_and_comes_to_the_same(
    tmp_path: Path, searched: Capacity, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(searched.folder, tmp_path / "a")
    command = ("capacity", *TWO, "--tolerance", str(COARSE), "--out", str(tmp_path / "a"))
    said = say(*command).success()
    before, points = files_of(tmp_path / "a"), sorted((tmp_path / "a" / "points").iterdir())
    simulated = []
    run_point = study.run_point
    monkeypatch.setattr(study, "run_point", lambda *given: (simulated.append(1), run_point(*given)))
    assert say(*command).out == said
    assert (files_of(tmp_path / "a"), simulated) == (before, [])
    for file in points[::2]:
        file.unlink()
    assert say(*command).out == said
    assert files_of(tmp_path / "a") == before
    assert len(points[::2]) <= len(simulated) < 2 * len(points)


def test_what_python_gets_prints_as_the_capacities_of_the_table(searched: Capacity) -> None:
    """A prompt or a notebook printed the whole configuration of each policy."""
    lines = repr(searched).splitlines()
    assert lines == str(searched).splitlines()
    assert [line.split(": ")[0] for line in lines] == ["vllm_v1", "sarathi"]
    for line, one in zip(lines, searched.found, strict=True):
        assert f"{one.capacity:.4g} req/s" in line
        assert line.endswith("]") == (one.interval is not None)


@pytest.mark.parametrize(("end", "sign"), [("kept", "<"), ("failed", "≥")])
def test_a_capacity_beyond_the_rates_that_were_tried_prints_as_in_the_table(
    searched: Capacity, end: str, sign: str
) -> None:
    """Under one seed all rates fail, where requests meet, or none does."""
    (one, *seeds), (first, *others) = searched.found[0].replicates, searched.found
    open_ended = replace(one, bracket=one.bracket._replace(**{end: None}))
    found = replace(searched, found=(replace(first, replicates=(open_ended, *seeds)), *others))
    (row,) = [line for line in policies_table(found.found).splitlines() if line.startswith("| vllm_v1 ")]
    told = repr(found).splitlines()[0].removeprefix("vllm_v1: ")
    assert told.startswith(f"{sign} ")
    assert f"| {told} " in row
    backwards = replace(found, baseline="sarathi")
    assert [one.estimate for one in (*found.changes, *backwards.changes)] == [None, None]


def test_capacities_in_two_units_have_no_change_from_one_to_the_other(searched: Capacity) -> None:
    first, other = searched.found
    of_sessions = replace(other, arm=replace(other.arm, is_of_sessions=True))
    changes = [replace(searched, found=(first, one)).changes[0] for one in (other, of_sessions)]
    assert [change.estimate is None for change in changes] == [False, True]


@pytest.mark.parametrize("text", ["{}", "[]", '{"load": ', '{"load": {"waiting": null}}', '"x"', "-3"])
def test_a_damaged_point_is_named(text: str, tmp_path: Path, searched: Capacity) -> None:
    shutil.copytree(searched.folder, tmp_path / "a")
    for file in (tmp_path / "a" / "points").iterdir():
        of_number = json.loads(file.read_text())
        of_number["load"]["num_failed"] = json.loads(text) if text[0] in '"-' else 0
        file.write_text(json.dumps(of_number) if text[0] in '"-' else text)
    with pytest.raises(RunFolderError, match=r"points/\w+\.json is damaged; delete it: the same command then runs"):
        find_capacity(*TWO, folder=tmp_path / "a")


def test_a_rate_that_is_not_the_searched_key_s_comes_with_the_setting_that_has_it(searched: Capacity) -> None:
    first, other = searched.found
    assert "setting" not in policies_table(searched.found)
    halved = replace(first, arm=replace(first.arm, per_value=0.5))
    header, _, row, _ = policies_table((halved, other)).splitlines()
    assert header.split("|")[-2].strip() == "setting"
    value = float(re.search(r"trace\.rate=([\d.]+) ", row)[1])
    assert halved.capacity == pytest.approx(value / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tolerance": "0.1"}, "tolerance is '0.1'; it must be from 0.001 to 0.5"),
        ({"jobs": "2"}, "jobs is '2'; it must be a whole number of at least 1"),
        ({"whole": "no"}, "whole is 'no'; it must be true or false"),
    ],
)
def test_a_value_of_another_type_is_one_line(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        find_capacity(*TWO, folder=tmp_path, **given)


def test_jobs_change_nothing(tmp_path: Path, searched: Capacity) -> None:
    coarse, jobs = np.float32(COARSE), np.int64(2)
    assert searched.points.equals(find_capacity(*TWO, folder=tmp_path, jobs=jobs, tolerance=coarse).points)


def test_while_one_search_writes_to_a_folder_another_is_refused(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, run_point, said = tmp_path / "a", study.run_point, []

    def beside(*given: Any) -> None:
        if not said:
            said.append(say("capacity", *BUSY, "slo.ttft_s=1", "--out", str(out)).error())
        run_point(*given)

    monkeypatch.setattr(study, "run_point", beside)
    find_capacity(*BUSY, "slo.ttft_s=1", folder=out, tolerance=0.5)
    assert said == [f"another process is writing to {out}; wait for its end, or choose another folder"]
    assert sorted(path.name for path in out.iterdir()) == ["points", "search.json"]


@pytest.mark.usefixtures("unrendered")
def test_an_interrupt_keeps_what_was_done(
    tmp_path: Path, searched: Capacity, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_point, num = study.run_point, [0]

    def interrupted(*given: Any) -> None:
        num[0] += 1
        if num[0] == 8:
            raise KeyboardInterrupt
        run_point(*given)

    monkeypatch.setattr(study, "run_point", interrupted)
    command = ("capacity", *TWO, "--tolerance", str(COARSE), "--out", f"{tmp_path}/a/")
    said = say(*command)
    assert said.status == 130
    assert "go on with: testbed capacity" in said.error()
    assert said.error().endswith(f"seed=0,1 {' '.join(command[-4:])}")
    assert len(list((tmp_path / "a" / "points").iterdir())) == 7
    num[0] = 7
    with pytest.raises(KeyboardInterrupt, match=f"points that were done are kept in {tmp_path / 'a'}: the same search"):
        find_capacity(*TWO, folder=tmp_path / "a", tolerance=COARSE)
    monkeypatch.setattr(study, "run_point", run_point)
    assert find_capacity(*TWO, folder=tmp_path / "a", tolerance=COARSE).points.equals(searched.points)


@pytest.mark.usefixtures("unrendered")
def test_another_search_is_refused_and_a_finer_one_goes_on(tmp_path: Path, say: Say) -> None:
    coarse = find_capacity(*TWO, folder=tmp_path, tolerance=0.1)
    num = len(list((tmp_path / "points").iterdir()))
    there = ("--out", str(tmp_path))
    for more, text in (
        ("slo.ttft_s=0.3", "slo.ttft_s of vllm_v1 is 0.2 there and 0.3 here"),
        ("seed=0,2", "seed is [0, 1] there and [0, 2] here"),
        ("cache.block_size=8", "cache.block_size of vllm_v1 is 4 there and 8 here"),
    ):
        assert text in say("capacity", *TWO, more, *there).error()
    fine = find_capacity(*TWO, folder=tmp_path, tolerance=0.02)
    assert len(list((tmp_path / "points").iterdir())) > num
    for before, after in zip(coarse.found, fine.found, strict=True):
        assert ends(before)[0] <= ends(after)[0] < ends(after)[1] <= ends(before)[1]
    again = say("capacity", *TWO, "--tolerance", "0.2", *there)
    assert "has the brackets of --tolerance 0.02, finer than asked for" in again.out
    rows = json.loads((tmp_path / "capacity.json").read_text())["policies"]
    assert [(row["capacity"], row["failed_at"]) for row in rows] == [ends(found) for found in fine.found]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").write_text("")
    refused = say("capacity", *TWO, "--out", str(tmp_path / "other")).error()
    assert "is not empty and holds no search" in refused


def test_a_search_goes_on_with_more_policies_and_seeds(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if all had been searched at once, and what was simulated is not simulated again."""
    one = tuple("scheduler=vllm_v1" if "scheduler" in item else item for item in TWO)
    find_capacity(*one, folder=tmp_path / "a", tolerance=0.1)
    simulated = []
    run_point = study.run_point
    monkeypatch.setattr(study, "run_point", lambda *given: (simulated.append(given[0]), run_point(*given)))
    both = find_capacity(*TWO, folder=tmp_path / "a", tolerance=0.1)
    assert {raw["scheduler"]["name"] for raw in simulated} == {"sarathi"}
    simulated.clear()
    more = find_capacity(*TWO, "seed=0,1,2", folder=tmp_path / "a", tolerance=0.1)
    assert sum(raw["seed"] < 2 for raw in simulated) <= 2 * 2 * 4, "only the capacity of all, and rates beside it"
    at_once = find_capacity(*TWO, "seed=0,1,2", folder=tmp_path / "b", tolerance=0.1)
    assert more.points.equals(at_once.points)
    assert [found.arm.name for found in both.found] == ["vllm_v1", "sarathi"]
    fewer = say("capacity", *one, "seed=0,1,2", "--out", str(tmp_path / "a")).error()
    assert "holds the search of sarathi too, which its tables would lose; name all policies" in fewer


def test_seeds_are_searched_each_and_policies_compared_by_them(searched: Capacity, tmp_path: Path, say: Say) -> None:
    shutil.copytree(searched.folder, tmp_path / "a")
    coarse = ("--tolerance", str(COARSE))
    said = say("capacity", *TWO, *coarse, "report.baseline=sarathi", "--out", str(tmp_path / "a"))
    result = json.loads((tmp_path / "a" / "capacity.json").read_text())
    first, base = result["policies"]
    assert (result["baseline"], base["change"]) == ("sarathi", None)
    check_keys("capacity.md", "### `capacity.json`", result)
    check_keys("capacity.md", "### `points.csv`", dict.fromkeys(pd.read_csv(tmp_path / "a" / "points.csv")))
    told = "".join(line for line in (DOCS / "capacity.md").read_text().splitlines() if "`fails_first`" in line)
    assert set(re.findall(r"`(\w+)`", told)) - {"policies", "fails_first"} == {*LIMITS, *OVERLOAD, "unfinished"}
    assert f"\nwrote {tmp_path / 'a' / 'capacity.md'}, capacity.json, capacity.png, points.csv\n" in said.out
    for policy, found in zip(result["policies"], searched.found, strict=True):
        each = [one["capacity"] for one in policy["seeds"]]
        kept = searched.points.query("policy == @found.arm.name and kept").groupby("seed")["rate"].apply(list)
        assert all(capacity in rates for capacity, rates in zip(each, kept, strict=True))
        assert policy["ci95_low"] < min(each) <= policy["capacity"] <= max(each) < policy["ci95_high"]
        assert policy["attainment"] == pytest.approx(sum(found.attainments) / 2)
        assert f"{min(found.attainments):.2%} to {max(found.attainments):.2%}" in said.out
    change = first["change"]
    assert change["ci95_low"] < change["percent"] < change["ci95_high"]
    assert re.search(r"^\| capacity against sarathi \| change, 95 % over 2 paired seeds \| ", said.out, re.MULTILINE)
    assert "one seed" not in said.out
    error = say("capacity", *TWO, "report.baseline=orca", "--out", str(tmp_path / "b")).error()
    assert "baseline 'orca': no arm is called so; the arms are: vllm_v1; sarathi" in error
