"""Every figure writes both files, and none stumbles over too little data."""

from __future__ import annotations

import warnings
from itertools import pairwise

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from analysis import plots
from analysis.comparison import fidelity
from analysis.comparison.compare import LATENCY, RATES, SLO_METRICS, Comparison
from analysis.load import load_run
from analysis.measures.statistics import Estimate, mean_t
from analysis.plots import curves, style
from analysis.plots.study_plots import _cdf_panel
from testbed.records.schema import STEP_COLUMNS
from tests.analysis.runs import requests_of, simulate, table, write_folder, write_run

S = 10**9


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return {
        "prefill_first": load_run(write_run(root / "a", chunked=False, num_requests=30, num_blocks=120)),
        "decode_first": load_run(write_run(root / "b", num_requests=30, num_blocks=120)),
        "cut": load_run(write_run(root / "c", num_requests=30, stop_s=2.0)),
        "real": load_run(write_run(root / "d", backend="real", noise=0.1, num_requests=30, num_blocks=120)),
    }


def degenerate(folder, rows, steps, **manifest):
    manifest = simulate(num_requests=2)[2] | {"num_gpu_blocks": None} | manifest
    steps = table(steps, STEP_COLUMNS)
    return load_run(write_folder(folder, requests_of(*rows), steps, manifest, {"trace": {"rate": 1}}))


@pytest.fixture(scope="module")
def poor(tmp_path_factory):
    """Runs with nothing to draw: no request, one without decode, equal ones, none that finished."""
    root = tmp_path_factory.mktemp("poor")
    one = {"arrival_ns": 0, "token_ns": [S], "finish_ns": S, "finish_reason": "stop"}
    step = {"step": 0, "start_ns": 0, "end_ns": S, "num_running": 1, "num_waiting": 0, "num_swapped": 0}
    step |= {"free_gpu_blocks": 3, "num_preempted": 0, "num_prefill_tokens": 4, "num_decode_tokens": 0}
    return {
        "none": degenerate(root / "none", [], []),
        "one": degenerate(root / "one", [one], [step]),
        "equal": degenerate(root / "equal", [one] * 5, [step]),
        "unfinished": degenerate(root / "unfinished", [{"arrival_ns": 0}], [step]),
    }


def saved(drawn, folder, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        png, svg = style.save(drawn, folder / name)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in svg.read_bytes()[:400]
    return png, svg


def test_every_figure_writes_png_and_svg(runs, tmp_path):
    saved(plots.latency_cdf(runs), tmp_path, "cdf")
    saved(plots.timeline({name: runs[name] for name in ("decode_first", "cut")}), tmp_path, "timeline")
    saved(plots.throughput_latency({name: [run] for name, run in runs.items()}), tmp_path, "load")
    matched = fidelity.match_requests(runs["decode_first"], runs["real"])
    saved(plots.sim_versus_real({"decode_first": matched}), tmp_path, "sim")
    base, zero = np.log([1.1, 1.15]), Estimate(-2.0, -3.0, -1.0, 3, "paired t", "difference")
    estimates = {"a": mean_t(base, "log_ratio"), "b": mean_t(base[:1], "log_ratio"), "c": None, "d": zero}
    said = {"a": "higher", "b": "unknown", "c": "unknown", "d": "lower"}
    rows = [
        Comparison(arm, metric, 1.0, estimate, said[arm], base=2.0)
        for metric in (LATENCY[0], RATES[0]) for arm, estimate in estimates.items()
    ]  # fmt: skip
    bars = plots.ablation_bars(rows)
    saved(bars, tmp_path, "bars")
    texts = [text.get_text().strip() for text in bars[1].texts]
    assert texts == ["not comparable", "from 2\u00a0req/s to 0\u00a0req/s"]


def test_on_a_phone_each_panel_has_all_names_and_the_same_bars(tmp_path):
    arms = ["decode_first, watermark 0", "x" * 40 + "y" * 40]
    rows = [
        Comparison(arm, metric, 1.0, mean_t(np.log([1.1, 1.15]), "log_ratio"), "higher", base=2.0)
        for metric in (LATENCY[0], LATENCY[1]) for arm in arms
    ]  # fmt: skip
    page, phone = plots.ablation_bars(rows), plots.ablation_bars(rows, is_narrow=True)
    saved(phone, tmp_path, "narrow")
    assert phone.shape == page.shape == (2,)
    assert phone[0].figure.get_figwidth() == page[0].figure.get_figwidth() / 2
    assert phone[0].bbox.y0 > phone[1].bbox.y1
    assert [label.get_text().replace("\n", "") for label in page[0].get_yticklabels()] == arms
    for wide, narrow in zip(page, phone, strict=True):
        assert [bar.get_width() for bar in narrow.patches] == [bar.get_width() for bar in wide.patches]
        assert [text.get_text().replace("\n", "") for text in narrow.texts] == arms
        ends = [text.get_window_extent() for text in narrow.texts]
        assert all(narrow.bbox.x0 <= one.x0 and one.x1 <= narrow.figure.bbox.x1 for one in ends)


@pytest.mark.parametrize("kind", ["latency_cdf", "throughput_latency", "timeline", "sim_versus_real"])
def test_on_a_phone_the_panels_stand_below_each_other_and_show_the_same(runs, kind, tmp_path):
    shown = {name: runs[name] for name in ("decode_first", "cut")}
    if kind == "throughput_latency":
        shown = {name: [run] for name, run in shown.items()}
    elif kind == "sim_versus_real":
        shown = {"decode_first": fidelity.match_requests(runs["decode_first"], runs["real"])}
    draw = getattr(plots, kind)
    page, phone = draw(shown), draw(shown, is_narrow=True)
    saved(phone, tmp_path, kind)
    assert phone.shape == page.shape
    assert style.figure_of(phone).get_figwidth() == style.figure_of(page).get_figwidth() / 2
    in_order = list(np.atleast_2d(phone).T.flat)
    for upper, lower in pairwise(in_order):
        assert upper.bbox.y0 > lower.bbox.y1
        assert upper.bbox.x0 < lower.bbox.x1
    for wide, narrow in zip(page.flat, phone.flat, strict=True):
        assert narrow.get_ylabel(), "said beside each"
        assert [line.get_xydata().tolist() for line in narrow.lines] == [
            line.get_xydata().tolist() for line in wide.lines
        ]
        assert narrow.get_ylim() == pytest.approx(wide.get_ylim())


@pytest.mark.parametrize("is_narrow", [False, True])
def test_arms_of_many_factors_leave_room_for_their_bars_and_are_told_apart(is_narrow):
    base = ["max num batched tokens 2048", "preemption auto", "queue order fcfs", "watermark 0", "prefix caching on"]
    others = [
        "max num batched tokens 8192", "preemption swap", "queue order sjf", "watermark 0.05", "prefix caching off",
    ]  # fmt: skip
    arms = [", ".join([*base[:i], other, *base[i + 1 :]]) for i, other in enumerate(others)]
    estimate = mean_t(np.log([5.0, 5.2]), "log_ratio")
    rows = [Comparison(arm, metric, 1.0, estimate, "higher", base=2.0) for metric in LATENCY[:4] for arm in arms]
    panels = plots.ablation_bars(rows, baseline=", ".join(base), is_narrow=is_narrow)
    panels[0].figure.canvas.draw()
    if is_narrow:
        assert [text.get_text() for text in panels[0].texts] == others
        return
    assert [label.get_text() for label in panels[0].get_yticklabels()] == others
    for before, after in pairwise(panels):
        assert before.title.get_window_extent().x1 < after.title.get_window_extent().x0
        assert before.xaxis.label.get_window_extent().x1 < after.xaxis.label.get_window_extent().x0


def told(axis):
    """The texts of the tick labels of an axis, from its low end to its high one."""
    return [label.get_text() for label in sorted(seen(axis), key=lambda label: label.get_position()[0])]


def bars_of(*ratios: float):
    estimates = [mean_t(np.log(ratio) + np.array([-1e-6, 1e-6]), "log_ratio") for ratio in ratios]
    rows = [Comparison(str(arm), LATENCY[0], 1.0, one, "higher", base=2.0) for arm, one in enumerate(estimates)]
    (axes,) = plots.ablation_bars(rows)
    axes.figure.canvas.draw()
    return axes


def test_bars_are_as_long_as_the_logarithm_of_their_ratio(tmp_path):
    axes = bars_of(290.0, 1 / 8.5, 2.0, 0.5)
    assert axes.get_xlabel() == "change (factor)"
    far, less, double, half = (bar.get_width() for bar in axes.patches)
    assert (far, less, double, half) == pytest.approx(tuple(np.log([290.0, 1 / 8.5, 2.0, 0.5])), abs=1e-3)
    assert {"÷10", "1", "×100"} < {*told(axes.xaxis)}
    saved(np.array([axes]), tmp_path, "far")


@pytest.mark.parametrize(
    ("ratios", "ticks"),
    [
        ((1.0001, 0.9999), "−2 −1.5 −1 −0.5 0 +0.5 +1 +1.5 +2"),
        ((1.05, 0.97), "−3 −2 −1 0 +1 +2 +3 +4 +5"),
        ((1.6, 0.7), "÷1.5 1 ×1.5"),
        ((13.0, 0.22), "÷5 ÷3 ÷2 ÷1.5 1 ×1.5 ×2 ×3 ×5 ×10"),
        ((13_000.0, 0.9), "÷2 1 ×2 ×3 ×5 ×10 ×100 ×1,000 ×10,000"),
    ],
)
def test_ticks_of_ratios_go_by_their_range(ratios, ticks):
    assert told(bars_of(*ratios).xaxis) == ticks.split()


@pytest.mark.parametrize(
    ("is_narrow", "ticks"), [(False, ["1", "×2", "×5", "×10"]), (True, ["1", "×2", "×3", "×5", "×10"])]
)
def test_all_panels_of_ratios_have_one_axis_with_as_many_ticks_as_fit(is_narrow, ticks):
    estimates = [mean_t(np.log([ratio * 0.99, ratio * 1.01]), "log_ratio") for ratio in (1.04, 1.41, 8.0, 20.0)]
    rows = [
        Comparison(f"watermark {arm}", metric, 1.0, one, "higher", base=2.0)
        for metric, some in zip(LATENCY, (estimates, estimates[:2], estimates[:1], estimates[2:]), strict=False)
        for arm, one in enumerate(some)
    ]  # fmt: skip
    panels = plots.ablation_bars(rows, is_narrow=is_narrow)
    panels[0].figure.canvas.draw()
    assert len({axes.get_xlim() for axes in panels}) == 1
    for axes in panels:
        labels = sorted(axes.get_xticklabels(), key=lambda label: label.get_window_extent().x0)
        assert [label.get_text() for label in labels] == ticks
        ends = [label.get_window_extent() for label in labels]
        assert all(before.x1 < after.x0 for before, after in pairwise(ends))


def test_bars_of_shares_are_in_points_however_wide_their_interval():
    estimate = mean_t(np.array([0.05, 0.60]))
    share = Comparison("a", SLO_METRICS[0], 0.6, estimate, "inside the noise", base=0.3)
    ratio = Comparison("a", LATENCY[0], 1.0, mean_t(np.log([3.0, 3.1]), "log_ratio"), "higher")
    axes, other = plots.ablation_bars([share, ratio])
    assert (axes.get_xlabel(), other.get_xlabel()) == ("change (points)", "change (factor)")
    assert axes.get_xlim() == (-1.0, 1.0)
    assert {"−100", "0", "+100"} <= {*told(axes.xaxis)}
    (bar,) = [patch for patch in axes.patches if patch.get_width()]
    assert bar.get_width() == pytest.approx(0.325)


@pytest.mark.parametrize("is_narrow", [False, True])
def test_a_legend_has_long_names_whole_and_within_the_figure(runs, is_narrow):
    names = ["queue order shortest_prompt_first_of_the_tenant_with_the_fewest_tokens, " * 2, "fcfs"]
    drawn = plots.latency_cdf(dict.fromkeys(names, runs["decode_first"]), is_narrow=is_narrow)
    figure = style.figure_of(drawn)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text().replace("\n", "").replace(" ", "") for text in legend.get_texts()] == [
        name.replace(" ", "") for name in names
    ]
    assert figure.bbox.x0 <= legend.get_window_extent().x0
    assert legend.get_window_extent().x1 <= figure.bbox.x1
    assert legend.get_window_extent().y1 < drawn[-1].xaxis.label.get_window_extent().y0


@pytest.mark.parametrize(("num", "end_ms", "label"), [(1000, 996, "TTFT (ms), up to P99.5"), (100, 9000, "TTFT (ms)")])
def test_a_distribution_is_shown_up_to_the_tail_of_all_runs_together(num, end_ms, label):
    values = np.append(np.arange(1, num) / 1e3, 9.0)
    _, ((axes,),) = style.grid(1, 1, 2.0)
    both = {name: (some, np.empty(0)) for name, some in {"a": values[: num // 2], "b": values[num // 2 :]}.items()}
    _cdf_panel(axes, both, "TTFT")
    assert axes.get_xlim()[1] == pytest.approx(1.02 * end_ms, rel=2e-3)
    assert axes.get_xlabel() == label


def test_a_long_tail_takes_no_room_before_a_distribution():
    values = np.append(np.linspace(2e-3, 5e-3, 999), 9.0)
    _, ((axes,),) = style.grid(1, 1, 2.0)
    _cdf_panel(axes, {"a": (values, np.empty(0))}, "TPOT")
    assert 1.5 < axes.get_xlim()[0] < 2.0, "in ms, as all but one are from 2 to 5"


def test_a_name_with_dollar_signs_is_no_mathematics(runs, tmp_path):
    name, run = r"mine(pattern=$x\foo$)", runs["decode_first"]
    rows = [Comparison(name, LATENCY[0], 1.0, mean_t(np.log([1.1, 1.15]), "log_ratio"), "higher", base=2.0)]
    cdf, over_time, batches = (
        plot({name: run}) for plot in (plots.latency_cdf, plots.timeline, plots.batch_composition)
    )
    lives = plots.gantt(run.requests.assign(request_id=name))
    for number, drawn in enumerate((cdf, over_time, batches, lives, plots.ablation_bars(rows))):
        saved(drawn, tmp_path, f"drawn_{number}")
    assert style.figure_of(cdf).legends[0].get_texts()[0].get_text() == name.replace("$", r"\$")


def test_long_names_of_many_runs_leave_the_panels_their_height(runs):
    name = "vllm_v1, watermark 0.02, prefix caching off, queue order shortest_prompt_first"
    (upper, *_), (lower, *_) = plots.timeline({f"{name} {number}": runs["decode_first"] for number in range(6)})
    upper.figure.draw_without_rendering()
    labels = [axes.yaxis.label.get_window_extent() for axes in (lower, upper)]
    assert labels[0].y1 < labels[1].y0


def seen(axis):
    """The tick labels of an axis that are within its limits."""
    axis.axes.figure.draw_without_rendering()
    low, high = sorted(axis.get_view_interval())
    return [label for label in axis.get_ticklabels() if low <= label.get_position()[axis.axis_name == "y"] <= high]


def ticks_of(axis):
    return [label.get_text() for label in seen(axis)]


def test_a_run_of_an_unknown_pool_takes_no_ticks_from_the_others(poor, runs):
    (unknown, known), (_, queues) = plots.timeline({"unknown": poor["one"], "known": runs["decode_first"]})
    assert [text.get_text() for text in unknown.texts] == ["size of the pool unknown"]
    assert ticks_of(unknown.yaxis)[-1] == "100"
    assert known.yaxis.get_ticklocs().tolist() == unknown.yaxis.get_ticklocs().tolist()
    assert len(ticks_of(queues.xaxis)) > 2


def test_panels_without_values_have_no_invented_scale(poor, runs):
    panels = plots.latency_cdf({"none": poor["unfinished"]})
    assert ticks_of(panels[0].yaxis)
    for axes in panels:
        assert [text.get_text() for text in axes.texts] == ["no request has one"]
        assert not ticks_of(axes.xaxis)
    for axes in plots.throughput_latency({"none": [poor["unfinished"]]}):
        assert [text.get_text() for text in axes.texts] == ["not reached"]
        assert not ticks_of(axes.yaxis)
    for axes in plots.throughput_latency({"one": [runs["decode_first"]], "none": [poor["unfinished"]]}):
        assert not axes.texts
        assert ticks_of(axes.yaxis)


def test_queues_that_stay_empty_have_whole_numbers(tmp_path):
    step = {"step": 0, "start_ns": 0, "end_ns": S, "num_running": 0, "num_waiting": 0, "num_swapped": 0}
    step |= {"free_gpu_blocks": 3, "num_preempted": 0, "num_prefill_tokens": 0, "num_decode_tokens": 0}
    _, (queues,) = plots.timeline(degenerate(tmp_path / "idle", [{"arrival_ns": 0}], [step]))
    assert ticks_of(queues.yaxis) == ["0", "1"]


def test_a_usage_that_can_hardly_be_seen_is_said(tmp_path):
    for blocks, said in ((2000, "at most 0.100\u00a0%"), (20, None)):
        run = load_run(write_run(tmp_path / str(blocks), num_requests=1))
        run.manifest["num_gpu_blocks"] = blocks
        run.steps["free_gpu_blocks"] = blocks - 2
        (usage,), _ = plots.timeline(run)
        assert [text.get_text() for text in usage.texts] == ([said] if said else [])


@pytest.mark.parametrize(("low", "high"), [(2.2, 12.0), (3.1, 16.0), (1100.0, 9000.0), (3.1, 60.0), (3.1, 3e5)])
def test_a_logarithmic_axis_has_at_least_three_labels_that_do_not_touch(low, high):
    _, (panels,) = style.grid(1, 3, 2.0)
    panels[0].plot([low, high], [0, 1])
    assert style.log_if_wide(panels[0].xaxis, np.array([low, high]), ratio=5.0)
    boxes = [label.get_window_extent() for label in seen(panels[0].xaxis)]
    assert len(boxes) >= 3
    assert all(before.x1 < after.x0 for before, after in pairwise(boxes))


def test_poor_data_draws_without_a_warning(poor, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = [plots.latency_cdf({name: run}) for name, run in poor.items()]
        drawn += [plots.timeline(poor), plots.throughput_latency({name: [run] for name, run in poor.items()})]
        drawn += [plots.latency_cdf({}), plots.timeline({}), plots.throughput_latency({}), plots.sim_versus_real({})]
        drawn += [plots.ablation_bars([]), plots.ablation_bars([Comparison("a", LATENCY[0], None, None, "unknown")])]
        drawn += [plots.sim_versus_real({"x": fidelity.match_requests(run, run)}) for run in poor.values()]
    for index, axes in enumerate(drawn):
        saved(axes, tmp_path, f"plot_{index}")


def test_files_are_the_same_each_time_drawn_once_each_and_globals_stay_untouched(runs, tmp_path, monkeypatch):
    before, draw, drawn = dict(mpl.rcParams), Figure.draw, []
    monkeypatch.setattr(Figure, "draw", lambda self, renderer: (drawn.append(renderer), draw(self, renderer)))
    first = [path.read_bytes() for path in saved(plots.latency_cdf(runs), tmp_path, "one")]
    assert len(drawn) == len(first)
    second = [path.read_bytes() for path in saved(plots.latency_cdf(runs), tmp_path, "two")]
    assert first == second
    assert dict(mpl.rcParams) == before


def test_curves_of_many_points_are_thinned_to_their_extremes():
    values = np.zeros(50_000)
    values[[123, 40_001]] = 7.0, -3.0
    times, kept = curves.thin(np.arange(50_000.0), values)
    assert times.size < 2_000
    assert kept.max() == 7.0
    assert kept.min() == -3.0


def fleet(folder, num_replicas=3):
    """The first replica at twice the second's load for the same second; a third one that was never used."""
    rows = [
        {"arrival_ns": 0, "token_ns": [S], "finish_ns": S, "finish_reason": "stop", "replica": i % 2} for i in range(3)
    ]
    both = {"start_ns": 0, "end_ns": S, "num_waiting": 1, "num_swapped": 0, "num_preempted": 0}
    both |= {"num_prefill_tokens": 4, "num_decode_tokens": 0, "step": 0}
    steps = [both | {"replica": 0, "num_running": 2, "free_gpu_blocks": 0}]
    steps += [both | {"replica": 1, "num_running": 1, "free_gpu_blocks": 5}]
    return degenerate(folder, rows, steps, num_gpu_blocks=10, num_replicas=num_replicas, router="random")


def test_a_fleet_has_a_timeline_of_sums_and_a_band(tmp_path):
    drawn = plots.timeline({"fleet": fleet(tmp_path / "fleet")})
    usage, requests = drawn[:, 0]
    queues = {line.get_color(): line.get_ydata().tolist() for line in requests.lines}
    assert queues == {style.BLUE: [3.0, 0.0], style.VERMILLION: [2.0, 0.0]}
    (mean,) = usage.lines
    assert mean.get_ydata().tolist() == pytest.approx([(100 + 50 + 0) / 3, 0.0])
    (band,) = usage.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0.0, 100.0)  # from the replica that does nothing to the full one
    assert "range over replicas" in [text.get_text() for text in usage.figure.legends[0].get_texts()]
    saved(drawn, tmp_path, "fleet")


@pytest.mark.parametrize("column", ["num_preempted", "num_swapped_out"])
def test_steps_that_preempted_in_either_way_are_marked(tmp_path, column):
    row = {"arrival_ns": 0, "token_ns": [4 * S], "finish_ns": 4 * S, "finish_reason": "stop"}
    step = {"num_running": 1, "num_waiting": 0, "num_swapped": 0, "num_preempted": 0, "num_swapped_out": 0}
    steps = [step | {"step": i, "start_ns": i * S, "end_ns": (i + 1) * S, "free_gpu_blocks": 3} for i in range(4)]
    steps[2][column] = 1
    _, requests = plots.timeline(degenerate(tmp_path / "run", [row], steps))[:, 0]
    assert [line.get_xdata().tolist() for line in requests.lines if line.get_marker() == "|"] == [[2.0]]
    ((never, _),) = plots.timeline(degenerate(tmp_path / "never", [row], steps[:2])).T
    told = [[text.get_text() for text in one.figure.legends[0].get_texts()] for one in (requests, never)]
    assert told == [["running", "waiting", "preemption"], ["running", "waiting"]]


@given(st.data())
def test_a_sum_of_levels_is_their_sum_at_every_instant(data):
    times = st.lists(st.integers(0, 12), min_size=1, max_size=8).map(sorted)
    levels = []
    for drawn in data.draw(st.lists(times, min_size=1, max_size=4)):
        values = data.draw(st.lists(st.integers(0, 9), min_size=len(drawn), max_size=len(drawn)))
        levels.append(curves.Level(np.array(drawn, dtype=float), np.array(values, dtype=float)))
    instants = np.arange(-0.5, 13.0, 0.5)
    expected = np.zeros(instants.size)
    for level in levels:
        for place, instant in enumerate(instants):
            past = [value for time, value in zip(level.times_s, level.values, strict=True) if time <= instant]
            expected[place] += past[-1] if past else 0.0
    np.testing.assert_array_equal(curves.total(levels).at(instants), expected)


def test_characters_without_a_font_are_said_once(tmp_path):
    """In one warning; others are passed on, and fonts that are installed are not taken before Matplotlib's own."""
    assert style.STYLE["font.family"][0] == "DejaVu Sans"
    for name, expected in (("a", 1), ("b", 0)):
        with style.styled():
            figure, ((axes,),) = style.grid(1, 1, 1.0)
        axes.set_title("\U0010fffc\U0010fffd policy")  # of no writing
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            style.save(figure, tmp_path / name)
        assert ["drawn as boxes" in str(one.message) for one in caught] == [True] * expected
