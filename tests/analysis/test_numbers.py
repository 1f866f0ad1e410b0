"""The changes of a report as numbers: the columns of `comparisons.csv`, and that it is of the page beside it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.comparison.compare import Comparison, metric_of
from analysis.comparison.effects import Compared, Effect, Interaction
from analysis.measures.statistics import Estimate
from analysis.reports.numbers import comparisons_frame
from analysis.reports.report import report_from_folders
from tests.analysis.runs import write_run, write_runs

TTFT = metric_of("ttft_s.mean")
FASTER = Estimate(np.log(0.8), np.log(0.7), np.log(0.9), 5, "t", "log_ratio", p_value=0.01)
ROW = Comparison("b", TTFT, 0.4, FASTER, "lower", p_corrected=0.02, effect=-2.5, base=0.5)


def frame_of(*rows: Comparison, effects: Any = (), **classes: list[Comparison]) -> Any:
    arms: Any = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    return comparisons_frame([Compared("rate = 8", arms, rows, effects, classes)])


def test_a_row_has_the_values_and_the_change_in_percent() -> None:
    (row,) = frame_of(ROW).to_dict("records")
    ends = [row.pop(name) for name in ("change", "low", "high")]
    assert ends == pytest.approx([-20, -30, -10])
    assert row == {
        "load": "rate = 8", "class": "", "arm": "b", "baseline": "a", "metric": TTFT.label, "key": "ttft_s.mean",
        "better": "lower", "value": 0.4, "baseline_value": 0.5, "unit": "%", "num_replicates": 5, "num_requests": None,
        "p": 0.01, "p_corrected": 0.02, "d": -2.5, "verdict": "better",
    }  # fmt: skip


def test_shares_are_in_points_and_what_has_no_ratio_in_its_own_unit() -> None:
    share = Estimate(0.1, -0.05, 0.25, 3, "t", "difference")
    none = Estimate(-0.5, -0.75, -0.25, 3, "t", "difference")
    frame = frame_of(
        replace(ROW, metric=metric_of("slo.attainment"), estimate=share), replace(ROW, value=0.0, estimate=none)
    )
    assert frame.unit.tolist() == ["points", ""]
    assert frame[["change", "low", "high"]].to_numpy() == pytest.approx(np.array([[10, -5, 25], [-0.5, -0.75, -0.25]]))


def test_a_change_without_an_interval_has_no_ends_and_one_that_is_not_known_is_none() -> None:
    frame = frame_of(replace(ROW, verdict="unknown"), replace(ROW, verdict="unknown", estimate=None))
    assert frame.verdict.tolist() == ["unknown", "unknown"]
    assert frame.change.notna().tolist() == [True, False]
    assert not frame[["low", "high"]].notna().any().any()


def test_classes_and_the_steps_of_factors_have_rows_and_no_average_hides_what_cells_disagree_on() -> None:
    effect = Effect("cache.watermark", 0.0, 0.1, ROW, (("a", "b"),), None)
    worse = replace(ROW, arm="y", verdict="higher", estimate=replace(FASTER, value=np.log(1.25)))
    uneven = replace(effect, interaction=Interaction((replace(ROW, arm="x"), worse), FASTER))
    frame = frame_of(ROW, effects=(effect, uneven), chat=[ROW])
    assert frame["class"].tolist() == ["", "chat", "", "", ""]
    step = "watermark 0.1 instead of 0"
    assert frame.arm.tolist() == ["b", "b", step, f"{step}, with x", f"{step}, with y"]
    assert frame.baseline.tolist() == ["a", "a", "", "", ""]
    assert frame.verdict.tolist() == ["better"] * 4 + ["worse"]


def test_an_interval_over_the_requests_of_one_trace_says_how_many_these_are():
    within = replace(FASTER, num=200, method="circular blocks of 3")
    (row,) = frame_of(replace(ROW, estimate=within)).to_dict("records")
    assert (row["num_replicates"], row["num_requests"]) == (1, 200)


@pytest.mark.usefixtures("unrendered")
def test_what_the_page_before_wrote_is_not_left_beside_a_page_that_compares_nothing(tmp_path):
    write_runs(tmp_path / "two", chunked=[False, True], num_requests=10)
    page = report_from_folders([tmp_path / "two"], tmp_path / "a page.html")
    files = page.with_name("a page_files")
    (files / "mine.png").touch()
    assert (files / "ablation_0.svg").exists()
    columns = pd.read_csv(files / "comparisons.csv").columns
    report_from_folders([write_run(tmp_path / "one", num_requests=10)], page)
    left = pd.read_csv(files / "comparisons.csv")
    assert (len(left), [*left.columns]) == (0, [*columns])
    stems = ("latency_cdf", "timeline")
    assert {file.name for file in files.iterdir()} == {
        "comparisons.csv", "mine.png", *(f"{stem}.{kind}" for stem in stems for kind in ("png", "svg"))
    }  # fmt: skip
