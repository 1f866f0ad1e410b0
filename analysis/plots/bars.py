"""The bars of a report: the changes from the baseline, on one axis that is logarithmic in the ratio."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
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
    """The ratio to the baseline (for shares the difference in points), with intervals: one panel for each metric, one
    bar for each arm. All panels of ratios have one logarithmic axis: half as much and twice as much are equally long.
    Its ticks are factors, or percent where changes are small. A change to or from 0, which has no ratio,
    is written as text. An axis extends at least _LEAST to both sides. baseline: its name; arms are called by what sets
    them apart from it. is_narrow: arm names above the bars. Returns Axes `[num_metrics]`."""
    arms, labels = list(dict.fromkeys(row.arm for row in rows)), list(dict.fromkeys(row.metric.label for row in rows))
    short = [apart(arm, baseline)[0] for arm in arms]
    names = short if len(set(short)) == len(arms) else arms
    folded = style.folded(names, _NAME if is_narrow else _LINE)
    num_lines = max((name.count("\n") + 1 for name in folded), default=1)
    row_in = 0.25 + 0.11 * num_lines if is_narrow else max(0.24, 0.15 * num_lines)
    ratios = _span(row for row in rows if not row.metric.is_share)
    with style.styled():
        num = max(len(labels), 1)
        height_in = num * (0.6 + row_in * max(len(arms), 1)) + 0.5 if is_narrow else 1.5 + row_in * max(len(arms), 2)
        figure, (panels,) = style.grid(1, num, height_in, is_narrow=is_narrow, sharey=True)
        longest = max((len(line) for name in folded for line in name.split("\n")), default=0)
        width_in = style.PHONE_IN if is_narrow else (style.WIDTH_IN - _CHAR_IN * longest) / num
        num_chars = max(14.0, (width_in - 0.3) / _CHAR_IN)
        for axes, label in zip(panels, labels, strict=False):
            of_metric = {arms.index(row.arm): row for row in rows if row.metric.label == label}
            _draw_bars(axes, of_metric, 0.144 / row_in if is_narrow else 0.62)
            axes.set_title(label)
            is_share = any(row.metric.is_share for row in of_metric.values())
            _set_axis(axes, _span(of_metric.values()) if is_share else ratios, num_chars, is_share=is_share)
            if is_narrow:
                _name_bars(axes, folded, 0.108 / row_in)
        panels[0].set_yticks(range(len(arms)), [""] * len(arms) if is_narrow else folded)
        panels[0].set_ylim(max(len(arms), 1) - 0.4, -1.0 if is_narrow else -0.6)
        seen = {_kind(row) for row in rows if _drawn(row) is not None}
        shown = [kind for kind in _BARS if kind in seen]
        style.legend_below(figure, [Patch(**_BARS[kind]) for kind in shown], shown)
    return cast(AxesArray, panels)


_CHAR_IN = 0.066  # width of a tick's digit
_NAME = 56  # characters of a line that fit on a phone
_LINE = 34  # characters of a line of a name beside the bars
_LEAST = 0.02  # a ratio's logarithm, or a share, on each side of 0: else noise would look like an effect
_FACTORS = (10_000.0, 1_000.0, 100.0, 10.0, 2.0, 5.0, 3.0, 1.5)  # ticks, the first that fit
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


def _drawn(row: Comparison) -> tuple[float, ...] | None:
    """A bar and the ends of its interval if it has one, as logarithms of ratios or as shares; None if there is no
    change, or in another unit."""
    estimate = row.estimate
    if estimate is None or (estimate.scale == "difference" and not row.metric.is_share):
        return None
    bounds = (estimate.low, estimate.high)
    return (estimate.value, *bounds) if np.isfinite(bounds).all() else (estimate.value,)


def _span(rows: Iterable[Comparison]) -> tuple[float, float]:
    """The ends of an axis that has these bars with their intervals, without room beside them."""
    ends = [0.0, *(end for row in rows for end in _drawn(row) or ())]
    most = math.log(_FACTORS[0])
    return max(-most, min(-_LEAST, *ends)), min(most, max(_LEAST, *ends))


def _name_bars(axes: Axes, names: Sequence[str], above: float) -> None:
    for place, name in enumerate(names):
        axes.annotate(
            name, (0.0, place - above), (2, 0), axes.get_yaxis_transform(), "offset points", va="bottom", fontsize=7.0,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3},
        )  # fmt: skip


def _draw_bars(axes: Axes, rows: Mapping[int, Comparison], height: float) -> None:
    """Draws the bars of a metric, of this height."""
    for place, row in rows.items():
        if (drawn := _drawn(row)) is None:
            said = change_text(row) or "not comparable"
            axes.text(0, place, f" {said}", va="center", color=style.GREY, fontsize=6.5)
            continue
        axes.barh(place, drawn[0], height=height, linewidth=0.8, **_BARS[_kind(row)])
        axes.plot(drawn[1:], [place] * len(drawn[1:]), color=style.BLACK, linewidth=1.0, marker="|", markersize=5)
    axes.axvline(0.0, color=style.BLACK, linewidth=0.8)
    axes.grid(visible=False, axis="y")


def _set_axis(axes: Axes, span: tuple[float, float], num_chars: float, *, is_share: bool) -> None:
    """Sets the ends of the axis, with room beside them, and labels it and its ticks, below which num_chars characters
    fit."""
    room = 0.08 * (span[1] - span[0])
    low, high = span[0] - room, span[1] + room
    if is_share:
        low, high = max(low, -1.0), min(high, 1.0)
    if not is_share and max(-low, high) > math.log(_FACTORS[-1]):
        unit, ticks = "factor", _factors(low, high, num_chars)
    else:
        unit, least, most = ("points", low, high) if is_share else ("%", math.expm1(low), math.expm1(high))
        percents = MaxNLocator(max(3, int(num_chars / 10))).tick_values(100.0 * least, 100.0 * most)
        ticks = {one / 100.0 if is_share else math.log1p(one / 100.0): _signed(one) for one in map(float, percents)}
    within = {place: label for place, label in ticks.items() if low <= place <= high}
    axes.set_xticks([*within], [*within.values()])
    axes.set_xlim(low, high)
    axes.set_xlabel(f"change ({unit})")


def _factors(low: float, high: float, num_chars: float) -> dict[float, str]:
    """Place -> label of the ticks at factors that do not touch others, the outermost first."""
    ticks, a_char = {0.0: "1"}, (high - low) / num_chars
    for size, (sign, word) in product(_FACTORS, ((1.0, "×"), (-1.0, "÷"))):
        one, label = sign * math.log(size), f"{word}{size:,g}"
        least = {place: a_char * ((len(label) + len(other)) / 2.0 + 1.0) for place, other in ticks.items()}
        if low <= one <= high and all(abs(one - place) > apart for place, apart in least.items()):
            ticks[one] = label
    return ticks


def _signed(percent: float) -> str:
    """A percentage with a sign: +20, −0.5."""
    return f"{'+' if percent > 0 else '−' if percent < 0 else ''}{abs(percent):g}"
