"""Figures of `testbed fidelity`: signed errors with the engine's spread, simulated over measured times, predictors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.comparison.fidelity import pair_of
from analysis.plots import style

Panel = tuple[pd.DataFrame, Mapping[str, float], pd.DataFrame]  # error_table, noise, matched requests
_SCATTERED = {"ttft_s": "TTFT", "e2e_s": "E2E"}
_COMPARED = ("e2e_mean", "ttft_mean", "itl_mean")
_LARGE = 100.0  # %: longer bars are cut at this length and labelled with their value
_LABEL, _MAX_LINES, _LINE_IN = 28, 4, 0.13  # a row's label: characters of a line, number of lines, inches of a line


def fidelity_figure(loads: Mapping[str, Panel], name_of: Callable[[str], str]) -> Figure:
    """Left: the signed error of each metric by load, with the spread of repeats in grey. Right: TTFT and E2E of each
    request, simulated over measured, with dashed lines at +-10 %."""
    with style.styled():
        figure = Figure(figsize=(style.WIDTH_IN, 5.2 + style.legend_height(list(loads))), layout="constrained")
        cells = figure.add_gridspec(2, 2, width_ratios=[1.25, 1.0])
        _errors(figure.add_subplot(cells[:, 0]), loads, name_of)
        for row, (column, title) in enumerate(_SCATTERED.items()):
            _scatter(figure.add_subplot(cells[row, 1]), [panel[2] for panel in loads.values()], column, title)
        style.legend_below(figure, style.marker_handles(len(loads)), list(loads))
    return figure


def _errors(axes: Axes, loads: Mapping[str, Panel], name_of: Callable[[str], str]) -> None:
    paths = [str(path) for path in next(iter(loads.values()))[0]["metric"]]
    height = 0.8 / len(loads)
    for index, (errors, noise, _) in enumerate(loads.values()):
        values = 100.0 * errors["error"].to_numpy(dtype=float)
        places = np.arange(len(paths)) - 0.4 + height * (index + 0.5)
        bands = 100.0 * np.array([noise.get(path, 0.0) for path in paths])
        axes.barh(places, 2 * bands, left=-bands, height=height, color="#DDDDDD", zorder=1)
        axes.plot(values, places, zorder=3, **style.point_style(index))
        axes.hlines(places, 0, values, color=style.colour(index), linewidth=1.0, zorder=2)
    axes.axvline(0.0, color=style.BLACK, linewidth=0.8)
    axes.set_yticks(range(len(paths)), [name_of(path) for path in paths])
    axes.set(ylim=(len(paths) - 0.5, -0.5), xlabel="signed error, % (grey: spread of repeated runs)")
    axes.grid(visible=False, axis="y")
    widest = max(abs(edge) for edge in axes.get_xlim())
    axes.set_xlim(-max(widest, 1.0), max(widest, 1.0))


def _scatter(axes: Axes, frames: Sequence[pd.DataFrame], column: str, title: str) -> None:
    pairs = [pair_of(frame, column) for frame in frames]
    everything = np.concatenate([values for pair in pairs for values in pair])
    if not everything.size:
        style.say_empty(axes, f"no {title} on both sides")
        return
    factor, unit = style.time_unit(everything)
    low, high = float(everything.min()) * factor / 1.15, float(everything.max()) * factor * 1.15
    for level, dashes in ((1.0, "-"), (0.9, "--"), (1.1, "--")):
        axes.plot([low, high], [low * level, high * level], color=style.BLACK, linewidth=0.6, linestyle=dashes)
    for index, (real, sim) in enumerate(pairs):
        axes.plot(real * factor, sim * factor, **style.cloud_style(index))
    if style.log_if_wide(axes.xaxis, everything * factor, 6.0):
        style.set_log(axes.yaxis, low, high)
    axes.set(xlim=(low, high), ylim=(low, high), xlabel=f"measured {title} ({unit})", ylabel=f"simulated ({unit})")


def study_figure(
    runs: Mapping[str, Mapping[str, float]],
    predictors: Mapping[str, Mapping[str, float]],
    names: Mapping[str, str],
) -> Figure:
    """Left: the signed errors of the means of each run. Right: each predictor's mean absolute percentage error; bars
    beyond 100 % are cut and labelled "cut" with their value. Long labels are wrapped, and the height of the figure
    depends on its rows."""
    left_labels = [_wrapped(name.lstrip("0123456789-") or name) for name in runs]
    right_labels = [_wrapped(name) for name in predictors]
    with style.styled():
        height = max(_height(left_labels), _height(right_labels), 1.6) + 1.0
        figure, ((left, right),) = style.grid(1, 2, height)
        _signed(left, list(runs.values()), left_labels)
        _predictors(right, list(predictors.values()), right_labels)
        style.legend_below(figure, style.marker_handles(len(_COMPARED)), [names[key] for key in _COMPARED])
    return figure


def _signed(axes: Axes, runs: Sequence[Mapping[str, float]], labels: Sequence[str]) -> None:
    for index, key in enumerate(_COMPARED):
        known = [place for place, errors in enumerate(runs) if key in errors]
        places = [place + 0.2 * (index - 1) for place in known]
        axes.plot([100.0 * runs[place][key] for place in known], places, **style.point_style(index))
    axes.axvline(0.0, color=style.BLACK, linewidth=0.8)
    axes.set_yticks(range(len(runs)), labels)
    axes.set(ylim=(len(runs) - 0.5, -0.5), xlabel="signed error of this simulator, %")


def _height(labels: Sequence[str]) -> float:
    """The height, in inches, of rows with these labels; every row is as high as the highest label needs."""
    most = max((label.count("\n") + 1 for label in labels), default=1)
    return max(0.36, 0.1 + _LINE_IN * most) * len(labels)


def _wrapped(label: str) -> str:
    """The label in a few lines; of a longer one the middle is left out, and the last word is kept."""
    lines = style.folded([label], _LABEL)[0].split("\n")
    if len(lines) > _MAX_LINES:
        lines = [*lines[: _MAX_LINES - 1], f"… {lines[-1].rpartition(' ')[2]}"]
    return "\n".join(lines)


def _predictors(axes: Axes, predictors: Sequence[Mapping[str, float]], labels: Sequence[str]) -> None:
    values = [100.0 * errors[key] for errors in predictors for key in _COMPARED if key in errors]
    limit = min(_LARGE, max(values, default=_LARGE)) or 1.0
    for index, key in enumerate(_COMPARED):
        for place, errors in enumerate(predictors):
            if key in errors:
                value, where = 100.0 * errors[key], place + 0.25 * (index - 1)
                axes.barh(where, min(value, limit), height=0.23, color=style.colour(index))
                says = f" {value:.0f}" if value <= limit else f" {value:.0f}, cut"
                axes.text(min(value, limit), where, says, va="center", fontsize=6.5)
    axes.set_yticks(range(len(predictors)), labels)
    is_cut = max(values, default=0.0) > limit
    axes.set(ylim=(len(predictors) - 0.5, -0.5), xlim=(0, (1.3 if is_cut else 1.12) * limit))
    says = "mean absolute error, % (of runs)"
    axes.set_xlabel(f"{says}\nlonger bars are cut at {limit:.0f}" if is_cut else says)
    axes.grid(visible=False, axis="y")
