"""Plots over the runs of a sweep: the trade-off between two metrics, and one metric over two swept keys.

Each takes a `Sweep`, or its `frame` or a part of that: the swept keys are the columns before `summary_version`, the
summary's numbers those after it. Runs that differ only in their seeds are one point, at their mean; those of a `Sweep`
also if they differ in what its `report.replicates` names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm, Normalize
from matplotlib.patches import Patch, Rectangle
from matplotlib.transforms import Bbox

from analysis import format as fmt
from analysis.comparison.arms import grouped, stated_replicates
from analysis.comparison.compare import Metric, metric_of
from analysis.load import Run, Sweep
from analysis.naming import is_seed, level_names, levels_of, naming_keys
from analysis.plots import style
from analysis.plots.sources import column_of, require
from analysis.reading.rows import FloatArray
from testbed.errors import ConfigError

_NOT_RUN: dict[str, Any] = {"facecolor": "white", "edgecolor": style.GREY, "linewidth": 0, "hatch": "/////"}
_NOT_REACHED: dict[str, Any] = {"facecolor": "white", "edgecolor": style.GREY, "linewidth": 0, "hatch": "....."}


@dataclass(frozen=True)
class _Point:
    """The runs of one configuration, with their values of each metric; NaN if a run did not reach it."""

    levels: dict[str, Any]
    values: dict[str, FloatArray]

    def mean(self, path: str) -> float:
        """The mean over the runs; NaN if a run did not reach the metric."""
        return float(np.mean(self.values[path]))


def _points(
    source: Run | Sweep | pd.DataFrame, paths: Sequence[str], replicates: Sequence[str], kept: Sequence[str | None] = ()
) -> tuple[list[_Point], list[str]]:
    """The points, and the fewest keys that distinguish them. kept: keys that are no replicates, though the sweep states
    so. Raises ConfigError for a path that the frame lacks."""
    require(source, Run, Sweep, pd.DataFrame)
    frame = source if isinstance(source, pd.DataFrame) else source.frame
    stated = [key for key in stated_replicates(source.runs) if key not in kept] if isinstance(source, Sweep) else []
    names = [str(name) for name in frame.columns]
    columns = {path: column_of(frame, path) for path in paths}
    swept = names[: names.index("summary_version")] if "summary_version" in names else []
    keys = [key for key in swept if key != "run" and not is_seed(key) and key not in (*replicates, *stated)]
    rows = [{key: None if pd.isna(row[key]) else row[key] for key in keys} for row in frame.to_dict("records")]
    places = grouped(range(len(rows)), lambda place: repr(rows[place]))
    points = [_Point(rows[those[0]], {path: columns[path][those] for path in paths}) for those in places.values()]
    return points, naming_keys(rows, keys)


def pareto(
    source: Sweep | pd.DataFrame,
    x: str = "throughput.output_tokens_per_s",
    y: str = "ttft_s.p99",
    *,
    better: Mapping[str, int] | None = None,
    replicates: Sequence[str] = (),
    ax: Axes | None = None,
) -> Axes:
    """Two metrics of each configuration, and the Pareto front: the configurations that no other one dominates, that is,
    none is better in one metric and at least as good in the other.

    x, y: columns of the frame. better: column -> +1 if more is better, -1 if less is; needed only for metrics that
    reports do not have. replicates: keys in addition to seeds over whose values the mean is taken; whiskers span them.
    A configuration with a replicate that does not reach a metric is left out; the title states how many are.
    """
    points, keys = _points(source, (x, y), replicates)
    metrics = {path: metric_of(path) for path in (x, y)}
    signs = {path: (better or {}).get(path, metrics[path].better) for path in (x, y)}
    for path, sign in signs.items():
        if sign not in (-1, 1):
            raise ConfigError(f"whether more of {path!r} is better is not known; say better={{{path!r}: 1}}, or -1")
    shown = [point for point in points if not math.isnan(point.mean(x) + point.mean(y))]
    values = np.array([[point.mean(x), point.mean(y)] for point in shown]).reshape(-1, 2)
    front = sorted(_front(-values * [signs[x], signs[y]]), key=lambda place: values[place, 0])
    names = [level_names({key: shown[place].levels[key] for key in keys}) or "all runs" for place in front]
    with style.styled(ax):
        axes = style.only_axes(ax, 3.0 + style.legend_height(names, 0.77 * style.WIDTH_IN))
        if not shown:
            style.say_empty(axes, "no configuration reaches both")
            return axes
        factors = [_name_axis(axis, metrics[path], signs[path], values[:, column])
                   for column, (path, axis) in enumerate(((x, axes.xaxis), (y, axes.yaxis)))]  # fmt: skip
        _draw_points(axes, shown, (x, y), factors)
        values = values * factors
        corners = _corners(values[front], is_more_better=signs[x] > 0)
        axes.plot(*corners.T, color=style.BLUE, linewidth=1.0)
        axes.plot(*values[front].T, color=style.BLUE, marker="o", linestyle="none", markersize=5.5)
        if len(shown) < len(points):
            missing = len(points) - len(shown)
            axes.set_title(f"{missing} of {len(points)} configurations do not reach both: not shown", loc="left")
        look: dict[str, Any] = {"color": style.BLUE, "linestyle": "none", "markeredgewidth": 0.2}
        handles = [style.line_handle(marker=f"${n}$", markersize=5.5 if n < 10 else 8.5, **look)
                   for n in range(1, len(front) + 1)]  # fmt: skip
        style.legend_under(axes, handles, names)
        _number(axes, values, front, corners)
    return axes


def _front(costs: FloatArray) -> list[int]:
    """The indices of points that no other dominates, by the first cost; equal points do not dominate each other. costs:
    `[num_points, 2]`, less is better."""
    front: list[int] = []
    for place in np.lexsort((costs[:, 1], costs[:, 0])).tolist():
        if not front or costs[place, 1] < costs[front[-1], 1] or (costs[place] == costs[front[-1]]).all():
            front.append(place)
    return front


def _corners(front: FloatArray, *, is_more_better: bool) -> FloatArray:
    """The border of the area that the front dominates. front: `[num_points, 2]`, ordered by x."""
    path = [front[:1]]
    for left, right in pairwise(front):
        path.append(np.array([[left[0], right[1]] if is_more_better else [right[0], left[1]], right]))
    return np.concatenate(path)


def _scale(metric: Metric, values: FloatArray) -> tuple[float, str]:
    """The factor by which values are multiplied in the plot, and the metric's name with the resulting unit."""
    if metric.write is fmt.seconds:
        factor, unit = style.time_unit(values)
    else:
        number, _, unit = metric.write(1.0).partition(fmt.SPACE)
        factor = float(number)
    return factor, f"{metric.label} ({unit})" if unit and "/s" not in metric.label else metric.label


def _name_axis(axis: Axis, metric: Metric, sign: int, values: FloatArray) -> float:
    """Labels and scales the axis; returns the factor by which its values are multiplied."""
    factor, name = _scale(metric, values)
    axis.set_label_text(f"{name}, {'more' if sign > 0 else 'less'} is better")
    style.log_if_wide(axis, values * factor)
    return factor


def _draw_points(axes: Axes, points: Sequence[_Point], paths: tuple[str, str], factors: Sequence[float]) -> None:
    """Draws all points in light grey, with whiskers over their replicates."""
    for point in points:
        x, y = (point.values[path] * factor for path, factor in zip(paths, factors, strict=True))
        look: dict[str, Any] = {"color": "#BDBDBD", "linewidth": 0.7}
        axes.plot([x.min(), x.max()], [y.mean()] * 2, **look)
        axes.plot([x.mean()] * 2, [y.min(), y.max()], **look)
        axes.plot(x.mean(), y.mean(), color="#BDBDBD", marker="o", markersize=3.6)


def _number(axes: Axes, values: FloatArray, front: Sequence[int], corners: FloatArray) -> None:
    """Writes the numbers of the front's points next to them, if possible without covering points, the line, or each
    other."""
    figure = style.figure_of(axes)
    figure.draw_without_rendering()  # determines the layout, and so the positions of the points
    pixels = figure.dpi / 72.0  # per typographic point
    dots = axes.transData.transform(values)
    path = axes.transData.transform(corners)
    taken = [Bbox([dot - 3 * pixels, dot + 3 * pixels]) for dot in dots]
    taken += [Bbox([np.minimum(a, b) - pixels, np.maximum(a, b) + pixels]) for a, b in pairwise(path)]
    for number, place in enumerate(front, 1):
        size = np.array([5.0 if number < 10 else 10.0, 7.5]) * pixels
        boxes = {}
        for radius, angle in product((8.0, 12.0, 17.0), np.deg2rad([135, 90, 180, 45, 0, 225, 270, 315])):
            offset = radius * np.array([np.cos(angle), np.sin(angle)])
            centre = dots[place] + offset * pixels
            boxes[tuple(offset)] = Bbox([centre - size / 2, centre + size / 2])
        best = min(boxes, key=lambda offset: _overlaps(boxes[offset], taken, axes.bbox))
        taken.append(boxes[best])
        axes.annotate(str(number), values[place], best, textcoords="offset points", ha="center", va="center",
                      fontsize=7.5, color=style.BLUE)  # fmt: skip


def _overlaps(box: Bbox, taken: Sequence[Bbox], frame: Bbox) -> int:
    outside = not (frame.contains(*box.min) and frame.contains(*box.max))
    return sum(box.overlaps(other) for other in taken) + 2 * outside


def heatmap(
    source: Sweep | pd.DataFrame,
    metric: str = "ttft_s.p99",
    *,
    x: str | None = None,
    y: str | None = None,
    replicates: Sequence[str] = (),
    ax: Axes | None = None,
) -> Axes:
    """A metric over two swept keys; each cell shows the mean over the runs of that combination.

    x, y: by default the two keys that were swept. Combinations that were not run are hatched; cells with a run that did
    not reach the metric are dotted. replicates: keys in addition to seeds over whose values the mean is taken. Raises
    ConfigError if a cell had runs that differ in any other key: pass a part of `sweep.frame` then.
    """
    points, keys = _points(source, (metric,), replicates, (x, y))
    chosen = [key for key in (x, y) if key is not None] or keys
    if len(chosen) != 2 or not {*chosen} <= {*(points[0].levels if points else ())}:
        raise ConfigError(f"a heatmap is over two swept keys; name x and y among {', '.join(keys) or 'none'}")
    columns, rows = (levels_of([point.levels[key] for point in points]) for key in chosen)
    cells: dict[tuple[int, int], FloatArray] = {}
    for point in points:
        at = rows.index(point.levels[chosen[1]]), columns.index(point.levels[chosen[0]])
        if at in cells:
            others = ", ".join(key for key in keys if key not in chosen)
            raise ConfigError(f"a cell has runs that differ in {others}, too; choose one: frame[frame[key] == value]")
        cells[at] = point.values[metric]
    with style.styled(ax):
        axes = style.only_axes(ax, 1.2 + 0.38 * len(rows))
        _draw_cells(axes, cells, metric_of(metric), len(rows), len(columns))
        axes.set_xticks(range(len(columns)), [style.literal(fmt.plain(level)) for level in columns])
        axes.set_yticks(range(len(rows)), [style.literal(fmt.plain(level)) for level in rows])
        axes.set(xlabel=chosen[0], ylabel=chosen[1])
    return axes


def _draw_cells(
    axes: Axes, cells: Mapping[tuple[int, int], FloatArray], metric: Metric, num_rows: int, num_columns: int
) -> None:
    means = np.full((num_rows, num_columns), np.nan)
    for at, values in cells.items():
        means[at] = values.mean()
    known = means[~np.isnan(means)]
    factor, name = _scale(metric, known)
    is_wide = bool(known.size and known.min() > 0 and known.max() > 12 * known.min())
    norm = (LogNorm if is_wide else Normalize)(*((known.min(), known.max()) if known.size else (0.0, 1.0)))
    colours = mpl.colormaps["cividis"]
    axes.imshow(means, cmap=colours, norm=norm, aspect="auto", origin="lower")
    width_pt = 72.0 * axes.get_position().width * style.figure_of(axes).get_figwidth() / num_columns
    seen = {}
    for row, column in product(range(num_rows), range(num_columns)):
        mean = means[row, column]
        if np.isnan(mean):
            why, look = ("not reached", _NOT_REACHED) if (row, column) in cells else ("not run", _NOT_RUN)
            seen[why] = Patch(**look)
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **look))
            continue
        text = metric.write(float(mean)) if is_wide else fmt.number(float(mean) * factor)
        luminance = np.dot(colours(norm(mean))[:3], [0.30, 0.59, 0.11])
        colour = "white" if luminance < 0.5 else style.BLACK
        axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=min(7.5, width_pt / 4.5))
    counts = sorted({values.size for values in cells.values()})
    of = "" if counts == [1] else f", mean of {fmt.plain(counts[0])}{f' to {counts[-1]}' if counts[1:] else ''} runs"
    axes.set_title(f"{metric.label if is_wide else name}{of}", loc="left")
    axes.grid(visible=False)
    style.legend_under(axes, list(seen.values()), list(seen))
