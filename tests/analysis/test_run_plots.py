"""Plots of one run show what its records say: runs of the simulator, short of blocks, a fleet, three requests."""

from __future__ import annotations

import warnings
from itertools import pairwise

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot
from matplotlib.colors import to_rgb

from analysis.explain.frames import Told
from analysis.load import load
from analysis.plots import latency_cdf, pareto, run_plots, style, throughput_latency, timeline
from analysis.plots.curves import MAX_POINTS, Level
from analysis.plots.run_plots import batch_composition, gantt, preemption_scatter
from experiments import simulate
from testbed.errors import ConfigError

KEEPING = {"decisions": True}


def made(folder, num_requests=80, rate=25, num_blocks=300, **settings):
    trace = {"name": "synthetic", "rate": rate, "num_requests": num_requests}
    cache = {"num_gpu_blocks": num_blocks, "num_cpu_blocks": 2000}
    return simulate(trace, cache=cache, folder=folder, **settings)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    swapping = {"name": "vllm_v0", "preemption": "swap"}
    cut = [{"request_id": f"r{i}", "arrival_time": i / 50, "prompt_tokens": 60, "output_tokens": 40} for i in range(9)]
    cut[2]["cancel_after"] = 0.01
    cut.append({"request_id": "huge", "arrival_time": 0.1, "prompt_tokens": 3000, "output_tokens": 4})
    return {
        "short": made(root / "short", record=KEEPING),
        "plain": made(root / "plain"),
        "swap": made(root / "swap", scheduler=swapping, record=KEEPING),
        "fleet": made(root / "fleet", rate=60, backend={"num_replicas": 3}, record=KEEPING),
        "three": made(root / "three", num_requests=3, rate=5),
        "cut": simulate(cut, cache={"num_gpu_blocks": 40}, folder=root / "cut"),
        "no steps": made(root / "no_steps", num_requests=3, record={"steps": False}),
        "nothing": simulate([cut[-1]], cache={"num_gpu_blocks": 40}, folder=root / "nothing", allow_ignored=True),
    }


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return made(tmp_path_factory.mktemp("long"), num_requests=1000, rate=30, num_blocks=1200, record=KEEPING)


def saved(drawn, stem):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in style.save(drawn, stem):
            assert path.stat().st_size < 800_000


def legend_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def bars_of(axes, phase):
    look = run_plots._PHASES[phase]
    return [
        patch
        for patch in axes.patches
        if patch.get_facecolor()[:3] == to_rgb(look["facecolor"]) and patch.get_hatch() == look.get("hatch")
    ]


@pytest.mark.filterwarnings("error::UserWarning")
def test_every_kind_of_run_is_drawn_in_both_formats(runs, tmp_path):
    for number, run in enumerate(runs.values()):
        for plot in (batch_composition, gantt, preemption_scatter):
            saved(plot(run), tmp_path / f"{plot.__name__}_{number}")
    saved(batch_composition({name: runs[name] for name in ("short", "fleet", "no steps")}), tmp_path / "several")


def test_what_a_plot_does_not_take_is_refused_by_its_type(runs):
    run = runs["three"]
    sweep = load([run.path])
    several = r"a Run \(of a Sweep: one of its runs\) or a Sweep or a list of Runs or a dict of them by label$"
    for plot, source, kind, takes in (
        (gantt, sweep, "Sweep", r"a Run \(of a Sweep: one of its runs\) or one of their frames$"),
        (preemption_scatter, [run], "list", r"a Run .* or a Sweep or one of their frames$"),
        (latency_cdf, sweep.requests, "DataFrame", several),
        (timeline, "runs/a", "str", several),
        (batch_composition, None, "NoneType", several),
        (batch_composition, [3], "int", r"a Run \(of a Sweep: one of its runs\)$"),
        (throughput_latency, run, "Run", "a Sweep or a dict of them by label$"),
        (throughput_latency, {"a": run}, "Run", "a list of Runs$"),
        (throughput_latency, {"a": [3]}, "int", r"a Run \(of a Sweep: one of its runs\)$"),
        (pareto, [run], "list", r"a Run .* or a Sweep or one of their frames$"),
    ):
        with pytest.raises(ConfigError, match=f"^a plot is given a {kind}; this one takes {takes}"):
            plot(source)
    preemption_scatter(sweep)
    with pytest.raises(ConfigError, match="no column 'num_tokens'; nearest: "):
        preemption_scatter(sweep, x="num_tokens")
    for plot in (gantt, preemption_scatter):
        with pytest.raises(ConfigError, match=r"without them; give it a run's or a sweep's \.requests"):
            plot(sweep.frame)


# --- batch composition ---


@given(st.data())
def test_the_mean_of_a_level_is_its_integral_over_its_length(data):
    times = np.array(sorted(data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=8))), dtype=float)
    values = np.array([data.draw(st.integers(0, 9)) for _ in times], dtype=float)
    edges = np.array(sorted(data.draw(st.sets(st.integers(-3, 25), min_size=2, max_size=6))), dtype=float)
    level = Level(times, values)
    fine = np.arange(-3, 25)  # everything changes at whole seconds
    held = level.at(fine.astype(float))
    expected = [held[(fine >= low) & (fine < high)].mean() for low, high in pairwise(edges)]
    np.testing.assert_allclose(level.mean_between(edges), expected)


def test_the_stack_has_every_token_of_the_steps(runs):
    run = runs["three"]
    axes = batch_composition(run)
    decode, prefill = (collection.get_paths()[0].get_extents().ymax for collection in axes.collections)
    assert decode == pytest.approx(run.steps["num_decode_tokens"].max())
    assert prefill == pytest.approx((run.steps["num_decode_tokens"] + run.steps["num_prefill_tokens"]).max())
    assert legend_of(axes) == ["decode", "prefill"]
    assert axes.get_ylabel() == "tokens per step"


def test_many_steps_are_averaged_over_intervals_and_the_label_says_so(long):
    assert len(long.steps) > 2 * MAX_POINTS
    axes = batch_composition(long)
    assert "mean over" in axes.get_ylabel()
    (line,) = axes.lines
    steps = long.steps
    held = np.diff(np.append(steps["start_ns"], steps["end_ns"].iloc[-1]))  # busy from the first step to the last
    mean = np.nanmean(line.get_ydata())
    assert mean == pytest.approx((steps["num_decode_tokens"] * held).sum() / held.sum(), rel=1e-6)


def test_several_runs_stand_above_each_other_on_one_scale(runs):
    panels = batch_composition({name: runs[name] for name in ("short", "fleet")})
    assert [axes.get_title(loc="left") for axes in panels] == ["short", "fleet"]
    assert panels[0].get_xlim() == panels[1].get_xlim()
    assert panels[0].get_ylim() == panels[1].get_ylim()
    assert "all replicas" in panels[1].get_ylabel().replace("\n", " ")
    for plot in (batch_composition, timeline):
        with pytest.raises(ConfigError, match="7 runs are too many for one picture; choose at most 6 of them"):
            plot(dict.fromkeys("abcdefg", runs["short"]))
    with pytest.raises(ConfigError, match="at most 1"):
        batch_composition({"a": runs["short"], "b": runs["three"]}, ax=panels[0])


def test_a_step_without_tokens_leaves_the_panel_empty_and_says_why(runs):
    assert [text.get_text() for text in batch_composition(runs["nothing"]).texts] == ["no step computed tokens"]


def test_a_run_of_days_has_ticks_of_days_and_bars_that_are_seen(tmp_path):
    run = made(tmp_path / "days", num_requests=12, rate=2e-5)
    _, (queues,) = timeline(run)
    for axes in (batch_composition(run), queues, gantt(run)):
        axes.figure.draw_without_rendering()
        assert axes.get_xlabel() == "time since the start of the run (d)"
        labels = [label for label in axes.get_xticklabels() if label.get_text()]
        boxes = [label.get_window_extent() for label in labels]
        assert all(before.x1 < after.x0 for before, after in pairwise(boxes))
        assert [float(label.get_text()) * 86400 for label in labels] == [label.get_position()[0] for label in labels]
        assert len(labels) < 12
    (decodes,) = {(bar.get_linewidth(), bar.get_edgecolor()) for bar in bars_of(axes, "decode")}
    assert decodes == (0.4, bars_of(axes, "decode")[0].get_facecolor())


# --- Gantt ---


@pytest.mark.parametrize("name", ["short", "swap", "fleet"])
def test_the_preemptions_of_decisions_are_those_of_the_records(runs, name):
    run = runs[name]
    found = Told(run, explained=False).preemptions
    requests = run.requests.set_index("request_id")
    counts = requests["num_preemptions"]
    assert found["request_id"].value_counts().to_dict() == counts[counts > 0].to_dict()
    assert {*found["mode"]} == {"swap" if name == "swap" else "recompute"}
    assert (found["at_ns"] < found["back_ns"]).all()
    assert (found["back_ns"] <= found["request_id"].map(requests["finish_ns"])).all()


def test_a_gantt_chart_has_each_requests_phases_and_preemptions(runs):
    run = runs["short"]
    axes = gantt(run, max_rows=80)
    requests = run.requests.sort_values("arrival_ns", kind="stable")
    for phase, start, end in (
        ("queued", "arrival_ns", "first_scheduled_ns"),
        ("prefill", "first_scheduled_ns", "first_token_ns"),
        ("decode", "first_token_ns", "finish_ns"),
    ):
        drawn = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars_of(axes, phase)]
        np.testing.assert_allclose(drawn, requests[[start, end]].astype(float).to_numpy() / 1e9)
    away = bars_of(axes, "preempted (recompute)")
    marks = [line for line in axes.lines if line.get_marker() == "v"]
    assert len(away) == len(marks[0].get_xdata()) == requests["num_preemptions"].sum() > 10
    assert axes.get_title(loc="left") == "", "all are shown"


def test_rows_are_limited_and_the_title_says_of_how_many(long, tmp_path):
    axes = gantt(long)
    assert axes.get_title(loc="left") == "the first 40 of 1,000 requests, by arrival"
    assert len(bars_of(axes, "decode")) == 40
    window = gantt(long, from_s=20.0, to_s=21.0, max_rows=10)
    assert "in this window" in window.get_title(loc="left")
    assert window.get_xlim()[0] == 20.0
    assert window.get_xlim()[1] <= 21.0
    saved(window, tmp_path / "window")


def test_without_decisions_the_names_say_how_often(runs):
    run = runs["plain"]
    labels = [label.get_text() for label in gantt(run, max_rows=60).get_yticklabels()]
    counts = run.requests.sort_values("arrival_ns", kind="stable")["num_preemptions"].head(60)
    assert [("preempted" in label) for label in labels] == (counts > 0).tolist()


def test_chosen_requests_a_frame_and_an_empty_window(runs):
    requests = runs["short"].requests
    worst = requests.nlargest(5, "e2e_s")
    labels = [label.get_text().split()[0] for label in gantt(worst).get_yticklabels()]
    chosen = gantt(runs["short"], request_ids=worst["request_id"].tolist())
    assert sorted(labels) == sorted(label.get_text() for label in chosen.get_yticklabels())
    assert [text.get_text() for text in gantt(requests, from_s=1e6).texts] == ["no request is in the system then"]


def test_what_did_not_finish_is_marked_at_its_end(runs):
    axes = gantt(runs["cut"])
    assert {"abort", "ignored"} <= set(legend_of(axes))
    frame = runs["cut"].requests.assign(finish_ns=None, finish_reason=None)
    assert "unfinished" in legend_of(gantt(frame))


def test_phases_are_told_apart_in_grey():
    greys = [np.dot(to_rgb(run_plots._PHASES[name]["facecolor"]), [0.3, 0.59, 0.11]) for name in run_plots._PHASES]
    hatched = [look.get("hatch") for look in run_plots._PHASES.values()]
    for one in range(len(greys)):
        for other in range(one):
            assert abs(greys[one] - greys[other]) > 0.12 or hatched[one] != hatched[other]


# --- preemption scatter ---


def test_every_finished_request_is_one_point_of_its_class(runs):
    run = runs["short"]
    axes = preemption_scatter(run)
    times = run.requests["num_preemptions"]
    sizes = [len(line.get_xdata()) for line in axes.lines]
    assert sizes == [
        n for n in ((times == 0).sum(), (times == 1).sum(), times.between(2, 3).sum(), (times > 3).sum()) if n
    ]
    stay = (run.requests["finish_ns"] - run.requests["first_scheduled_ns"]).astype(float) / 1e6
    assert sorted(np.concatenate([line.get_ydata() for line in axes.lines])) == pytest.approx(sorted(stay))
    assert legend_of(axes)[0] == f"never preempted ({sizes[0]})"


def test_preempted_requests_lie_above_the_others(runs):
    """What the plot is for: at equal length they stay longer."""
    requests = runs["short"].requests
    pace = (requests["finish_ns"] - requests["first_scheduled_ns"]).astype(float) / requests["num_output_tokens"]
    assert pace[requests["num_preemptions"] > 0].median() > 1.1 * pace[requests["num_preemptions"] == 0].median()


# --- where it is drawn ---


def test_a_given_axes_is_drawn_into_and_returned(runs):
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3))
    before = dict(mpl.rcParams)
    for plot, axes in zip((batch_composition, gantt, preemption_scatter), panels, strict=True):
        assert plot(runs["short"], ax=axes) is axes
        assert axes.has_data()
    assert dict(mpl.rcParams) == before
    pyplot.close(figure)


def test_a_notebooks_cell_shows_the_figure_and_a_script_keeps_none(runs):
    pyplot.close("all")
    gantt(runs["three"])
    assert pyplot.get_fignums() == []
    with pyplot.ion():
        gantt(runs["three"])
    assert len(pyplot.get_fignums()) == 1
    pyplot.close("all")
