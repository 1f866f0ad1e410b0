"""Limits of changes: which fail, of which nothing can be said, and that a report checks them when it is written."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis.comparison.compare import Comparison, metric_of
from analysis.comparison.effects import Compared
from analysis.measures.statistics import ALIKE, Estimate
from analysis.reports.gates import Gate, GateError, check
from analysis.reports.report import report_from_folders
from testbed.errors import ConfigError, RunFolderError
from tests.analysis.runs import change_requests, write_run, write_runs

PAGE = Path("r.html")
SLOWER = Estimate(math.log(1.2), math.log(1.1), math.log(1.3), 5, "paired t", "log_ratio", p_value=0.01)
ROW = Comparison("b", metric_of("ttft_s.mean"), 0.6, SLOWER, "higher", p_corrected=0.02, base=0.5)
LESS = Estimate(-3.99, -4.01, -3.97, 5, "paired t", "difference", p_value=0.01)
GOODPUT = replace(ROW, metric=metric_of("slo.goodput_per_s"), value=0.01, base=4.0, estimate=LESS, verdict="lower")
ALIKE_IN_FEW = Estimate(0.2, -math.inf, math.inf, 3, ALIKE, "log_ratio")
SHARE = replace(
    ROW, metric=metric_of("slo.attainment"), estimate=Estimate(-0.1, -0.15, -0.05, 5, "paired t"), verdict="lower"
)


def checked(gate: str, *rows: Comparison, arms: tuple[str, ...] = ("a", "b"), load: str = "", **classes: Any) -> str:
    """The lines that the check raises, of whatever kind; "" if the limit is kept."""
    base: Any = SimpleNamespace(name="a")
    try:
        check([Gate.parse(gate)], [Compared(load, [base], rows, (), classes)], arms, PAGE)
    except (GateError, RunFolderError) as error:
        return f"{error.exit_status}: {error}".replace("\u202f", " ").replace("\u00a0", " ")
    return ""


@pytest.mark.parametrize(
    ("gate", "row", "fails"),
    [
        ("ttft_s.mean>9%", ROW, True),
        (" ttft_s.mean > +9.5 % ", ROW, True),
        ("ttft_s.mean>11%", ROW, False),  # the change is larger, but may be smaller
        ("ttft_s.mean<-9%", ROW, False),
        ("ttft_s.mean<31%", ROW, True),  # a gain was asked for
        ("ttft_s.mean>0%", replace(ROW, verdict="inside the engine's noise"), False),
        ("ttft_s.mean>-1%", replace(ROW, verdict="identical", estimate=Estimate(0, 0, 0, 5, "equal")), True),
        ("ttft_s.mean>0%", replace(ROW, verdict="identical", estimate=Estimate(0, 0, 0, 5, "equal")), False),
        ("slo.goodput_per_s<-99%", GOODPUT, True),  # in some replicates 0, so a difference
        ("slo.goodput_per_s<-99.5%", GOODPUT, False),
        ("slo.goodput_per_s<-99.5%", replace(GOODPUT, value=0.0, verdict="unknown"), True),
        ("slo.goodput_per_s>1000%", replace(GOODPUT, base=0.0, estimate=replace(LESS, low=0.1, high=0.2)), True),
        ("slo.attainment<-4points", SHARE, True),
        ("slo.attainment<-6 points", SHARE, False),
    ],
)
def test_a_change_fails_if_its_whole_interval_is_beyond_the_limit(gate, row, fails):
    assert checked(gate, row)[:2] == ("3:" if fails else "")


def test_each_failure_is_a_line_with_the_page_the_arm_the_load_and_the_interval():
    said = checked("ttft_s.mean>5%", ROW, replace(ROW, arm="c"), arms=("a", "b", "c"), load="rate = 8")
    assert said.removeprefix("3: ").splitlines() == [
        f"r.html: {arm} against a at rate = 8: mean TTFT +20 % [+10, +30], beyond 'ttft_s.mean>5%'" for arm in "bc"
    ]
    of_class = replace(ROW, metric=replace(ROW.metric, path="classes.ttft_s.mean.chat"))
    assert "b against a for tenant chat: " in checked(
        "classes.ttft_s.mean.chat>5%", replace(ROW, estimate=None), **{"tenant chat": [of_class]}
    )


@pytest.mark.parametrize(
    ("gate", "rows", "said"),
    [
        ("ttft_s.p99>5%", [ROW], "ttft_s.p99 is not compared; did you mean 'ttft_s.mean'? --metric adds"),
        ("slo.goodput_per_s<-5%", [ROW], "is not compared; --slo gives it"),
        ("ttft_s.mean>5%", [], "nothing is compared"),
        ("ttft_s.mean>5points", [ROW], "changes of ttft_s.mean are in percent"),
        ("slo.attainment<-5%", [SHARE], "changes of slo.attainment are in points"),
        ("ttft_s.mean>50%", [ROW, replace(ROW, arm="c", estimate=None)], "judged of c: not comparable, or no interval"),
        ("ttft_s.mean>50%", [replace(ROW, verdict="unknown", estimate=ALIKE_IN_FEW)], "judged of b: not comparable"),
        ("ttft_s.mean>50%", [ROW], "judged of c: not comparable, or no interval, which more replicates (seeds) give"),
    ],
)
def test_a_limit_that_cannot_be_judged_is_no_limit_that_is_kept(gate, rows, said):
    found = checked(gate, *rows, arms=("a", "b", "c") if "of c" in said else ("a", "b"))
    assert found.startswith(f"1: r.html: {gate!r} cannot be judged")
    assert said in found


@pytest.mark.parametrize("text", ["ttft_s.mean", "ttft_s.mean>5", "ttft_s.mean>=5%", ">5%", "ttft_s.mean>five%", ""])
def test_what_is_no_limit_is_refused_before_anything_is_read(text, tmp_path):
    with pytest.raises(ConfigError, match=r"--fail-if .* expected in quotes a key of the summary"):
        report_from_folders([tmp_path], PAGE, fail_if=[text])


@pytest.mark.usefixtures("unrendered")
def test_the_report_is_written_and_then_its_limits_are_checked(tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"runs/base-{seed}", num_requests=30, seed=seed)
        other = write_run(tmp_path / f"runs/other-{seed}", num_requests=30, seed=seed, chunked=False)
        change_requests(other, lambda i, row: 3.0 + i % 2)
    page = tmp_path / "r.html"
    report_from_folders([tmp_path / "runs"], page, fail_if=["ttft_s.mean>1000%", "e2e_s.mean<-5%"])
    page.unlink()
    with pytest.raises(GateError, match=r"r.html: prefill_first against decode_first: mean E2E .*, beyond 'e2e_s"):
        report_from_folders([tmp_path / "runs"], page, fail_if=["e2e_s.mean>5%"])
    assert page.exists()


def test_runs_that_failed_are_judged_by_no_limit(tmp_path):
    write_runs(tmp_path / "runs", chunked=[False, True], seed=[0, 1, 2, 3], num_requests=30)
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "manifest.json").write_text('{"status": "partial", "failure": "it broke"}')
    page = tmp_path / "page.html"
    with pytest.raises(RunFolderError, match="1 run failed or did not end, which no limit judges"):
        report_from_folders([tmp_path / "runs"], page, fail_if=["ttft_s.mean>1000%"])
    assert page.exists()
    report_from_folders([tmp_path / "runs"], page)
