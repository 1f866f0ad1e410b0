"""Latencies by the time of arrival: windows, the stretch in which they are worst, and their plot."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis import plots
from analysis.load import load_run
from analysis.measures.over_time import OverTime, WorstTime
from analysis.plots import style
from analysis.reading.request_columns import RequestColumns
from testbed.errors import ConfigError
from testbed.records.schema import STEP_COLUMNS
from tests.analysis.runs import requests_of, simulate, table, write_folder

S = 10**9


def row(arrival_s, ttft_s, **more):
    at, first = round(arrival_s * S), round((arrival_s + ttft_s) * S)
    done = {"token_ns": [first], "finish_ns": first, "finish_reason": "stop", "ttft_s": ttft_s, "e2e_s": ttft_s}
    return {"arrival_ns": at, **(done if ttft_s is not None else {}), **more}


def unfinished(arrival_s):
    return {"arrival_ns": round(arrival_s * S)}


def every_s(num, step_s, ttft_s):
    """Requests at 0, step_s, …; ttft_s: of the arrival, seconds."""
    return [row(index * step_s, ttft_s(index * step_s)) for index in range(num)]


def latency(rows, end_s=10_000):
    return OverTime((RequestColumns.of(requests_of(*rows)), end_s * S), "ttft_s")


def run_of(folder, rows, **config):
    steps = table([{"step": 0, "start_ns": 0, "end_ns": 100 * S, "num_running": 1, "num_waiting": 0}], STEP_COLUMNS)
    return load_run(
        write_folder(folder, requests_of(*rows), steps, simulate(num_requests=2)[2], {"trace": {}, **config})
    )


@pytest.mark.parametrize(
    ("span_s", "most", "window_s"), [(3600, 20, 200), (1000, 20, 50), (9, 4, 5), (0.8, 10, 0.1), (0, 9, 1), (7, 0, 10)]
)
def test_windows_are_of_1_2_or_5_times_a_power_of_ten(span_s, most, window_s):
    assert latency([row(5, 1), row(5 + span_s, 1)]).window_s(most) == pytest.approx(window_s)


def test_windows_begin_at_multiples_and_one_of_hardly_any_time_is_part_of_the_one_before():
    edges, parts = latency([row(at, 1) for at in (12, 19.9, 20, 35, 40.5)]).windows(10)
    assert edges.tolist() == [10, 20, 30, 50]
    assert [part.sum() for part in parts] == [2, 1, 2]
    edges, parts = latency([row(at, 1) for at in (12, 41)]).windows(10)
    assert (edges.tolist(), [part.sum() for part in parts]) == ([10, 20, 30, 40, 50], [1, 0, 0, 1])
    edges, parts = latency([]).windows(10)
    assert (edges.size, parts) == (0, [])


def test_the_worst_stretch_is_all_of_an_incident_and_the_others_have_none_of_it():
    """Two requests a second for an hour: 20 ms, 60 ms every fiftieth; three times that from 1,200 to 2,400 s."""

    def ttft_s(at):
        return (0.06 if round(at * 2) % 50 == 0 else 0.02) * (3 if 1200 <= at < 2400 else 1)

    found = latency(every_s(7200, 0.5, ttft_s)).worst()
    assert found == (1200, 2400, pytest.approx(0.18), pytest.approx(0.06), 1)


def test_of_several_stretches_the_one_with_the_worst_window_is_told():
    slow = {300: 0.5, 700: 0.9}
    found = latency(every_s(4000, 0.25, lambda at: slow.get(at // 100 * 100, 0.1))).worst()
    assert found == WorstTime(700.0, 800.0, pytest.approx(0.9), pytest.approx(0.1), 2)


def test_what_is_less_than_twice_the_usual_or_of_too_few_requests_is_no_incident():
    assert latency(every_s(4000, 0.25, lambda at: 0.19 if 300 <= at < 400 else 0.1)).worst() is None
    assert latency(every_s(399, 1, lambda at: 9.0 if at > 300 else 0.1)).worst() is None, "one window"
    few = [row(at, 0.1) for at in np.arange(0, 1000, 0.25) if not 300 <= at < 400] + [row(350, 9.0)] * 99
    assert latency(few).worst() is None, "of less than a hundred a P99 is that of one"
    assert latency([]).worst() is None


def test_a_stretch_whose_requests_have_no_token_yet_is_not_reached():
    rows = [unfinished(at) if at >= 900 else row(at, 0.1) for at in np.arange(0, 1000, 0.25)]
    assert latency(rows).worst() == WorstTime(900.0, 1000.0, np.inf, pytest.approx(0.1), 1)


def test_the_plot_has_the_quantiles_and_the_attainment_of_each_window(tmp_path):
    values = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    rows = [row(at, ttft) for at, ttft in zip((0, 1, 2, 10, 11, 35), values, strict=True)]
    run = run_of(tmp_path / "a", rows, slo={"ttft_s": 0.45})
    upper, lower = plots.latency_over_time({"one": run, "same": run}, window_s=10)
    p50, p99, *_ = upper.lines
    for line, level in ((p50, 50), (p99, 99)):
        x, y = line.get_data()
        assert x.tolist() == [0, 10, 20, 30, 35]
        parts = (values[:3], values[3:5], [np.nan], values[5:])
        np.testing.assert_allclose(y[:-1], [1e3 * np.percentile(part, level) for part in parts])
    assert p99.get_linewidth() > p50.get_linewidth()
    np.testing.assert_allclose(lower.lines[0].get_ydata()[:-1], [100, 50, np.nan, 0])
    assert [text.get_text() for text in upper.figure.legends[0].texts] == ["one", "same"]
    assert upper.get_title(loc="left").startswith("in windows of 10 s by arrival")


def test_a_p99_that_is_not_reached_has_a_mark_and_without_an_slo_there_is_one_panel(tmp_path):
    run = run_of(tmp_path / "a", [row(0, 0.1), row(1, 0.2), unfinished(12)])
    (axes,) = plots.latency_over_time(run, window_s=10)
    mark = axes.lines[2]
    assert (mark.get_marker(), mark.get_xdata().tolist()) == ("^", [11.0])
    own = Figure().subplots(2, 1)
    assert plots.latency_over_time(run, "e2e_s", ax=own[0])[0] is own[0]
    assert own[0].get_ylabel() == "E2E latency (ms)"
    with pytest.raises(ConfigError, match="this plot has 1 panel, and needs as many Axes"):
        plots.latency_over_time(run, ax=own)


def test_poor_runs_are_drawn(tmp_path):
    late = [row(99 + at / 1000, 0.1) for at in range(200)]
    for name, rows in (("none", []), ("late", late), ("one", [row(3, 0.1)]), ("unfinished", [unfinished(3)])):
        run = run_of(tmp_path / name, rows, slo={"ttft_s": 1})
        for is_narrow in (False, True):
            style.save(plots.latency_over_time(run, is_narrow=is_narrow), tmp_path / f"{name}{is_narrow}")


def test_another_metric_or_window_is_refused(tmp_path):
    run = run_of(tmp_path / "a", [row(0, 0.1), row(90, 0.2)])
    with pytest.raises(ConfigError, match=r"^metric is 'itl_s'; choose one of ttft_s, tpot_s, e2e_s$"):
        plots.latency_over_time(run, "itl_s")
    for window_s in (0, -1, 0.1, float("nan")):
        with pytest.raises(ConfigError, match=r"^window_s is .*; give one above 0, and at most 800 windows$"):
            plots.latency_over_time(run, window_s=window_s)
