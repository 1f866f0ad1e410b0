"""Plots of a trace: arrivals, lengths, dispersion of counts, shared prefixes. It knows only arrays, not traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.plots import style
from analysis.reading.rows import FloatArray, IntArray

_MIN_GAP_SPAN = 10.0  # longest gap over shortest; below it the axis is extended by this factor on both sides
_MAX_POINTS = 20_000  # of a scatter; of a longer trace every n-th request is drawn


@dataclass(frozen=True, slots=True)
class TraceColumns:
    """One entry for each request, in row order; arrivals_s only has requests with an arrival of their own."""

    arrivals_s: FloatArray
    prompts: IntArray
    outputs: IntArray  # 0: unknown
    hits: IntArray  # prompt tokens found in a cache of infinite size


def arrivals(trace: TraceColumns) -> Figure:
    """Requests per second over time, and the gaps between arrivals against those of a Poisson process."""
    with style.styled():
        figure, ((upper, lower),) = style.grid(1, 2, 2.6)
        times = trace.arrivals_s
        duration = float(times[-1] - times[0]) if len(times) else 0.0
        upper.set_title("arrivals")
        lower.set_title("gaps between arrivals")
        if duration > 0:
            edges = np.linspace(times[0], times[-1], int(min(200, max(10, len(times) // 20))) + 1)
            counts = np.histogram(times, edges)[0]
            upper.stairs(counts / np.diff(edges), edges, color=style.BLUE)
            upper.axhline(len(times) / duration, color=style.GREY, linewidth=0.8, linestyle="--")
            upper.set(xlabel="time (s)", ylabel=f"requests/s, per {edges[1] - edges[0]:.3g} s", ylim=(0, None))
            _gap_panel(lower, np.diff(times))
        else:
            style.say_empty(upper, "all at once")
            style.say_empty(lower, "no gaps")
        return figure


def _gap_panel(axes: Axes, gaps: FloatArray) -> None:
    """Draws the share of gaps longer than x; the dashed line is a Poisson process of the same rate."""
    positive = np.sort(gaps[gaps > 0])
    if not len(positive):
        style.say_empty(axes, "no gaps")
        return
    above = (len(positive) - np.arange(len(positive))) / len(gaps)
    low, high = float(positive[0]), float(positive[-1])
    if high < _MIN_GAP_SPAN * low:  # batches: nearly all gaps are equal
        low, high = low / _MIN_GAP_SPAN, high * _MIN_GAP_SPAN
        positive, above = np.append(low, positive), np.append(above[0], above)
    axes.plot(positive, above, color=style.BLUE, label="trace")
    grid = np.geomspace(low, high, 200)
    axes.plot(grid, np.exp(-grid / gaps.mean()), color=style.GREY, linestyle="--", linewidth=0.8, label="Poisson")
    axes.set(xlabel="gap (s)", ylabel="share of longer gaps", ylim=(max(0.5 / len(gaps), 1e-6), 1.5))
    style.set_log(axes.xaxis, low, high)
    axes.set_yscale("log")
    axes.legend()


def lengths(trace: TraceColumns) -> Figure:
    """Distributions of prompt and output lengths, and a scatter of output over prompt lengths."""
    with style.styled():
        figure, ((left, right),) = style.grid(1, 2, 2.6)
        known = trace.outputs > 0
        for index, (name, values) in enumerate((("prompt", trace.prompts), ("output", trace.outputs[known]))):
            if len(values):
                shares = np.arange(1, len(values) + 1) / len(values)
                left.plot(np.sort(values), shares, label=name, **style.series_style(index))
        left.set(title="lengths", xlabel="tokens", ylabel="share of requests", xscale="log", ylim=(0, 1.02))
        left.legend()
        right.set_title("lengths together")
        step = max(1, len(trace.prompts) // _MAX_POINTS)
        prompts, outputs = trace.prompts[known][::step], trace.outputs[known][::step]
        if len(prompts):
            right.plot(prompts, outputs, ".", color=style.BLUE, markersize=1.5, alpha=0.35, rasterized=True)
            right.set(xlabel="prompt tokens", ylabel="output tokens", xscale="log", yscale="log")
        else:
            style.say_empty(right, "no output lengths")
        return figure


def dispersion(windows_s: Sequence[float], values: Sequence[float | None]) -> Figure:
    """The variance of the arrival counts over their mean, by window length; a Poisson process has 1."""
    with style.styled():
        figure, ((axes,),) = style.grid(1, 1, 2.4)
        axes.set_title("dispersion of counts")
        known = [(window, value) for window, value in zip(windows_s, values, strict=True) if value]
        if known:
            axes.plot(*zip(*known, strict=True), color=style.BLUE, marker="o")
            axes.axhline(1.0, color=style.GREY, linestyle="--", linewidth=0.8)
            axes.annotate("Poisson", (1, 1.0), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7)
            axes.set(xlabel="window (s)", ylabel="variance / mean", xscale="log", yscale="log")
        else:
            style.say_empty(axes, "too short")
        return figure


def prefixes(trace: TraceColumns) -> Figure:
    """The share of each prompt found in a cache of infinite size, and the share of all tokens so far over the trace."""
    with style.styled():
        figure, ((left, right),) = style.grid(1, 2, 2.6)
        shares = trace.hits / np.maximum(trace.prompts, 1)
        left.set_title("share of each prompt")
        left.plot(np.sort(shares), np.arange(1, len(shares) + 1) / len(shares), color=style.BLUE)
        left.set(xlabel="share that was seen before", ylabel="share of requests", xlim=(-0.02, 1.02), ylim=(0, 1.02))
        right.set_title("share of all tokens so far")
        total = np.cumsum(trace.prompts)
        right.plot(np.arange(1, len(total) + 1), np.cumsum(trace.hits) / total, color=style.BLUE)
        right.set(xlabel="requests", ylabel="share of prompt tokens", ylim=(0, 1.02))
        return figure


def all_plots(trace: TraceColumns, windows_s: Sequence[float], values: Sequence[float | None]) -> dict[str, Any]:
    """The figures by file name; "prefixes" is left out if no prefix is shared."""
    figures = {
        "arrivals": arrivals(trace),
        "lengths": lengths(trace),
        "dispersion": dispersion(windows_s, values),
    }
    if trace.hits.any():
        figures["prefixes"] = prefixes(trace)
    return figures
