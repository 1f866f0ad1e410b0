"""The plot of latencies, and of the SLO's attainment, over the time of arrival."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from analysis.comparison.arms import Runs
from analysis.load import Run
from analysis.measures.over_time import MIN_REQUESTS, OverTime
from analysis.measures.slo import meets_slo
from analysis.plots import style
from analysis.plots.curves import MAX_POINTS
from analysis.plots.sources import runs_of
from analysis.plots.study_plots import LATENCIES
from analysis.plots.style import AxesArray, OwnAxes
from analysis.reading.rows import FloatArray
from testbed.errors import ConfigError

_WINDOWS = 40  # of the longest run, at most


class _Curves(NamedTuple):
    """Of a run: the edges of its windows, up to the last arrival, s `[num_windows + 1]`, and values `[num_windows]`."""

    edges: FloatArray
    p50: FloatArray
    p99: FloatArray
    attainment: FloatArray  # percent; NaN without an SLO, or without a request


def latency_over_time(
    runs: Runs, metric: str = "ttft_s", window_s: float | None = None, *, is_narrow: bool = False,
    ax: OwnAxes | None = None,
) -> AxesArray:  # fmt: skip
    """P99 (thick) and P50 (thin) of a latency in windows of the time of arrival, in a colour for each run; below, the
    windows' attainment. A triangle at the top edge: the P99 is not reached; a gap: no request has the latency.

    metric: of LATENCIES. window_s: None takes at most _WINDOWS, of MIN_REQUESTS in the mean: a P99 of fewer is that of
    one request. Returns Axes `[1]`, or `[2]` if a run has an SLO. Raises ConfigError for another metric or window.
    """
    runs = runs_of(runs)
    if metric not in LATENCIES:
        raise ConfigError(f"metric is {metric!r}; choose one of {', '.join(LATENCIES)}")
    each = {label: OverTime(run.counted, metric) for label, run in runs.items()}
    if window_s is None:
        num = min([one.arrival_s.size // MIN_REQUESTS for one in each.values()], default=0)
        window_s = max([one.window_s(min(num, _WINDOWS)) for one in each.values()], default=1.0)
    elif not (window_s > 0 and all(one.span_s <= MAX_POINTS * window_s for one in each.values())):
        raise ConfigError(f"window_s is {window_s:g}; give one above 0, and at most {MAX_POINTS} windows")
    curves = {label: _curves(runs[label], one, window_s) for label, one in each.items()}
    num_rows = 1 + any(run.slo is not None for run in runs.values())
    with style.styled(ax):
        height_in = style.height(1.1 + 1.1 * num_rows, 1, list(runs), is_narrow=is_narrow)
        ratios = [2.0, 1.0] if num_rows > 1 else None
        figure, both = style.grid(num_rows, 1, height_in, is_narrow=is_narrow, ax=ax, height_ratios=ratios, sharex=True)
        panels: AxesArray = both[:, 0]
        _draw(panels, curves, LATENCIES[metric])
        said = f"in windows of {window_s:g} s by arrival: P99 thick, P50 thin"
        panels[0].set_title(*style.folded([said], 42 if is_narrow else 84), loc="left")
        last_s = max([one.arrival_s.max(initial=0.0) for one in each.values()], default=0.0)
        style.name_clock(panels[-1].xaxis, last_s, 42 if is_narrow else 84)
        if ax is None and len(runs) > 1:
            handles = [style.line_handle(**style.series_style(index)) for index in range(len(runs))]
            style.legend_below(figure, handles, list(runs))
    return panels


def _draw(panels: AxesArray, curves: Mapping[str, _Curves], title: str) -> None:
    known = np.concatenate(
        [np.empty(0), *(values[np.isfinite(values)] for one in curves.values() for values in one[1:3])]
    )
    factor, unit = style.time_unit(known)
    upper, *lower = panels
    for index, (label, one) in enumerate(curves.items()):
        look = style.series_style(index)
        _steps(upper, one.edges, one.p50 * factor, look | {"linewidth": 0.7})
        _steps(upper, one.edges, one.p99 * factor, look | {"label": style.literal(label)})
        beyond = (one.edges[:-1] + one.edges[1:])[np.isinf(one.p99)] / 2
        edge: dict[str, Any] = {"transform": upper.get_xaxis_transform(), "linestyle": "none"}
        upper.plot(beyond, [0.97] * beyond.size, marker="^", color=look["color"], **edge)
        for axes in lower:
            _steps(axes, one.edges, one.attainment, look)
    if not style.log_if_wide(upper.yaxis, known * factor):
        upper.set_ylim(bottom=0.0)
    if not known.size:
        style.say_empty(upper, "no request has one")
    upper.set_ylabel(f"{title} ({unit})")
    for axes in lower:
        axes.set_ylabel("attainment (%)")


def _steps(axes: Axes, edges: FloatArray, values: FloatArray, look: Mapping[str, Any]) -> None:
    """Draws each value over its window; nothing where it is not finite."""
    shown = np.where(np.isfinite(values), values, np.nan)
    axes.plot(edges, np.append(shown, shown[-1:]), drawstyle="steps-post", **look)


def _curves(run: Run, latency: OverTime, window_s: float) -> _Curves:
    edges, parts = latency.windows(window_s)
    edges = np.minimum(edges, latency.arrival_s.max(initial=0.0))
    p50, p99 = (np.array([latency.quantile(part, level) for part in parts]) for level in (0.50, 0.99))
    is_met = np.full(latency.arrival_s.size, np.nan) if run.slo is None else meets_slo(run.counted[0], run.slo)
    met = np.array([100.0 * is_met[part].mean() if part.any() else np.nan for part in parts])
    return _Curves(edges, p50, p99, met)
