"""Plots over a sweep: the front is what no configuration beats, a cell is the mean of its runs, nothing is mixed."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import pyplot
from matplotlib.patches import Rectangle

import analysis
from analysis.plots import style
from analysis.plots.sweep_plots import heatmap, pareto
from experiments import simulate
from testbed.errors import ConfigError

X, Y = "throughput.output_tokens_per_s", "ttft_s.p99"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    root = tmp_path_factory.mktemp("sweep")
    for budget, watermark, seed in itertools.product((256, 512), (0.0, 0.1), (0, 1)):
        if (budget, watermark) != (512, 0.1):
            simulate(
                {"name": "synthetic", "rate": 25, "num_requests": 60}, seed=seed, slo={"ttft_s": 0.5},
                scheduler={"name": "sarathi", "max_num_batched_tokens": budget},
                cache={"num_gpu_blocks": 300, "watermark": watermark}, folder=root / f"{budget}-{watermark}-{seed}",
            )  # fmt: skip
    return analysis.load(root)


def frame_of(points, **columns):
    """A runs' table of these (throughput, latency) points, one configuration each unless `columns` say."""
    rows = {"run": [str(n) for n in range(len(points))], "cache.watermark": [n / 100 for n in range(len(points))]}
    rows |= columns | {"summary_version": 1, X: [x for x, _ in points], Y: [y for _, y in points]}
    return pd.DataFrame(rows)


def legend_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


# --- Pareto front ---


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_the_front_is_what_no_other_beats(points):
    axes = pareto(frame_of([(float(x), y / 1000) for x, y in points]))
    best = [p for p in points if not any(q != p and q[0] >= p[0] and q[1] <= p[1] for q in points)]
    (marked,) = [line for line in axes.lines if line.get_marker() == "o" and line.get_color() == style.BLUE]
    np.testing.assert_allclose(np.transpose(marked.get_data()), sorted(best))
    assert len(legend_of(axes)) == len(best)


def test_directions_follow_the_metrics_or_the_call():
    points = [(1.0, 0.001), (2.0, 0.002), (3.0, 0.003)]
    assert len(legend_of(pareto(frame_of(points)))) == 3  # more tokens/s, or less latency
    assert legend_of(pareto(frame_of(points), better={X: -1})) == ["watermark 0"]
    assert pareto(frame_of(points)).get_xlabel() == "output tokens/s, more is better"
    with pytest.raises(ConfigError, match="whether more of 'summary_version' is better is not known"):
        pareto(frame_of(points), "summary_version")
    with pytest.raises(ConfigError, match=r"no column 'ttft.p99'; nearest: ttft_s.p99"):
        pareto(frame_of(points), y="ttft.p99")
    with pytest.raises(ConfigError, match=r"no column 3; nearest: "):
        pareto(frame_of(points), 3)
    with pytest.raises(ConfigError, match=r"^the column 'run' of the runs' table has no numbers; name another$"):
        pareto(frame_of(points).assign(run="a"), "run")


def test_runs_that_differ_in_seeds_are_one_point_with_whiskers(sweep):
    axes = pareto(sweep)
    dots = [line for line in axes.lines if line.get_marker() == "o" and line.get_color() != style.BLUE]
    assert len(dots) == 3
    means = sweep.frame.groupby(["scheduler.max_num_batched_tokens", "cache.watermark"])[X].mean()
    assert sorted(float(np.ravel(dot.get_xdata())[0]) for dot in dots) == pytest.approx(sorted(means))
    spans = [
        tuple(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) == 2 and line.get_marker() == "None"
    ]
    ends = sweep.frame.groupby(["scheduler.max_num_batched_tokens", "cache.watermark"])[X].agg(["min", "max"])
    assert {tuple(end) for end in ends.to_numpy()} <= set(spans)


def test_what_the_sweep_calls_replicates_is_one_point_too_unless_it_is_an_axis(tmp_path):
    for start, rate in itertools.product((0, 1), (20, 25)):
        trace = {"name": "synthetic", "rate": rate, "num_requests": 60, "start_s": start}
        report = {"replicates": ["trace.start_s"]}
        simulate(trace, cache={"num_gpu_blocks": 300}, report=report, folder=tmp_path / f"{rate}" / f"{start}")
    assert legend_of(pareto(analysis.load(tmp_path / "25"))) == ["all runs"]
    both = analysis.load(tmp_path)
    with pytest.raises(ConfigError, match=r"name x and y among trace\.rate$"):
        heatmap(both)
    axes = heatmap(both, x="trace.start_s", y="trace.rate")
    assert (axes.get_xlabel(), len(axes.get_xticks()), len(axes.get_yticks())) == ("trace.start_s", 2, 2)


def test_a_name_without_letters_has_a_place_in_a_legend():
    assert style.legend_height([""]) == style.legend_height(["a"])


def test_long_names_leave_the_points_their_room():
    names = [f"a policy with a very long name and many settings, number {n} of them " * 4 for n in range(3)]
    points = [(1.0, 0.001), (2.0, 0.002), (3.0, 0.003)]
    axes = pareto(frame_of(points, **{"cache.watermark": names}))
    axes.figure.canvas.draw()
    assert axes.get_window_extent().width > 0.7 * axes.figure.bbox.width
    legend = axes.get_legend().get_window_extent()
    assert axes.figure.bbox.x0 <= legend.x0
    assert legend.x1 <= axes.figure.bbox.x1


def test_a_configuration_that_misses_a_quantile_is_left_out_and_counted():
    axes = pareto(frame_of([(1.0, 0.001), (9.0, np.nan)]))
    assert axes.get_title(loc="left") == "1 of 2 configurations do not reach both: not shown"
    assert [text.get_text() for text in pareto(frame_of([(1.0, np.nan)])).texts] == ["no configuration reaches both"]


@pytest.mark.parametrize("seed", range(4))
def test_numbers_cover_neither_points_nor_each_other(seed):
    rng = np.random.default_rng(seed)
    x = np.sort(rng.uniform(100, 200, 12))
    front = list(zip(x, np.sort(rng.uniform(0.1, 0.2, 12)), strict=True))
    axes = pareto(frame_of([*front, *[(rng.uniform(90, 150), 0.25) for _ in range(10)]]))
    figure = axes.figure
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 12
    assert not [
        1 for one, other in itertools.combinations(boxes, 2) if one.shrunk(0.9, 0.8).overlaps(other.shrunk(0.9, 0.8))
    ]
    dots = axes.transData.transform([(x, y * 1e3) for x, y in front])
    assert not [1 for box in boxes for dot in dots if box.contains(*dot)]
    assert all(axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max) for box in boxes)


# --- heatmap ---


def test_a_cell_is_the_mean_of_its_runs_and_what_was_not_run_is_hatched(sweep, tmp_path):
    axes = heatmap(sweep)
    assert axes.get_title(loc="left") == "P99 TTFT (ms), mean of 2 runs"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("scheduler.max_num_batched_tokens", "cache.watermark")
    table = sweep.frame.groupby(["cache.watermark", "scheduler.max_num_batched_tokens"])[Y].mean().unstack()
    drawn = np.asarray(axes.images[0].get_array().filled(np.nan))
    np.testing.assert_allclose(drawn, table.to_numpy())
    assert len(axes.texts) == 3
    assert [patch.get_xy() for patch in axes.patches if isinstance(patch, Rectangle)] == [(0.5, 0.5)]
    assert legend_of(axes) == ["not run"]
    style.save(axes, tmp_path / "heatmap")
    turned = heatmap(sweep, "slo.attainment", x="cache.watermark", y="scheduler.max_num_batched_tokens")
    assert turned.get_title(loc="left") == "SLO attainment (%), mean of 2 runs"


def test_a_cell_of_which_a_run_missed_it_is_dotted_and_not_a_mean():
    keys = {"cache.watermark": [0.0, 0.0, 0.1], "seed": [0, 1, 0], "scheduler.name": ["a", "a", "b"]}
    frame = frame_of([(1.0, 0.1), (1.0, None), (1.0, 0.3)], **keys)
    axes = heatmap(frame, x="scheduler.name", y="cache.watermark")
    assert sorted(legend_of(axes)) == ["not reached", "not run"]
    assert [text.get_text() for text in axes.texts] == ["300"]


def test_cells_never_mix_other_settings_and_keys_must_be_two(sweep):
    keys = {"scheduler.name": ["a", "a", "b", "b"], "cache.watermark": [0.0] * 4, "trace.rate": [1, 2, 1, 2],
            "cache.block_size": [8, 8, 8, 16]}  # fmt: skip
    frame = frame_of([(1.0, 0.1)] * 4, **keys)
    with pytest.raises(ConfigError, match="a heatmap is over two swept keys; name x and y"):
        heatmap(frame, x="trace.rate")
    with pytest.raises(ConfigError, match="differ in trace"):
        heatmap(frame, x="scheduler.name", y="cache.block_size")
    assert heatmap(frame, x="scheduler.name", y="trace.rate").get_xlabel() == "scheduler.name"
    assert heatmap(frame, x="scheduler.name", y="cache.block_size", replicates=["trace.rate"]).has_data()
    with pytest.raises(ConfigError, match="two swept keys"):
        heatmap(sweep, x="cache.watermark", y="cache.wetermark")


def test_both_draw_into_a_given_axes(sweep):
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 3))
    assert pareto(sweep, ax=panels[0]) is panels[0]
    assert heatmap(sweep, ax=panels[1]) is panels[1]
    pyplot.close(figure)
