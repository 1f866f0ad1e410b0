"""Goodput and attainment over the request rate, with one curve for each policy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.measures.capacity import Load
from analysis.plots import style


def rate_curves(
    curves: Mapping[str, Sequence[tuple[float, Load]]],
    capacities: Mapping[str, float],
    intervals: Mapping[str, tuple[float, float] | None],
    shares: Collection[float],
    unit: str,
) -> Figure:
    """`curves`: policy -> (rate, load) of complete runs, by ascending rate. A vertical line is a policy's capacity, the
    band around it its interval, cut where the rates end; markers of rates up to the capacity are filled. `shares`: the
    required attainments, shown as dashed lines."""
    with style.styled():
        figure, ((left, right),) = style.grid(1, 2, 2.7 + style.legend_height(list(curves)))
        for index, (name, points) in enumerate(curves.items()):
            rates = [rate for rate, _ in points]
            is_kept = [rate <= capacities[name] for rate in rates]
            _curve(left, rates, [load.goodput_per_s or 0.0 for _, load in points], is_kept, index)
            _curve(right, rates, [100 * load.attainment for _, load in points], is_kept, index)
            for axes in (left, right) if capacities[name] > 0 else ():
                axes.axvline(capacities[name], linewidth=0.8, alpha=0.7, **style.series_style(index))
        everything = np.array([rate for points in curves.values() for rate, _ in points])
        for axes in (left, right):
            if not everything.size or not style.log_if_wide(axes.xaxis, everything, ratio=6.0):
                axes.xaxis.set_major_locator(MaxNLocator(6))
            axes.set_xlim(axes.get_xlim())  # else the interval of two seeds, which may reach far, would decide it
            for index, name in enumerate(curves):
                if capacities[name] > 0 and (interval := intervals[name]) is not None:
                    axes.axvspan(*interval, color=style.colour(index), alpha=0.12, linewidth=0)
            axes.set_xlabel(f"request rate ({unit})")
        left.set_ylim(0, None if left.dataLim.y1 > 0 else 1)
        right.set_ylim(0, 103)
        for share in shares:
            right.axhline(100 * share, color=style.GREY, linewidth=0.8, linestyle="--")
        left.set_ylabel("goodput (requests/s)")
        right.set_ylabel("requests that keep the SLO (%)")
        handles = [style.line_handle(marker=style.marker(i), **style.series_style(i)) for i in range(len(curves))]
        style.legend_below(figure, handles, list(curves))
    return figure


def _curve(axes: Axes, rates: Sequence[float], values: Sequence[float], is_kept: Sequence[bool], index: int) -> None:
    look = style.series_style(index)
    axes.plot(rates, values, **look)
    for kept, face in ((True, look["color"]), (False, "white")):
        chosen = [(x, y) for x, y, has in zip(rates, values, is_kept, strict=True) if has is kept]
        axes.plot(
            [x for x, _ in chosen], [y for _, y in chosen], linestyle="none", marker=style.marker(index),
            color=look["color"], markerfacecolor=face,
        )  # fmt: skip
