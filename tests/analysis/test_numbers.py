"""The changes of a report as numbers: what each column of `comparisons.csv` is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from analysis.comparison.compare import Comparison, metric_of
from analysis.comparison.effects import Compared, Effect, Interaction
from analysis.measures.statistics import Estimate
from analysis.reports.numbers import comparisons_frame

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
        "value": 0.4, "baseline_value": 0.5, "unit": "%", "num": 5, "p": 0.01, "p_corrected": 0.02, "d": -2.5,
        "verdict": "better",
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
