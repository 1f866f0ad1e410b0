"""Plots of one run: the composition of its steps, its requests over time, and which requests were preempted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, overload

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from analysis import format as fmt
from analysis.comparison.arms import Runs, Several
from analysis.explain.decisions import DECISIONS_FILE
from analysis.explain.frames import PREEMPTED, Told
from analysis.load import Run, Sweep, num_replicas
from analysis.measures.occupancy import run_end_ns
from analysis.plots import style
from analysis.plots.curves import MAX_POINTS, engines_of, total
from analysis.plots.sources import MAX_RUNS, column_of, requests_of, runs_of
from analysis.plots.style import AxesArray
from analysis.reading.frames import numbers
from testbed.records.schema import COMPLETED

_NAMED_ROWS = 60  # of a Gantt chart; with more, rows are too narrow for names
_KINDS: dict[str, dict[str, Any]] = {
    "decode": {"facecolor": style.BLUE, "linewidth": 0},
    "prefill": {"facecolor": style.ORANGE, "linewidth": 0},
}
_AWAY: dict[str, Any] = {"facecolor": "white", "edgecolor": style.BLACK, "linewidth": 0.5}
_PHASES: dict[str, dict[str, Any]] = {  # with edges, as a phase may be narrower than a pixel
    "queued": {"facecolor": "#DADADA", "edgecolor": "#DADADA", "linewidth": 0.4},
    **{name: look | {"edgecolor": look["facecolor"], "linewidth": 0.4} for name, look in reversed(_KINDS.items())},
    "preempted (recompute)": _AWAY | {"hatch": "//////"},
    "preempted (swap)": _AWAY | {"hatch": "......"},
}
_ENDS: dict[str, dict[str, Any]] = {
    "unfinished": {"marker": ">", "color": style.BLACK},
    "abort": {"marker": "x", "color": style.VERMILLION, "markeredgewidth": 1.5},
    "ignored": {"marker": "D", "color": style.BLACK},
}


@overload
def batch_composition(runs: Run, *, ax: Axes | None = None) -> Axes: ...
@overload
def batch_composition(runs: Several) -> AxesArray: ...
def batch_composition(runs: Runs, *, ax: Axes | None = None) -> Axes | AxesArray:
    """Decode and prefill tokens of the steps over time, stacked; for replicas, sums of the steps that run concurrently.

    Returns the Axes of one run, or an array of Axes for several runs, one above the other on the same scales. If a run
    has very many steps, means over short intervals are drawn, which the label states: the extremes of both kinds could
    come from different steps, so that their stack would be no step.
    """
    each = runs_of(runs, MAX_RUNS if ax is None else 1)
    with style.styled(ax):
        if isinstance(runs, Run) or ax is not None:
            panels = np.array([style.only_axes(ax, 2.5)])
        else:
            panels = style.grid(max(len(each), 1), 1, 0.7 + 1.5 * max(len(each), 1), sharex=True, sharey=True)[1][:, 0]
        ends = [_composition_panel(axes, run) for axes, run in zip(panels, each.values(), strict=False)]
        for axes, label in zip(panels, each, strict=False):
            axes.set_title("" if isinstance(runs, Run) else style.literal(label), loc="left")
            axes.set(xlim=(0, max([end[0] for end in ends])), ylim=(0, 1.03 * max([end[1] for end in ends])))
        style.name_clock(panels[-1].xaxis, panels[-1].get_xlim()[1])
        style.legend_under(panels[-1], [Patch(**look) for look in _KINDS.values()], list(_KINDS))
        return cast(Axes, panels[0]) if isinstance(runs, Run) else panels


def _composition_panel(axes: Axes, run: Run) -> tuple[float, float]:
    """Draws a run; returns the largest x and y."""
    if not (engines := engines_of(run)):
        style.say_empty(axes, "no steps recorded")
        return 1.0, 1.0
    levels = {
        kind: total([engine.level(np.nan_to_num(numbers(engine.steps, f"num_{kind}_tokens"))) for engine in engines])
        for kind in _KINDS
    }
    edges, of = np.unique(levels["decode"].times_s), "tokens per step"
    if num_replicas(run) > 1:
        of += "\nof all replicas"
    if edges.size > MAX_POINTS:
        edges = np.linspace(edges[0], edges[-1], MAX_POINTS // 2 + 1)
        of += f"\n(mean over {fmt.significant(edges[1] - edges[0], 2)} s)"
    low = np.zeros(edges.size)
    for kind, level in levels.items():
        means = level.mean_between(edges)
        high = low + np.append(means, means[-1:])
        axes.fill_between(edges, low, high, step="post", **_KINDS[kind])
        low = high
    decodes = np.append(levels["decode"].mean_between(edges), np.nan)
    axes.plot(edges, decodes, drawstyle="steps-post", color=style.BLUE, linewidth=0.7)  # for narrow areas
    axes.set_ylabel(of)
    if not high.any():
        style.say_empty(axes, "no step computed tokens")  # they only rejected or moved requests
    return float(edges[-1]), float(high.max()) or 1.0


def gantt(
    source: Run | pd.DataFrame,
    *,
    from_s: float = 0.0,
    to_s: float | None = None,
    max_rows: int = 40,
    request_ids: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The phases of requests, one row each by arrival: queued, prefill, decode, and preempted (out of the batch).

    source: a run or a frame of requests. Drawn are the first `max_rows` requests that are in the system at some time
    within [from_s, to_s) and, if given, in `request_ids`; if there are more, the title states how many. The
    times of preemptions are known only for a run with record.decisions=true; for others the number of preemptions is
    next to a request's name. Recomputation is drawn as the phase that the preemption interrupted.
    """
    requests = requests_of(source, Run)
    steps = source.steps if isinstance(source, Run) else pd.DataFrame({"end_ns": np.empty(0, dtype=np.int64)})
    end_s = run_end_ns(requests, steps) / 1e9
    lives = _lives(requests, end_s)
    chosen = lives["end_s"].gt(from_s) & lives["arrival_s"].lt(end_s if to_s is None else to_s)
    if request_ids is not None:
        chosen &= lives["request_id"].isin(list(request_ids))
    rows = lives[chosen].sort_values("arrival_s", kind="stable").head(max_rows).reset_index(drop=True)
    preemptions = None
    if isinstance(source, Run) and (source.path / DECISIONS_FILE).is_file():
        preemptions = Told(source, explained=False).preemptions
    with style.styled(ax):
        axes = style.only_axes(ax, 1.1 + 0.13 * max(min(len(rows), 80), 4))
        if rows.empty:
            style.say_empty(axes, "no request is in the system then")
            return axes
        handles = _draw_phases(axes, rows, preemptions) | _draw_ends(axes, rows)
        _name_rows(axes, rows, with_counts=preemptions is None)
        if len(rows) < chosen.sum():
            when = "" if (from_s, to_s) == (0.0, None) else " in this window"
            axes.set_title(f"the first {len(rows):,} of {chosen.sum():,} requests{when}, by arrival", loc="left")
        first_s = max(from_s, float(rows["arrival_s"].min()))
        last_s = min(float(rows["end_s"].max()), np.inf if to_s is None else to_s)
        axes.set_xlim(first_s, last_s)
        style.name_clock(axes.xaxis, last_s - first_s)
        axes.grid(visible=False, axis="y")
        style.legend_under(axes, list(handles.values()), list(handles))
    return axes


def _lives(requests: pd.DataFrame, end_s: float) -> pd.DataFrame:
    """The requests' instants in seconds, NaN if an event did not happen; unfinished requests end with the run."""
    names = ("arrival", "first_scheduled", "first_token", "finish")
    times = {f"{name}_s": numbers(requests, f"{name}_ns") / 1e9 for name in names}
    finish_s = times.pop("finish_s")
    lives = pd.DataFrame(times | {"end_s": np.where(np.isnan(finish_s), end_s, finish_s)})
    lives["ending"] = requests["finish_reason"].fillna("unfinished").to_numpy()
    return lives.assign(
        request_id=requests["request_id"].to_numpy(), num_preemptions=numbers(requests, "num_preemptions")
    )


def _draw_phases(axes: Axes, rows: pd.DataFrame, preemptions: pd.DataFrame | None) -> dict[str, Any]:
    """Draws the phases; returns the legend handles of those that occur."""
    places = np.arange(len(rows), dtype=np.float64)
    started = rows["first_scheduled_s"].fillna(rows["end_s"]).to_numpy()
    token = rows["first_token_s"].fillna(rows["end_s"]).to_numpy()
    bars = {  # phase -> [row, start s, end s; num_bars]
        "queued": np.stack((places, rows["arrival_s"], started)),
        "prefill": np.stack((places, started, np.maximum(token, started))),
        "decode": np.stack((places, np.maximum(token, started), rows["end_s"])),
    }
    known = pd.DataFrame(columns=PREEMPTED) if preemptions is None else preemptions
    away = rows.assign(place=places).merge(known, on="request_id")
    for mode in ("recompute", "swap"):
        of_mode = away[away["mode"] == mode]
        back_s = (of_mode["back_ns"] / 1e9).fillna(of_mode["end_s"])  # one that never ran again is away to its end
        bars[f"preempted ({mode})"] = np.stack((of_mode["place"], of_mode["at_ns"] / 1e9, back_s)).astype(np.float64)
    handles: dict[str, Any] = {}
    for phase, (row, start, end) in bars.items():
        if (end > start).any():
            edges = {"linewidth": np.where(end > start, _PHASES[phase]["linewidth"], 0.0)}
            axes.barh(row, end - start, left=start, height=0.72, **_PHASES[phase] | edges)
            handles[phase] = Patch(**_PHASES[phase])
    whose, starts, _ = np.concatenate([bars[f"preempted ({mode})"] for mode in ("recompute", "swap")], axis=1)
    if starts.size:
        look: dict[str, Any] = {"color": style.BLACK, "marker": "v", "linestyle": "none", "markersize": 2.6}
        axes.plot(starts, whose - 0.36, **look)
        handles["preemption"] = style.line_handle(**look)
    return handles


def _draw_ends(axes: Axes, rows: pd.DataFrame) -> dict[str, Any]:
    """Draws marks at the ends of requests that did not finish; returns the legend handles."""
    handles = {}
    for ending, look in _ENDS.items():
        those = rows.index[rows["ending"] == ending]
        if len(those):
            mark: dict[str, Any] = {"linestyle": "none", "markersize": 4.0, "clip_on": False} | look
            axes.plot(rows["end_s"][those], those, **mark)
            handles[ending] = style.line_handle(**mark)
    return handles


def _name_rows(axes: Axes, rows: pd.DataFrame, *, with_counts: bool) -> None:
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_ylabel("request")
    if len(rows) > _NAMED_ROWS:
        axes.set_yticks([])
        return
    counts = rows["num_preemptions"].fillna(0).astype(int)
    labels = [
        f"{name} (preempted {count} ×)" if with_counts and count else name
        for name, count in zip(map(style.literal, rows["request_id"]), counts, strict=True)
    ]
    axes.set_yticks(range(len(rows)), labels, fontsize=6.0)


_TIMES: dict[str, dict[str, Any]] = {
    "never preempted": {"color": "#B5B5B5", "marker": "o", "markersize": 2.6},
    "once": {"color": style.SKY, "marker": "o", "markersize": 4.2},
    "2 or 3 times": {"color": style.BLUE, "marker": "s", "markersize": 4.2},
    "4 times or more": {"color": style.VERMILLION, "marker": "^", "markersize": 5.2},
}


def preemption_scatter(
    source: Run | Sweep | pd.DataFrame, *, x: str = "num_output_tokens", ax: Axes | None = None
) -> Axes:
    """Which requests were preempted, and at what cost: time from first admission to end over the request's length.

    Requests without preemptions lie along a line, whose slope is the step time; the distance above it is the cost of
    the preemptions. The wait before the first admission, which no preemption causes, is left out. x: another column of
    lengths; num_prompt_tokens, for example, shows which requests the victim policy selects. `gantt` and
    `plots.timeline` show when preemptions happened. Only finished requests are drawn.
    """
    requests = requests_of(source, Run, Sweep)
    length, times = column_of(requests, x), numbers(requests, "num_preemptions")
    stay_s = (numbers(requests, "finish_ns") - numbers(requests, "first_scheduled_ns")) / 1e9
    done = requests["finish_reason"].isin(COMPLETED).to_numpy() & ~np.isnan(stay_s)
    classes = dict(zip(_TIMES, (times == 0, times == 1, (times == 2) | (times == 3), times >= 4), strict=True))
    with style.styled(ax):
        axes = style.only_axes(ax, 3.3)
        if not done.any():
            style.say_empty(axes, "no request finished")
            return axes
        (factor, unit), handles = style.time_unit(stay_s[done]), {}
        for name, those in classes.items():
            if (those & done).any():
                look = _TIMES[name] | {"linestyle": "none", "markeredgewidth": 0.3, "markeredgecolor": "white"}
                axes.plot(length[those & done], stay_s[those & done] * factor, rasterized=done.sum() > 5000, **look)
                handles[f"{name} ({(those & done).sum():,})"] = style.line_handle(**look)
        style.log_if_wide(axes.xaxis, length[done])
        if not style.log_if_wide(axes.yaxis, stay_s[done] * factor):
            axes.set_ylim(0, None)
        axes.set_xlabel(x.removeprefix("num_").replace("_", " "))
        axes.set_ylabel(f"first admission to end ({unit})")
        style.legend_under(axes, list(handles.values()), list(handles))
    return axes
