"""Headline numbers of the classes of requests, and that a report compares each class by itself."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.comparison.arms import Arm, infer_arms
from analysis.comparison.compare import LATENCY, compare, of_classes
from analysis.comparison.effects import Compared, Effect
from analysis.load import Run, load_run
from analysis.measures.slo import SLO
from analysis.reports.classes import class_claims, pooled_said
from analysis.reports.first_screen import answer
from analysis.reports.report import report_from_folders
from tests.analysis.runs import change_requests, write_run
from tests.analysis.test_first_screen import chosen


def with_classes(
    folder: Path, num: int, factors: tuple[float, ...] = (), column: str = "tenant", **options: Any
) -> Run:
    """A run whose requests are of `num` classes in turn; the times of each class are multiplied by its factor."""

    def change(i: int, row: dict[str, Any]) -> float:
        row |= {"tenant": f"v1.{i % num}"} if column == "tenant" else {"tenant": None, "priority": i % num}
        return (factors or (1.0,) * num)[i % num]

    change_requests(write_run(folder, num_requests=120, **options), change)
    return load_run(folder)


def test_classes_are_the_tenants_or_else_the_priorities(tmp_path):
    run = with_classes(tmp_path / "tenants", 3)
    found = run.summary_under(SLO(ttft_s=0.05))["classes"]
    assert (found["by"], found["num_requests"]) == ("tenant", {"v1.0": 40, "v1.1": 40, "v1.2": 40})
    mine = run.requests[run.requests["tenant"] == "v1.1"]
    assert found["ttft_s"]["mean"]["v1.1"] == pytest.approx(mine["ttft_s"].mean())
    assert found["attainment"]["v1.1"] == pytest.approx((mine["ttft_s"] <= 0.05).mean())
    assert run.summary["classes"]["attainment"] is None, "without an SLO"
    many = with_classes(tmp_path / "many", 9)
    assert many.summary["classes"] is None
    (said,) = pooled_said([Compared("", infer_arms([many]), (), ())])
    assert said == "These numbers pool 9 tenants: classes are compared for up to 8."
    assert list(of_classes([many, run], with_slo=False)) == ["tenant v1.0", "tenant v1.1", "tenant v1.2"]
    by_priority = with_classes(tmp_path / "priorities", 2, column="priority").summary["classes"]
    assert (by_priority["by"], by_priority["num_requests"]) == ("priority", {"0": 60, "1": 60})
    assert json.loads(json.dumps(by_priority)) == by_priority


@pytest.mark.usefixtures("unrendered")
def test_a_class_that_gains_while_all_requests_lose_is_told(tmp_path):
    with_classes(tmp_path / "runs" / "base", 2)
    with_classes(tmp_path / "runs" / "other", 2, (0.25, 6.0), chunked=False)
    arms = infer_arms([load_run(tmp_path / "runs" / name) for name in ("base", "other")])
    metrics = of_classes([run for arm in arms for run in arm.runs], with_slo=False)
    assert list(metrics) == ["tenant v1.0", "tenant v1.1"]
    found = [compare(arms, arms[0], of[:1])[0] for of in metrics.values()]
    assert [row.claim for row in found] == ["better", "worse"]
    assert [row.metric.label for row in found] == ["mean TTFT"] * 2
    frames = [arm.runs[0].requests for arm in arms]
    means = [frame[frame["tenant"] == "v1.0"]["ttft_s"].mean() for frame in frames]
    assert found[0].estimate is not None
    assert found[0].estimate.value == pytest.approx(math.log(means[1] / means[0])), "of the requests of the class only"
    (pooled,) = compare(arms, arms[0], LATENCY[:1])
    assert pooled.claim == "worse"
    third = Arm("third", {}, (with_classes(tmp_path / "third", 2),))
    third.runs[0].summary["steadiness"] = {"is_outrun": True}
    (told,) = pooled_said([Compared("", [*arms, third], [pooled], (), {"tenant v1.0": found[:1]})])
    assert f"may hide one: on this one trace, {arms[1].name} is better in mean TTFT" in told, (
        "the third has no part in it"
    )
    for verdict, is_told in (("inside the noise", True), ("equivalent", False), ("unknown", False)):
        group = Compared("", arms, [replace(pooled, verdict=verdict)], (), {"tenant v1.0": found[:1]})
        assert pooled_said([group])[0].endswith("over all requests, which is inside the noise.") == is_told
    page = report_from_folders([tmp_path / "runs"], tmp_path / "report.html", baseline=arms[0].name).with_suffix(".md")
    text = page.read_text()
    assert text.count("**Class tenant v1.") == 2
    assert text.count("corrected over arms and metrics, not over classes") == 1
    (said,) = [line for line in text.partition("## Answer")[2].splitlines() if line.startswith("- These numbers pool")]
    assert "pool the classes of requests (tenant v1.0 and tenant v1.1), which are compared one by one in tables" in said
    assert f"may hide one: on this one trace, {arms[1].name} is better in " in said


@pytest.mark.usefixtures("unrendered")
def test_where_all_requests_show_nothing_the_claims_in_classes_are_told_the_largest_first(tmp_path):
    for seed in range(4):
        with_classes(tmp_path / "runs" / f"base-{seed}", 2, seed=seed)
        with_classes(tmp_path / "runs" / f"other-{seed}", 2, (0.4, 4.0), chunked=False, seed=seed)
    arms = infer_arms([load_run(folder) for folder in sorted((tmp_path / "runs").iterdir())])
    names = "queue order fcfs", "queue order edf", "queue order edf_chat", "queue order priority"
    arms = [replace(arms[index > 0], name=name) for index, name in enumerate(names)]
    metrics = of_classes([run for arm in arms for run in arm.runs], with_slo=False)
    classes = {name: compare(arms, arms[0], of[:1]) for name, of in metrics.items()}
    assert {row.claim for rows in classes.values() for row in rows} == {"better", "worse"}
    quiet = [replace(row, verdict="inside the noise") for row in compare(arms, arms[0], LATENCY[:1])]
    for rows in classes.values():
        for index, row in enumerate(rows):
            assert row.estimate is not None
            rows[index] = replace(row, estimate=replace(row.estimate, value=(1 + index) * row.estimate.value))
    group = Compared("", arms, quiet, (), classes)
    told = class_claims([group], 0.02, 3)
    assert [text.partition(" against")[0] for text in told] == [names[3], names[2], names[1]]
    assert told[2].startswith("queue order edf against queue order fcfs: for tenant v1.0, better in mean TTFT (")
    assert "; for tenant v1.1, worse in mean TTFT (" in told[2]
    assert "may hide one: queue order priority is " in pooled_said([group])[0]
    first, second = class_claims([group], 0.02, 2)
    assert first.startswith(names[3])
    assert second.endswith(". 1 more difference in classes is in their tables.")
    assert class_claims([group], 0.02, 0) == []
    claimed = [replace(row, verdict="higher") for row in quiet]
    of_factor = [Effect("x.a", 0, 1, claimed[0], (), None)]
    for said_already in (group._replace(rows=claimed), group._replace(effects=of_factor)):
        only_gain, *_ = class_claims([said_already], 0.02, 3)
        assert "worse" not in only_gain, "all requests together say so"
    said, *_ = answer([group._replace(rows=chosen(quiet, "mean TTFT"))], None)
    assert said.startswith("Over all requests, nothing that was compared differs beyond the noise (mean TTFT ")
    assert f" with {names[0]}" in said
    _, said = answer([group._replace(rows=[claimed[0], *quiet[1:]])], None)
    assert said.startswith(
        f"Over all requests, {names[2]} against {names[0]} and {names[3]} against {names[0]} show no "
    )
    (said,) = answer([group._replace(rows=[replace(row, verdict="unknown") for row in quiet])], None)
    assert said.startswith("Over all requests, there is too little data for a claim")


@pytest.mark.usefixtures("unrendered")
def test_names_of_tenants_steer_no_terminal(tmp_path):
    named = {"v1.0": "\x1b[31mred", "v1.1": "tab\tnl\nx"}
    for name, chunked in (("base", True), ("other", False)):
        folder = with_classes(tmp_path / "runs" / name, 2, chunked=chunked).path
        change_requests(folder, lambda _, row: row.update(tenant=named[row["tenant"]]) or 1.0)
    page = report_from_folders([tmp_path / "runs"], tmp_path / "report.html")
    for file in (page, page.with_suffix(".md")):
        text = file.read_text().replace("\\\\", "\\")
        assert "Class tenant \\x1b[31mred" in text
        assert "(tenant \\x1b[31mred and tenant tab\\tnl\\nx)" in text
        assert not {"\x1b", "\t"} & set(text)


@pytest.mark.usefixtures("unrendered")
def test_a_class_that_a_replicate_lacks_is_compared_over_the_others(tmp_path):
    """Of a third replicate, which has one class only, nothing is in the tables of classes, and they say so."""
    for seed, num in enumerate((2, 2, 1)):
        with_classes(tmp_path / "runs" / f"base-{seed}", num, seed=seed)
        with_classes(tmp_path / "runs" / f"other-{seed}", num, (4.0, 0.2)[:num], chunked=False, seed=seed)
    page = report_from_folders([tmp_path / "runs"], tmp_path / "report.html").with_suffix(".md")
    text = page.read_text()
    assert text.count("**Class tenant v1.1**") == 1
    assert "- These numbers pool the classes of requests (tenant v1.0 and tenant v1.1)" in text
    assert ": for tenant v1.0, " in text.partition("## Answer")[2].partition("- These numbers")[0]
    assert "2 of 6 runs have no request of this class, and are left out here." in text
