"""The plots of reports; each takes runs, or frames of matched ones.

Runs are a `Run`, a `Sweep`, a list of runs, or a mapping from labels to runs.
Without data (no request finished, no decode, one request) a panel is empty and states that, without a warning.
is_narrow: for a phone, with the panels one below the other. ax: Axes of the caller's, as many as there are panels, row
by row; they get no legend, but labels for one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis import format as fmt
from analysis.comparison.arms import Runs, grouped, infer_arms, load_keys, stated_replicates
from analysis.comparison.fidelity import pair_of
from analysis.load import Run, Sweep, num_replicas
from analysis.measures.statistics import mean_of_all
from analysis.measures.summary import samples_of
from analysis.measures.survival import km_steps
from analysis.plots import style
from analysis.plots.curves import MAX_POINTS, Engine, engines_of, thin, total
from analysis.plots.sources import MAX_RUNS, list_of, require, runs_of
from analysis.plots.style import AxesArray, OwnAxes
from analysis.reading.frames import numbers
from analysis.reading.rows import FloatArray

_PAGE = 84  # characters of a title that fit a page's width
_FLAT = 5.0  # percent: a curve of KV usage below it is hardly seen, so its maximum is written
LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E latency"}


def latency_cdf(runs: Runs, *, is_narrow: bool = False, ax: OwnAxes | None = None) -> AxesArray:
    """Distribution functions of TTFT, TPOT and E2E, one curve for each run; Kaplan-Meier's if requests are censored.

    An axis ends at the P99.5 of all runs' values together, if there are more than 200; longer tails leave the panel. If
    a curve ends within it below 1, requests were not finished (or not started) when the run ended. Returns Axes `[3]`.
    """
    runs = runs_of(runs)
    with style.styled(ax):
        height_in = style.height(2.3, 3, list(runs), is_narrow=is_narrow)
        figure, (panels,) = style.grid(1, 3, height_in, is_narrow=is_narrow, ax=ax, sharey=True)
        samples = [samples_of(*run.counted)[0] for run in runs.values()]  # of the requests that the summaries count
        for axes, (name, title) in zip(panels, LATENCIES.items(), strict=True):
            _cdf_panel(axes, {label: one[name] for label, one in zip(runs, samples, strict=True)}, title)
        for axes in panels if is_narrow else panels[:1]:
            axes.set_ylabel("share of requests")
        handles = [style.line_handle(**style.series_style(index)) for index in range(len(runs))]
        if ax is None:
            style.legend_below(figure, handles, list(runs))
    return cast(AxesArray, panels)


def _cdf_panel(axes: Axes, samples: Mapping[str, tuple[FloatArray, FloatArray]], title: str) -> None:
    """samples: (observed, NaN for none; censored) values of each run, in seconds."""
    axes.set_title(title)
    curves = {label: (observed[~np.isnan(observed)], censored) for label, (observed, censored) in samples.items()}
    everything = np.concatenate([np.empty(0), *[observed for observed, _ in curves.values()]])
    if not everything.size:
        style.say_empty(axes, "no request has one")
        axes.set_xlabel(f"{title} (ms)")
        return
    factor, unit = style.time_unit(everything)
    end = float(np.quantile(everything, 0.995, method="higher"))
    for index, (label, (observed, censored)) in enumerate(curves.items()):
        if observed.size:
            values, cdf = km_steps(observed, censored)
            keep = np.unique(np.linspace(0, values.size - 1, MAX_POINTS).astype(int))
            # not beyond the panel: its left margin would be a part of the tail
            x = np.minimum(np.append(values[keep[0]], values[keep]), 1.1 * end) * factor
            look = style.series_style(index)
            axes.plot(x, np.append(0.0, cdf[keep]), drawstyle="steps-post", label=style.literal(label), **look)
    style.log_if_wide(axes.xaxis, np.minimum(everything, end) * factor, ratio=5.0)
    axes.set_xlim(right=1.02 * end * factor)
    axes.set_ylim(0.0, 1.02)
    axes.set_xlabel(f"{title} ({unit}){', up to P99.5' if end < everything.max() else ''}")


def throughput_latency(
    arms: Sweep | Mapping[str, Sequence[Run]], *, is_narrow: bool = False, ax: OwnAxes | None = None
) -> AxesArray:
    """P99 TTFT and P99 TPOT over the completed requests/s, with a curve for each arm and a point for each load.

    Runs of one load (equal `trace.*` settings except seeds and the keys in `report.replicates`) are replicates: a point
    is their mean, and its bar spans them. A triangle at the top edge is a load at which some replicate did not reach
    the quantile. Returns Axes `[2]`.
    """
    require(arms, Sweep, Mapping)
    if isinstance(arms, Sweep):
        arms = {arm.name: arm.runs for arm in infer_arms(arms.runs)}
    arms = {str(name): list_of(runs) for name, runs in arms.items()}
    every = [run for runs in arms.values() for run in runs]
    loads = load_keys(every, stated_replicates(every))
    panels_of = {"ttft_s": "P99 TTFT", "tpot_s": "P99 TPOT"}
    with style.styled(ax):
        height_in = style.height(2.5, 2, list(arms), is_narrow=is_narrow)
        figure, (panels,) = style.grid(1, 2, height_in, is_narrow=is_narrow, ax=ax)
        for axes, (name, title) in zip(panels, panels_of.items(), strict=True):
            points = {label: _load_points(runs, name, loads) for label, runs in arms.items()}
            known = np.array([row["mean"] for rows in points.values() for row in rows if row["mean"] is not None])
            factor, unit = style.time_unit(known)
            for index, (label, rows) in enumerate(points.items()):
                _load_curve(axes, rows, factor, index, label)
            style.log_if_wide(axes.yaxis, known * factor, ratio=8.0)
            if not known.size:
                style.say_empty(axes, "not reached")
            axes.set_xlabel("completed requests per second")
            axes.set_ylabel(f"{title} ({unit})")
        handles = [style.line_handle(marker=style.marker(i), **style.series_style(i)) for i in range(len(arms))]
        if ax is None:
            style.legend_below(figure, handles, list(arms))
    return cast(AxesArray, panels)


def _load_points(runs: Sequence[Run], name: str, loads: Sequence[str]) -> list[dict[str, Any]]:
    """One dict for each load, by offered rate: rate, P99 of each replicate and their mean (None: not reached).
    loads: the settings that distinguish loads."""
    points = []
    for replicates in grouped(runs, lambda run: repr([run.flat_config.get(key) for key in loads])).values():
        rate = float(np.mean([run.summary["throughput"]["requests_per_s"] or 0.0 for run in replicates]))
        offered = float(np.mean([run.summary["throughput"]["offered_per_s"] or 0.0 for run in replicates]))
        values = [run.summary[name]["p99"] for run in replicates]
        mean = mean_of_all(values)
        points.append({"rate": rate, "offered": offered, "mean": mean, "values": [] if mean is None else values})
    return sorted(points, key=lambda point: (point["offered"], point["rate"]))


def _load_curve(axes: Axes, rows: Sequence[Mapping[str, Any]], factor: float, index: int, label: str) -> None:
    look = style.series_style(index)
    reached = [row for row in rows if row["mean"] is not None]
    x, y = [row["rate"] for row in reached], [row["mean"] * factor for row in reached]
    axes.plot(x, y, marker=style.marker(index), label=style.literal(label), **look)
    for row in reached:
        if len(row["values"]) > 1:
            span = [min(row["values"]) * factor, max(row["values"]) * factor]
            axes.plot([row["rate"]] * 2, span, color=look["color"], linewidth=0.8, marker="_", markersize=4)
    lost = [row["rate"] for row in rows if row["mean"] is None]
    edge = axes.get_xaxis_transform()
    axes.plot(lost, [0.97] * len(lost), transform=edge, marker="^", linestyle="none", color=look["color"])


def timeline(runs: Runs, *, is_narrow: bool = False, ax: OwnAxes | None = None) -> AxesArray:
    """KV usage and queue over time, one column for each of at most MAX_RUNS runs. Ticks at the top edge of the lower
    panel are steps that preempted.

    For several replicas: the sum of their queues, the mean of their KV usage, and a band from the lowest to the highest
    usage. Returns Axes `[2, num_runs]`.
    """
    runs = runs_of(runs, MAX_RUNS)
    with style.styled(ax):
        num = max(len(runs), 1)
        width = _PAGE // (2 if is_narrow else num)
        titles = style.folded(list(runs), width)
        more_lines = max((title.count("\n") for title in titles), default=0)
        height_in = 3.2 * num + 0.6 if is_narrow else 3.5 + 0.15 * more_lines
        figure, both = style.grid(2, num, height_in, is_narrow=is_narrow, ax=ax, sharex=True, sharey="row")
        upper, lower = both
        fleets = {label: engines_of(run) for label, run in runs.items()}
        last_s = max((float(one.until[-1]) / 1e9 for engines in fleets.values() for one in engines), default=0.0)
        for column, (label, run) in enumerate(runs.items()):
            upper[column].set_title(titles[column])
            if fleets[label]:
                _timeline_column(upper[column], lower[column], run, fleets[label])
        for column in range(num):
            if is_narrow or column == 0:
                upper[column].set_ylabel("KV blocks in use (%)")
                lower[column].set_ylabel("requests")
            if not is_narrow or column == num - 1:
                style.name_clock(lower[column].xaxis, last_s, width)
        for above, below in zip(upper, lower, strict=True):
            above.set_ylim(0, 105)
            if not any(axes.dataLim.y1 > 0.0 for axes in lower):
                below.set_ylim(-0.05, 1.05)
            below.yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        swapped = any((numbers(run.steps, "num_swapped") > 0).any() for run in runs.values())
        looks = _QUEUES if swapped else {name: look for name, look in _QUEUES.items() if name != "swapped"}
        handles: dict[str, Any] = {name: style.line_handle(**look) for name, look in looks.items()}
        if any(engine.preemptions_s.size for engines in fleets.values() for engine in engines):
            handles["preemption"] = style.line_handle(color=style.BLACK, marker="|", linestyle="none", markersize=7)
        if any(num_replicas(run) > 1 for run in runs.values()):
            handles["range over replicas"] = Patch(**_BAND)
        if ax is None:
            style.legend_below(figure, list(handles.values()), list(handles))
    return both


_QUEUES: dict[str, dict[str, Any]] = {
    "running": {"color": style.BLUE, "linestyle": "-", "linewidth": 1.1},
    "waiting": {"color": style.VERMILLION, "linestyle": (0, (4, 1.2)), "linewidth": 1.1},
    "swapped": {"color": style.GREEN, "linestyle": (0, (1.2, 1.2)), "linewidth": 1.1},
}
_BAND: dict[str, Any] = {"color": style.SKY, "alpha": 0.35, "linewidth": 0}


def _timeline_column(upper: Axes, lower: Axes, run: Run, engines: Sequence[Engine]) -> None:
    _usage_panel(upper, run, engines)
    for name, look in _QUEUES.items():
        counts = [numbers(engine.steps, f"num_{name}") for engine in engines]
        if name != "swapped" or any(count.any() for count in counts):
            level = total([engine.level(count) for engine, count in zip(engines, counts, strict=True)])
            lower.plot(*thin(level.times_s, level.values), drawstyle="steps-post", label=name, **look)
    marks = np.concatenate([engine.preemptions_s for engine in engines])
    last_s = max(float(engine.until[-1]) for engine in engines) / 1e9
    marks = np.unique(marks.round(max(0, 3 - int(np.log10(max(last_s, 1.0))))))
    edge = lower.get_xaxis_transform()
    if marks.size:  # the layout treats the missing extent of an empty, unclipped line as infinite
        look = {"color": style.BLACK, "markersize": 7, "clip_on": False, "label": "preemption"}
        lower.plot(marks, [1.0] * marks.size, "|", transform=edge, **look)


def _usage_panel(axes: Axes, run: Run, engines: Sequence[Engine]) -> None:
    """Draws the share of blocks in use: of one engine, filled; of a fleet the mean, in a band from least to most."""
    num, num_blocks = num_replicas(run), run.manifest.get("num_gpu_blocks")
    if not num_blocks:
        style.say_empty(axes, "size of the pool unknown")
        return
    free = [numbers(engine.steps, "free_gpu_blocks") for engine in engines]
    levels = [engine.level(100.0 * (1.0 - one / num_blocks)) for engine, one in zip(engines, free, strict=True)]
    summed = total(levels)
    x, y = thin(summed.times_s, summed.values / num)
    low: FloatArray | float = 0.0
    high = y
    if num > 1:
        idle = [np.zeros(x.size)] * (num - len(levels))  # replicas without any step
        each = [*(level.at(x) for level in levels), *idle]
        low, high = np.min(each, axis=0), np.max(each, axis=0)
    axes.fill_between(x, low, high, step="post", **_BAND)
    axes.plot(x, y, drawstyle="steps-post", color=style.BLUE, linewidth=0.9)
    if (most := float(np.max(high))) < _FLAT:
        said = f"at most {fmt.share(most / 100.0)}"
        axes.text(0.98, 0.94, said, transform=axes.transAxes, ha="right", va="top", color=style.GREY)


def sim_versus_real(matched: Mapping[str, pd.DataFrame], *, is_narrow: bool = False) -> AxesArray:
    """The simulated over the real latency of each request (above) and their ratio (below), for each latency.

    `matched`: label -> `fidelity.match_requests` (columns sim_<latency>, real_<latency>, seconds). On the solid line
    the simulator is exact; dashed lines are +-10 %. Returns Axes `[2, 3]`.
    """
    with style.styled():
        height_in = style.height(4.0, 3, list(matched), is_narrow=is_narrow)
        figure, both = style.grid(2, 3, height_in, is_narrow=is_narrow, height_ratios=[2.0, 1.0])
        upper, lower = both
        for column, (name, title) in enumerate(LATENCIES.items()):
            pairs = [pair_of(frame, name) for frame in matched.values()]
            _scatter_column(upper[column], lower[column], pairs, title)
        style.legend_below(figure, style.marker_handles(len(matched)), list(matched))
    return both


def _scatter_column(upper: Axes, lower: Axes, pairs: Sequence[tuple[FloatArray, FloatArray]], title: str) -> None:
    upper.set_title(title)
    everything = np.concatenate([np.empty(0), *[values for pair in pairs for values in pair]])
    if not everything.size:
        style.say_empty(upper, "no request has one in both")
        style.say_empty(lower)
        return
    factor, unit = style.time_unit(everything)
    low, high = float(everything.min()) * factor / 1.15, float(everything.max()) * factor * 1.15
    upper.plot([low, high], [low, high], color=style.BLACK, linewidth=0.8)
    for index, (real, sim) in enumerate(pairs):
        look = style.cloud_style(index)
        upper.plot(real * factor, sim * factor, **look)
        lower.plot(real * factor, sim / real, **look)
    for level, dashes in ((1.0, "-"), (0.9, "--"), (1.1, "--")):
        lower.axhline(level, color=style.BLACK, linewidth=0.6, linestyle=dashes)
    if style.log_if_wide(upper.xaxis, everything * factor, 6.0):
        for axis in (upper.yaxis, lower.xaxis):
            style.set_log(axis, low, high)
    upper.set(xlim=(low, high), ylim=(low, high), ylabel=f"simulated ({unit})")
    lower.set(xlim=(low, high), ylabel="sim / real", xlabel=f"real {title} ({unit})")
    style.log_if_wide(lower.yaxis, np.concatenate([sim / real for real, sim in pairs]), 6.0)
