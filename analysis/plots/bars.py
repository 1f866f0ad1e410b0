"""The bars of a report: the changes from the baseline, on an axis that goes by the ratio if one of them is far off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis.comparison.compare import Comparison
from analysis.comparison.wording import change_text
from analysis.naming import apart
from analysis.plots import style
from analysis.plots.style import AxesArray


def ablation_bars(rows: Sequence[Comparison], *, baseline: str = "", is_narrow: bool = False) -> AxesArray:
    """The relative change from the baseline in percent (for shares the difference in points), with intervals: one panel
    for each metric, one bar for each arm. A change to or from 0, which has no percentage, is written as text. An axis
    extends at least _LEAST to both sides. If an arm is far off, the axis is logarithmic in the ratio, and labelled so:
    half as much and twice as much are equally long. baseline: its name; arms are called by what sets them apart from
    it. is_narrow: arm names above the bars. Returns Axes `[num_metrics]`."""
    arms, labels = list(dict.fromkeys(row.arm for row in rows)), list(dict.fromkeys(row.metric.label for row in rows))
    short = [apart(arm, baseline)[0] for arm in arms]
    names = short if len(set(short)) == len(arms) else arms
    folded = style.folded(names, _NAME if is_narrow else _LINE)
    num_lines = max((name.count("\n") + 1 for name in folded), default=1)
    row_in = 0.25 + 0.11 * num_lines if is_narrow else max(0.24, 0.15 * num_lines)
    with style.styled():
        num = max(len(labels), 1)
        height_in = num * (0.6 + row_in * max(len(arms), 1)) + 0.5 if is_narrow else 1.5 + row_in * max(len(arms), 2)
        figure, (panels,) = style.grid(1, num, height_in, is_narrow=is_narrow, sharey=True)
        longest = max((len(line) for name in folded for line in name.split("\n")), default=0)
        width_in = style.PHONE_IN if is_narrow else (style.WIDTH_IN - _CHAR_IN * longest) / num
        num_chars = max(14.0, (width_in - 0.3) / _CHAR_IN)
        for axes, label in zip(panels, labels, strict=False):
            of_metric = {arms.index(row.arm): row for row in rows if row.metric.label == label}
            _bar_panel(axes, of_metric, num_chars, 0.144 / row_in if is_narrow else 0.62)
            axes.set_title(label)
            unit = "points" if any(row.metric.is_share for row in of_metric.values()) else "%"
            axes.set_xlabel(f"change ({unit})" if axes.get_xscale() == "linear" else f"change ({unit}), log")
            if is_narrow:
                _name_bars(axes, folded, 0.108 / row_in)
        panels[0].set_yticks(range(len(arms)), [""] * len(arms) if is_narrow else folded)
        panels[0].set_ylim(max(len(arms), 1) - 0.4, -1.0 if is_narrow else -0.6)
        seen = {_kind(row) for row in rows if _drawn(row) is not None}
        shown = [kind for kind in _BARS if kind in seen]
        style.legend_below(figure, [Patch(**_BARS[kind]) for kind in shown], shown)
    return cast(AxesArray, panels)


_FAR = 250.0  # percent
_CHAR_IN = 0.066  # width of a tick's digit
_NAME = 56  # characters of a line that fit on a phone
_LINE = 34  # characters of a line of a name beside the bars
_LEAST = 2.0  # percent or points, on each side of 0: else noise would look like an effect
_RATIO_TICKS = (999900.0, 99900.0, 9900.0, -99.0, 900.0, -90.0, 300.0, -75.0, 100.0, -50.0, 50.0, -30.0)  # percent
_BARS: dict[str, dict[str, Any]] = {
    "better": {"facecolor": style.BLUE, "edgecolor": style.BLUE},
    "worse": {"facecolor": style.ORANGE, "edgecolor": style.VERMILLION},
    "changed": {"facecolor": style.PURPLE, "edgecolor": style.PURPLE},
    "inside the noise": {"facecolor": "#E6E6E6", "edgecolor": style.GREY, "hatch": "////"},
    "undecided": {"facecolor": "white", "edgecolor": style.GREY, "hatch": "////"},
    "equivalent": {"facecolor": "#C9C9C9", "edgecolor": style.GREY},
    "no interval": {"facecolor": "white", "edgecolor": style.BLACK},
}


def _kind(row: Comparison) -> str:
    if row.is_claim:
        return row.claim if row.gain else "changed"
    drawn_as = {"unknown": "no interval", "identical": "equivalent", "inside the engine's noise": "inside the noise"}
    return drawn_as.get(row.verdict, row.verdict)


def _drawn(row: Comparison) -> tuple[float, float, float] | None:
    """A bar and the ends of its interval, in percent or points; None if there is no change, or in another unit."""
    estimate = row.estimate
    if estimate is None or (estimate.scale == "difference" and not row.metric.is_share):
        return None
    if estimate.scale == "log_ratio":
        return estimate.percent()
    return 100.0 * estimate.value, 100.0 * estimate.low, 100.0 * estimate.high


def _name_bars(axes: Axes, names: Sequence[str], above: float) -> None:
    for place, name in enumerate(names):
        axes.annotate(
            name, (0.0, place - above), (2, 0), axes.get_yaxis_transform(), "offset points", va="bottom", fontsize=7.0,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3},
        )  # fmt: skip


def _bar_panel(axes: Axes, rows: Mapping[int, Comparison], num_chars: float, height: float) -> None:
    """Draws the bars of a metric, of this height, on an axis below which num_chars characters fit."""
    for place, row in rows.items():
        drawn = _drawn(row)
        if drawn is None:
            said = change_text(row) or "not comparable"
            axes.text(0, place, f" {said}", va="center", color=style.GREY, fontsize=6.5)
            continue
        value, low, high = drawn
        axes.barh(place, value, height=height, linewidth=0.8, **_BARS[_kind(row)])
        if row.estimate is not None and np.isfinite([row.estimate.low, row.estimate.high]).all():
            axes.plot([low, high], [place, place], color=style.BLACK, linewidth=1.0, marker="|", markersize=5)
    axes.axvline(0.0, color=style.BLACK, linewidth=0.8)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.08)
    low, high = axes.get_xlim()
    if any(row.metric.is_share for row in rows.values()):
        low, high = max(low, -100.0), min(high, 100.0)  # intervals may end beyond these
    if high > _FAR:  # else the other bars would have no visible length
        _go_by_ratio(axes, high, num_chars)
        return
    low, high = min(low, -_LEAST), max(high, _LEAST)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator(max(3, int(num_chars / 10))))


def _go_by_ratio(axes: Axes, high: float, num_chars: float) -> None:
    """Makes the axis logarithmic in the ratio, with ticks in percent; high: the end of the axis. num_chars: see
    `_bar_panel`."""
    low = max(axes.dataLim.x0, -99.9)
    ends = [np.log1p(end / 100.0) for end in (min(low, -5.0), high)]
    room = 0.05 * (ends[1] - ends[0])
    axes.set_xscale(
        "function", functions=(lambda x: np.log1p(np.maximum(x, -99.99) / 100.0), lambda y: np.expm1(y) * 100.0)
    )
    axes.set_xlim(*(100.0 * np.expm1([ends[0] - room, ends[1] + room])))
    ticks, a_char = [0.0], (ends[1] - ends[0] + 2.0 * room) / num_chars
    for tick in _RATIO_TICKS:  # the outermost first, as long as they do not touch
        place = np.log1p(tick / 100.0)
        apart = [abs(place - np.log1p(one / 100.0)) / a_char for one in ticks]  # characters between their centres
        touching = [(len(_signed(tick)) + len(_signed(one))) / 2.0 + 1.0 for one in ticks]
        if ends[0] <= place <= ends[1] and all(num > least for num, least in zip(apart, touching, strict=True)):
            ticks.append(tick)
    axes.set_xticks(ticks, [*map(_signed, ticks)])
    axes.minorticks_off()


def _signed(percent: float) -> str:
    """A percentage with a sign, and thousands as k: +900, −50."""
    if percent == 0.0:
        return "0"
    size = f"{abs(percent):.0f}" if abs(percent) < 1e4 else f"{abs(percent) / 1e3:.0f}k"
    return f"{'+' if percent > 0 else '−'}{size}"
