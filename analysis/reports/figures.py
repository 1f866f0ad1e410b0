"""The figures of a report, each with a caption that says which runs it is of."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from analysis import format as fmt
from analysis import plots
from analysis.comparison.arms import Arm, decided_alike, grouped, repeats, replicates, unsaid_keys
from analysis.comparison.effects import Compared
from analysis.load import Run, Sweep, num_replicas
from analysis.measures.over_time import MIN_REQUESTS
from analysis.measures.summary import summary_value
from analysis.naming import apart
from analysis.reports import tables
from analysis.reports.keeping_slo import is_chosen
from analysis.reports.keeping_up import judged
from analysis.reports.parts import Plot, ReportInput, Sections

_HEADLINE = ("ttft_s.mean", "ttft_s.p99", "tpot_s.mean")
_SERVED = ("slo.goodput_per_s", "throughput.output_tokens_per_s")
_MAX_PANELS = 4
_MAX_CURVES = 8
_MAX_TIMELINES = 3  # side by side
_MANY = 5  # windows: with fewer, a quantile over time says little


def change_bars(sections: Sections, group: Compared) -> Plot:
    """The bars of the telling metrics at a load, one for each arm."""
    base, shown = group.arms[0].name, telling(group)
    bars = [row for row in group.rows if row.metric.path in shown]
    caption = (
        "Bars are the ratio to the baseline on a logarithmic axis (of shares the difference), whiskers its 95 % "
        "interval; the verdict is the table's, which is corrected for the number of comparisons: a bar may be "
        "undecided although its whiskers miss the baseline."
    )
    if any(apart(row.arm, base)[2] for row in bars):
        caption += f" Arms are named by what sets them apart from the baseline, {base}."
    title = f"Change against the baseline{f' at {group.load}' if group.load else ''}"
    draw = partial(plots.ablation_bars, bars, baseline=base)
    return sections.plot(draw, f"ablation_{len(sections.ablation)}", title, caption)


def telling(group: Compared) -> list[str]:
    """The paths of the metrics that show the answer: those that are claimed, of arms and of factors, first those that
    the user chose, then the largest; without claims those that are chosen, else the headline. With an SLO goodput
    has a place unless only others are chosen."""
    known = {row.metric.path: row.metric for row in group.rows}
    claims = [row for row in (*group.rows, *(one.comparison for one in group.effects)) if row.is_claim]
    claims.sort(key=lambda row: (not row.metric.is_chosen, -row.size))
    served = [path for path in _SERVED if path in known][:1]
    paths = [*served] if _SERVED[0] in known and is_chosen([group]) is not False else []
    paths += [row.metric.path for row in claims]
    paths += [path for path, metric in known.items() if metric.is_chosen]
    return list(dict.fromkeys([*paths, *_HEADLINE, *served]))[:_MAX_PANELS]


def main_figure(sections: Sections) -> Plot | None:
    """The bars of the most informative load: preferably one with a claim, then one that some arm kept up with, then the
    one with the most arms, then the one with the largest change."""
    drawn = []
    for place, (group, known) in enumerate(zip(sections.ablation, sections.compared, strict=True)):
        if group["plots"]:
            largest = max((row.size for row in known.rows if row.is_claim), default=0.0)
            keeps_up = any(one.state != "beyond" for one in judged(known.arms))
            drawn.append((largest > 0.0, keeps_up, len(known.arms), largest, place))
    return sections.ablation[max(drawn)[-1]]["plots"][0] if drawn else None


def run_plots(sections: Sections, loads: Mapping[str, Sequence[Arm]], baseline: Arm, report: ReportInput) -> list[Plot]:
    """CDFs and timelines of one replicate at the heaviest load; with several loads also the curve over them."""
    load, arms = max(loads.items(), key=lambda item: item[1][0].runs[0].summary["throughput"]["offered_per_s"] or 0.0)
    ordered = sorted(arms, key=lambda arm: arm.name != baseline.name)
    typical, ordered = _typical(ordered), ordered[:_MAX_CURVES]
    at_load = [run for arm in arms for run in arm.runs]
    which = tables.replicate_names(at_load)(next(iter(typical.values())))
    where = f"{f' at {load}' if load else ''}, {which}"
    note = f" The first {len(ordered)} of {len(arms)} arms are shown." if len(ordered) < len(arms) else ""
    caption = f"Share of requests within a latency, queueing included.{note}"
    draw = partial(plots.latency_cdf, {arm.name: typical[arm.name] for arm in ordered})
    drawn = [sections.plot(draw, "latency_cdf", f"Latency distributions{where}", caption)]
    shown = _timeline_choice(typical)
    chosen = ""
    if len(shown) < len(arms):
        most = fmt.count(len(shown) - 1, "arm")
        chosen = f" Of {len(arms)} arms, shown are the baseline and the {most} whose mean TTFT is furthest from its."
    if min(run.summary["num_requests"] for run in shown.values()) >= _MANY * MIN_REQUESTS:
        caption = f"TTFT of the requests that arrived in each window.{chosen}"
        draw = partial(plots.latency_over_time, shown)
        drawn.append(sections.plot(draw, "latency_over_time", f"TTFT over time{where}", caption))
    runs = [run for arm in report.arms for run in arm.runs]
    if len(loads) > 1 and not unsaid_keys(runs, report.replicated):
        every = {
            arm.name: [run for part in loads.values() for a in part if a.name == arm.name for run in a.runs]
            for arm in ordered
        }
        caption = "Mean over replicates; the bars span them. A triangle on top: not reached." + note
        draw = partial(plots.throughput_latency, every)
        drawn.append(sections.plot(draw, "throughput_latency", "Latency against throughput", caption))
    caption = "Share of the pool's blocks that sequences hold, and queue lengths after each step's plan." + chosen
    if any(num_replicas(run) > 1 for run in shown.values()):
        caption += " Of several replicas: the mean of their shares, and the sums of their queues."
    draw = partial(plots.timeline, shown)
    return [*drawn, sections.plot(draw, "timeline", f"KV usage and queue over time{where}", caption)]


def own_plots(sections: Sections, report: ReportInput) -> list[Plot]:
    """The user's own plots of all compared runs."""
    runs = {run.path.resolve(): run for run in report.runs}
    sweep = Sweep(Path(os.path.commonpath([*runs])), tuple(runs.values()), tuple(report.incomplete))
    return [sections.own_plot(plot, f"own_{number}", sweep) for number, plot in enumerate(report.plots, 1)]


def _typical(arms: Sequence[Arm]) -> dict[str, Run]:
    """For each arm its run of one replicate: of the replicates that all arms have, the one with the median of mean TTFT
    over the arms, and of its repeats the one with the median. Without common replicates, each arm's first one."""
    runs = [{run.fingerprint: run for run in replicates(arm)} for arm in arms]
    common = sorted(
        (key for key in runs[0] if all(key in own for own in runs)),
        key=lambda key: sum([_mean_ttft_s(own[key]) for own in runs]),
    )
    middle = [common[(len(common) - 1) // 2] if common else next(iter(own)) for own in runs]
    chosen = [repeats(arm, own[key]) for arm, own, key in zip(arms, runs, middle, strict=True)]
    return {arm.name: sorted(own, key=_mean_ttft_s)[(len(own) - 1) // 2] for arm, own in zip(arms, chosen, strict=True)}


def _mean_ttft_s(run: Run) -> float:
    return summary_value(run.summary, "ttft_s.mean") or 0.0


def _timeline_choice(typical: Mapping[str, Run]) -> dict[str, Run]:
    """The baseline, which is the first, and the arms whose mean TTFT is furthest from it, in order. One that took the
    same decisions as another comes after all others."""
    reference = _mean_ttft_s(next(iter(typical.values())))

    def distance(name: str) -> float:
        return abs((_mean_ttft_s(typical[name]) or reference) - reference)

    baseline, *others = typical
    as_decided = grouped(
        [baseline, *sorted(others, key=distance, reverse=True)], lambda name: decided_alike(typical[name])
    )
    firsts, copies = (
        [names[0] for names in as_decided.values()],
        [name for _, *more in as_decided.values() for name in more],
    )
    shown = [*firsts, *copies][:_MAX_TIMELINES]
    return {name: run for name, run in typical.items() if name in shown}
