"""How numbers, changes, intervals and verdicts are written in sentences and tables."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from analysis import format as fmt
from analysis.comparison.arms import infer_arms
from analysis.comparison.compare import LATENCY, RATES, SLO_METRICS, Comparison, judge
from analysis.comparison.wording import bounds_text, change_text, interval_text, reached_text, verdict_text
from analysis.load import load_sweep
from analysis.measures.statistics import Estimate, differences, verdict
from analysis.reports.parts import ReportInput
from analysis.reports.report import write_report
from tests.analysis.runs import write_runs


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "not reached"),
        (0.0, "0 ms"),
        (1.23456, "1.23 s"),
        (12.345, "12.3 s"),
        (0.00123, "1.23 ms"),
        (4e-5, "40.0 µs"),
    ],
)
def test_durations_are_written_with_three_digits_and_a_unit(value, text):
    assert fmt.seconds(value).replace("\u00a0", " ") == text


def test_changes_are_signed_and_never_a_negative_zero():
    plain = [
        fmt.change(x).replace("\u00a0", " ") for x in (-0.01, 0.04, 3.14159, 9.94, -9.96, -23.4, 250.0, float("inf"))
    ]
    assert fmt.change(-99.6) == "÷250"
    assert fmt.change(-100.0) == "−100\u00a0%"
    assert plain == ["0 %", "0 %", "+3.1 %", "+9.9 %", "−10 %", "−23 %", "+250 %", "–"]
    assert fmt.significant(9.996) == "10.0"
    assert fmt.significant(-0.0) == "0"
    assert fmt.number(-1234.0) == "−1,234"
    assert fmt.number(None) == "–"
    assert [fmt.mean_count(x) for x in (0.000476, 0.0, 0.25, 3.14159, None)] == ["0", "0", "0.25", "3.14", "–"]


@pytest.mark.parametrize(
    ("change", "low", "high", "text"),
    [
        (5.35, 1.52, 15.0, "×6.3 [×2.5, ×16]"),
        (-0.9, -0.93, -0.88, "÷10 [÷14, ÷8.3]"),
        (10.0, -0.05, 2e9, "×11 [÷1.05, ×10,000 or more]"),
        (-0.23, -0.28, 8.0, "−23 % [−28, +800]"),
        (0.012, 0.0004, 0.023, "+1.2 % [+0.04, +2.3]"),
        (0.012, -0.00031, 0.023, "+1.2 % [−0.03, +2.3]"),
        (0.0003, 0.0002, 0.0004, "0 % [0, 0]"),
    ],
)
def test_a_change_and_its_interval_have_one_notation(change, low, high, text):
    estimate = Estimate(*(math.log1p(end) for end in (change, low, high)), 5, "paired t", "log_ratio")
    row = Comparison("arm", LATENCY[0], 1.0, estimate, "inside the noise")
    said = interval_text(row).replace("\u00a0", " ")
    assert said == text
    assert said.startswith(change_text(row).replace("\u00a0", " ")), "alone it is written alike"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1.14, "+10 %, to 1.14 s"),
        (1.2, "+10 %, of the means +20 %"),
        (0.99, "+10 %, of the means −1.0 %"),
        (None, "+10 %"),
    ],
)
def test_where_the_means_have_another_change_it_is_told_and_not_what_is_reached(value: float | None, said: str) -> None:
    """Of 10 s and 0.1 s, which become 9 s and 0.13 s, the ratios have a mean above 1, and the mean is less."""
    estimate = Estimate(math.log(1.1), 0.05, 0.2, 5, "paired t", "log_ratio")
    row = Comparison("arm", LATENCY[0], value, estimate, "higher", base=1.0)
    assert reached_text(row).replace("\u00a0", " ") == said
    far = Estimate(math.log(8.8), 2.0, 2.4, 5, "paired t", "log_ratio")
    assert reached_text(Comparison("arm", LATENCY[0], 9.6, far, "higher", base=1.0)) == "×8.8, of the means ×9.6"


def test_between_cost_models_nothing_is_better_or_worse():
    """Step times of another cost model are no policy's doing: times are longer or shorter, rates higher or lower."""
    estimate = Estimate(0.5, 0.4, 0.6, 5, "paired t", "log_ratio")
    told = {
        (metric.label, verdict): verdict_text(
            Comparison("constant", metric, 1.0, estimate, verdict, is_of_prices=True), 0.02
        )
        for metric in (LATENCY[0], RATES[0])
        for verdict in ("higher", "lower")
    }
    assert told == {
        ("mean TTFT", "higher"): "longer", ("mean TTFT", "lower"): "shorter",
        ("requests/s", "higher"): "higher", ("requests/s", "lower"): "lower",
    }  # fmt: skip
    of_policy = Comparison("sarathi", LATENCY[0], 1.0, estimate, "higher")
    assert verdict_text(of_policy, 0.02) == "worse"


def test_names_with_commas_are_told_apart():
    assert fmt.names(["a", "b"]) == "a and b"
    assert fmt.names(["a, on", "a, off", "b", "c"], 2) == "“a, on”, “a, off” and 2 more"


def test_a_change_of_a_share_is_told_in_points():
    base, other = np.array([0.40, 0.42, 0.41]), np.array([0.37, 0.38, 0.37])
    diff, scale = differences(base, other, are_shares=True)
    assert (scale, diff.tolist()) == ("difference", pytest.approx([-0.03, -0.04, -0.04]))
    estimate = Estimate(-0.037, -0.051, -0.022, 3, "paired t", scale)
    lost = Comparison("arm", SLO_METRICS[0], 0.37, estimate, "lower", base=0.41)
    assert interval_text(lost).replace("\u00a0", " ") == "−3.7 points [−5.1, −2.2]"
    assert (lost.gain, lost.log_ratio) == (-0.037, pytest.approx(math.log(0.373 / 0.41)))
    all_of_it = replace(lost, estimate=Estimate(-0.41, -0.5, -0.3, 5, "paired t", scale))
    assert change_text(all_of_it).replace("\u00a0", " ") == "−41.0 points"
    assert (all_of_it.gain, all_of_it.log_ratio) == (-0.41, -math.inf)
    assert change_text(replace(lost, verdict="identical")).replace("\u00a0", " ") == "0 points"
    assert [fmt.points(x).replace("\u00a0", " ") for x in (0.1 + 0.2 - 0.3, -5.6e-17, 1.54e-6)] == [
        "0 points", "0 points", "+0.00015 points",
    ]  # fmt: skip
    small = Estimate(0.0011, -0.001, 0.003, 5, "paired t", scale)
    noisy = replace(lost, value=0.2, base=0.2, estimate=small)
    (within,) = judge([replace(noisy, noise=0.01)], 0.02, ["one"])
    (beyond,) = judge([replace(noisy, noise=0.05)], 0.02, ["one"])
    assert (within.verdict, beyond.verdict) == ("equivalent", "inside the engine's noise"), "both relative to the base"
    assert verdict_text(within, 0.02).replace("\u00a0", " ") == "equivalent (±2 % of the baseline's)"
    none_left = Estimate(-0.4, -0.5, -0.3, 5, "paired t", scale)
    goodput = replace(all_of_it, metric=SLO_METRICS[1], base=0.4, estimate=none_left)
    said = interval_text(goodput).replace("\u00a0", " ")
    assert said == "from 0.400 req/s to 0 req/s by [−0.500 req/s, −0.300 req/s]"
    either = replace(goodput, estimate=Estimate(-0.4, -2.5, 0.858, 5, "paired t", scale))
    assert bounds_text(either).replace("\u00a0", " ") == "by [−2.50 req/s, +0.858 req/s]"


@pytest.mark.parametrize(("low", "says"), [(0.02, "undecided (corrected p = 0.12)"), (-0.02, "inside the noise")])
def test_a_cell_says_when_not_its_own_interval_but_the_correction_speaks(low, says):
    estimate = Estimate(0.1, low, 0.2, 5, "paired t", "log_ratio")
    row = Comparison("arm", LATENCY[0], 1.0, estimate, verdict(estimate, 0.02, 0.12), p_corrected=0.12)
    assert verdict_text(row, 0.02) == says


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize(("last", "is_marked"), [(90.0, True), (2.2, True), (1.5, False)])
def test_a_change_far_from_the_ratio_of_the_means_beside_it_is_marked(tmp_path, last, is_marked):
    write_runs(tmp_path, chunked=[False, True], seed=[0, 1, 2], num_requests=10)
    arms = infer_arms(load_sweep(tmp_path).runs)
    for arm, means in zip(arms, ((1.0, 1.1, last), (2.0, 2.2, last)), strict=True):
        for run, mean in zip(arm.runs, means, strict=True):
            run.summary["ttft_s"]["mean"] = mean
    path = write_report(ReportInput(arms), tmp_path / "report.html")
    note = "† Changes are geometric means over replicates; here they differ from the ratio of the means"
    for text in (path.read_text(), path.with_suffix(".md").read_text()):
        latency, throughput = text.partition("Latency")[2].split("Throughput")[:2]
        assert (latency.count(note), latency.count("†")) == ((1, 2) if is_marked else (0, 0))
        assert "†" not in throughput
