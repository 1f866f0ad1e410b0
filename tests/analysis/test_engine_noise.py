"""Measured repeats are one observation in whatever order, and what may be the engine's own noise is no finding."""

from __future__ import annotations

import math
import re
from itertools import permutations

import pytest

from analysis.comparison.arms import infer_arms, num_replicates
from analysis.comparison.compare import LATENCY, compare, engine_noise, mean_over_replicates, noise_limit
from analysis.comparison.effects import main_effects
from analysis.load import Run, load_run
from analysis.measures.statistics import widened
from analysis.reports.fidelity_findings import engine_noise_said
from analysis.reports.report import report_from_folders
from tests.analysis.runs import change_manifest, change_requests, write_run

MEANS = LATENCY[:6:2]  # of so few requests a P99 has no interval
MEAN_TTFT = MEANS[0]
UNMEASURED = "How far the real engine differs from itself was not measured"


def measured(folder, slowness, backend="real", **options):
    """A run whose requests take so many times as long, all else equal."""
    change_requests(write_run(folder, backend, **options), lambda i, row: slowness)
    return load_run(folder)


@pytest.fixture
def runs(tmp_path) -> dict[str, Run]:
    """Three repeats of one policy, the slowest 8.5 times as slow as the fastest, and one of another in between."""
    slowness = {"b1": 4.8, "b2": 8.5, "b3": 1.0}
    repeats = {name: measured(tmp_path / name, factor) for name, factor in slowness.items()}
    return repeats | {"a": measured(tmp_path / "a", 2.0, chunked=False)}


def test_repeats_on_the_engine_are_one_observation_in_whatever_order(runs):
    found = set()
    for order in permutations([runs["b1"], runs["b2"], runs["b3"]]):
        arms = infer_arms([*order, runs["a"]])
        assert num_replicates(arms) == 1
        rows = compare(arms, arms[0], LATENCY)
        assert all(row.base == pytest.approx(mean_over_replicates(arms[0], row.metric)) for row in rows)
        told = [(row.estimate.value, row.estimate.low, row.estimate.high) for row in rows if row.estimate]
        found.add((tuple(row.verdict for row in rows), repr([[round(x, 9) for x in one] for one in told])))
    assert len(found) == 1
    mean = sum(run.summary["ttft_s"]["mean"] for run in (runs["b1"], runs["b2"], runs["b3"])) / 3
    assert mean_over_replicates(arms[0], MEAN_TTFT) == pytest.approx(mean)
    assert rows[0].estimate.value == pytest.approx(math.log(runs["a"].summary["ttft_s"]["mean"] / mean))


@pytest.mark.parametrize("slowness", [(1.0, 1.5), (1.5, 1.0)])
def test_a_change_within_the_spread_of_repeats_is_no_claim(tmp_path, slowness):
    """Of one repeat it is widened to 1.5^4.6: of two equal runs, one half differ by more than two others did."""
    again = [measured(tmp_path / f"b{i}", factor) for i, factor in enumerate(slowness)]
    near, far = (infer_arms([*again, measured(tmp_path / f"a{x}", x, chunked=False)]) for x in (5.0, 20.0))
    assert engine_noise(near, MEAN_TTFT) == pytest.approx(0.5)
    assert noise_limit(near, MEAN_TTFT) == pytest.approx(widened(0.5, 1))
    assert 5.0 / 1.25 > 1.5, "further apart than the repeats"
    (said,) = engine_noise_said({"": near})
    assert "of a change within that (widened, as 1 repeat hardly says how large it is) no claim is made" in said
    assert {row.verdict for row in compare(near, near[0], MEANS)} == {"inside the engine's noise"}
    assert {row.verdict for row in compare(far, far[0], MEANS)} == {"higher"}
    swapped = near[::-1]
    assert compare(swapped, swapped[0], [MEAN_TTFT])[0].verdict == "inside the engine's noise", "of either arm"


def test_equal_means_are_not_called_equivalent_where_repeats_are_apart(tmp_path):
    again = [measured(tmp_path / f"b{i}", factor) for i, factor in enumerate((1.0, 3.0))]
    arms = infer_arms([*again, measured(tmp_path / "a", 2.001, watermark=0.011)])
    quiet = infer_arms([measured(tmp_path / "b", 2.0), measured(tmp_path / "c", 2.001, watermark=0.011)])
    verdicts = [compare(both, both[0], [MEAN_TTFT])[0].verdict for both in (quiet, arms)]
    assert verdicts == ["equivalent", "inside the engine's noise"]


def test_of_one_run_each_no_noise_is_known_and_simulated_copies_have_none(tmp_path):
    once = infer_arms([measured(tmp_path / f"once-{on}", 1.0, chunked=on) for on in (True, False)])
    assert engine_noise(once, MEAN_TTFT) is None
    assert any(row.is_claim for row in compare(once, once[0], LATENCY))
    copies = infer_arms([load_run(write_run(tmp_path / f"sim{i}")) for i in range(2)])
    assert engine_noise(copies, MEAN_TTFT) is None
    assert num_replicates(copies) == 1


def test_noise_in_what_no_run_recorded_is_not_told(tmp_path):
    arms = infer_arms(
        [measured(tmp_path / name, 2.0) for name in ("b1", "b2")] + [measured(tmp_path / "a", 1.0, chunked=False)]
    )
    assert "P99 ITL" in engine_noise_said({"": arms})[0]
    for arm in arms:
        for run in arm.runs:
            run.summary["itl_s"] = None
    (said,) = engine_noise_said({"": arms})
    assert "P99 E2E" in said
    assert "P99 ITL" not in said


def test_main_effects_within_the_noise_are_no_claim(tmp_path):
    arms = {(on, mark): (1.0 if on else 3.0) for on in (True, False) for mark in (0.01, 0.3)}
    runs = [
        measured(tmp_path / f"{on}-{mark}-{seed}", factor, chunked=on, watermark=mark, seed=seed)
        for (on, mark), factor in arms.items()
        for seed in range(4)
    ]
    claimed = main_effects(inferred := infer_arms(runs), inferred[0], [MEAN_TTFT])
    assert any(effect.comparison.is_claim for effect in claimed)
    again = measured(tmp_path / "again", 90.0, watermark=0.01)
    noisy = main_effects(inferred := infer_arms([*runs, again]), inferred[0], [MEAN_TTFT])
    assert not any(effect.comparison.is_claim for effect in noisy)


@pytest.mark.usefixtures("unrendered")
def test_the_page_says_the_same_in_whatever_order_the_folders_are_given(runs, tmp_path):
    said = set()
    for order in (("b1", "b2", "b3"), ("b3", "b1", "b2")):
        folders = [tmp_path / name for name in (*order, "a")]
        text = report_from_folders(folders, tmp_path / "report.html").with_suffix(".md").read_text()
        assert "3 runs are repeats on the real engine: their mean counts, as one run." in text
        assert "mean TTFT 750 %" in text
        assert UNMEASURED not in text
        assert all(f"| {name} |" in text for name in order), "every run that counts is listed"
        latency = text.partition("**Latency**")[2].partition("\n**")[0]
        assert "<br>inside the engine's noise" in latency
        assert not re.search(r"<br>(better|worse)", latency)
        assert "equal runs differ by up to 750 %" in text
        said.add(text.partition("\n## Setup")[0])
    assert len(said) == 1


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize(("backend", "times"), [("real", 1), ("vllm", 1), ("sim", 0)])
def test_a_page_on_measured_runs_without_a_repeat_says_so_once(tmp_path, backend, times):
    folders = [measured(tmp_path / f"run-{on}", 1.0, backend, chunked=on).path for on in (True, False)]
    text = report_from_folders(folders, tmp_path / "report.html").with_suffix(".md").read_text()
    assert text.count(UNMEASURED) == times


@pytest.mark.usefixtures("unrendered")
def test_what_runs_say_of_their_own_times_stands_on_the_page(tmp_path):
    folders = [measured(tmp_path / f"run-{on}", 1.0 if on else 90.0, chunked=on).path for on in (True, False)]
    once = report_from_folders(folders, tmp_path / "once.html").with_suffix(".md").read_text()
    assert "- On this one trace, each measured once, " in once.partition("## Answer")[2].partition("| trust |")[0]
    assert "| fidelity | poor | measured on a real engine, nothing is simulated; how far the engine differs" in once
    for folder, share in zip(folders, (31, 44), strict=True):
        busy = {"notes": [f"BUSY MACHINE: for {share} % of the time it waited"]}
        change_manifest(folder, replay=busy, host={"core_wait_share": share / 100})
    text = report_from_folders(folders, tmp_path / "report.html").with_suffix(".md").read_text()
    assert "BUSY MACHINE: for 44 % of the time it waited (the worst of 2 runs that say so)" in text
    answer = text.partition("## Answer")[2].partition("| trust |")[0]
    assert "- On this one trace, each measured once, on a busy machine, " in answer
    assert "| fidelity | poor | measured on a real engine, nothing is simulated, but others used" in text
