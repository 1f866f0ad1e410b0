"""Warnings on runs without a steady part: overloads, and starts and ends that make up much of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from analysis import format as fmt
from analysis.comparison.arms import Arm, counted, grouped
from analysis.comparison.compare import RATES, Metric, compare, ignored
from analysis.comparison.wording import change_text
from analysis.load import Run
from analysis.measures.statistics import mser5
from analysis.reports.keeping_up import began_within_s, is_closed_loop, judged, state_of, who
from analysis.reports.tables import replicate_names

_MAX_NAMED = 6  # arms or replicates


def outrun(arms: Sequence[Arm], margin: float) -> Iterator[str]:
    """Sentences on the arms that are beyond their capacity, and on rates there that say what was served first."""
    known = judged(arms)
    beyond = [one for one in known if one.state == "beyond"]
    if beyond:
        names = who(known, "beyond").replace("every arm", "Every arm")
        shown = _how_outrun([run for one in beyond for run in one.runs], sum(one.num_runs for one in beyond))
        outrun_too = [arm for arm, one in zip(arms, known, strict=True) if one.state == "beyond"]
        put_off = _putting_off(outrun_too, margin) if outrun_too[0] is arms[0] else []  # others are just faster
        yield (
            f"{names} {'is' if len(beyond) == 1 or names == 'Every arm' else 'are'} beyond capacity: {shown} until the "
            "last one came. Such latencies depend on how long the trace is, and so does how many keep an SLO; "
            f"{'' if put_off else 'compare throughputs there, or '}lower the rate."
        )
        if put_off:
            yield (
                f"Until the last one came, {fmt.listing(put_off, _MAX_NAMED)}: there the arms differ more in what they "
                "serve first than in how fast, and in an overload that lasts, what is put off starves."
            )


def _finished_per_s(run: Run) -> float | None:
    duration_s = run.summary["duration_s"]
    return run.summary["num_finished"] / duration_s if duration_s else None


_OVER_ALL = Metric("requests/s", "finished_per_s", 1, RATES[0].write, _finished_per_s)


def _putting_off(arms: Sequence[Arm], margin: float) -> list[str]:
    """The arms whose rates differ from the baseline's by more than the margin while requests come, and over the whole
    run do not, or to the other side."""
    of_arm = grouped(compare(arms, arms[0], [_OVER_ALL, *RATES], margin), lambda row: row.arm)
    told, limit = [], math.log1p(margin)
    for name, (whole, *rates) in of_arm.items():
        side = {row: math.copysign(1.0, row.log_ratio) for row in rates if abs(row.log_ratio) > limit}
        unlike = [row for row, sign in side.items() if whole.log_ratio * sign <= limit]
        if unlike and whole.estimate is not None:
            changes = fmt.listing([f"{change_text(row)} {row.metric.label}" for row in unlike])
            whole_text = f"{change_text(whole)} {whole.metric.label} over the whole runs"
            told.append(f"{name} has {changes} against {arms[0].name}, but {whole_text}")
    return told


def _how_outrun(runs: Sequence[Run], num_of: int) -> str:
    """The evidence for an overload, averaged over these runs, which are some of `num_of`. Rates are left out for closed
    loops: later turns arrive only when earlier ones have been served."""
    where = "" if len(runs) == num_of else f"in {len(runs)} of {num_of} runs "
    if not any(map(is_closed_loop, runs)):
        offered, reached = _mean_rates(runs)
        return f"{where}{offered} came, {reached} were served, and more and more work waited or was in the system"
    before, _, after = np.mean([run.summary["steadiness"]["in_system"] for run in runs], axis=0).tolist()
    if after <= before:  # only sessions grew
        return f"{where}more and more were in the system"
    early, late = (fmt.significant(count, 2) for count in (before, after))
    return f"{where}{early} requests were in the system early in the trace, {late} late in it, and ever more"


def _mean_rates(runs: Sequence[Run]) -> list[str]:
    """The mean rates at which requests arrived and were served, as text."""
    rates = [run.summary["throughput"] for run in runs]
    means = [float(np.mean([rate[name] or 0.0 for rate in rates])) for name in ("offered_per_s", "requests_per_s")]
    return [("on average " if len(runs) > 1 else "") + fmt.number(means[0], "req/s"), fmt.number(means[1], "req/s")]


DRAINED = 0.85  # served over offered rate; below it what had not ended when the last one came distorts the served rate


def draining(loads: Mapping[str, Sequence[Arm]]) -> Iterator[str]:
    """Sentences on rates of traces that are short compared with the time that their requests or sessions take: one for
    all loads, with the numbers of each."""
    closed, slow = [], []
    for load, arms in loads.items():
        at = f" at {load}" if len(loads) > 1 else ""
        drained = [(arm.name, run) for arm in arms for run in counted(arm) if _is_drained_long(run)]
        by_loop = grouped(drained, lambda one: is_closed_loop(one[1]))
        if found := by_loop.get(True):
            begin_s, last_s = (
                fmt.seconds(float(np.mean([find(run) for _, run in found]))) for find in (began_within_s, _lasted_s)
            )
            mean = " on average" if len(found) > 1 else ""
            closed.append(f"{_in_which(found, arms)}after {begin_s} of {last_s}{mean}{at}")
        if found := by_loop.get(False):
            offered, reached = _mean_rates([run for _, run in found])
            slow.append(f"{_in_which(found, arms)}{offered} came and {reached} were served{at}")
    if closed:
        yield (
            "Rates are until the last request came, and sessions began only in a part of that time, the last one "
            f"{fmt.listing(closed)}; from then on ever fewer had turns left. The offered rate is an outcome, too, as "
            "later turns wait for earlier ones. A difference in rates or goodput may be one in how long the last "
            "sessions took; more sessions help."
        )
    if slow:
        yield (
            f"Traces are short: {fmt.listing(slow)} until the last one came; many were still in the system. A "
            "difference in rates or goodput may be one in these; a longer trace helps."
        )


def _is_drained_long(run: Run) -> bool:
    rate = run.summary["throughput"]
    if state_of(run) not in ("kept up", "untold") or ignored(run):
        return False
    if is_closed_loop(run):
        return began_within_s(run) < DRAINED * _lasted_s(run)
    return bool(rate["requests_per_s"] < DRAINED * (rate["offered_per_s"] or 0.0))


def _lasted_s(run: Run) -> float:
    return float(run.summary["throughput"]["duration_s"]) + run.warmup_s


def _in_which(chosen: Sequence[tuple[str, Run]], arms: Sequence[Arm]) -> str:
    """The runs that a number is from: "in 5 of 25 runs (every arm; seed 3) ". Arms and replicates are named if not all
    of them are concerned; "" for all runs."""
    every = [(arm.name, run) for arm in arms for run in counted(arm)]
    if len(chosen) == len(every):
        return ""
    replicate = replicate_names([run for _, run in every])
    parts = []
    for name in (lambda one: str(one[0]), lambda one: replicate(one[1])):
        names, among = dict.fromkeys(map(name, every)), set(map(name, chosen))
        these = [one for one in names if one in among]
        if len(these) < len(names):
            parts.append(fmt.names(these, _MAX_NAMED))
    if len({name for name, _ in chosen}) == len(arms) > 1:
        parts.insert(0, "every arm")
    told = f" ({'; '.join(parts)})" if parts else ""
    return f"in {len(chosen)} of {len(every)} runs{told} "


def left_out_start(arms: Sequence[Arm]) -> Iterator[str]:
    """A sentence on the requests that report.warmup_s leaves out."""
    runs = [run for arm in arms for run in arm.runs if run.summary["num_in_warmup"]]
    if runs:
        left, kept = (sum(run.summary[name] for run in runs) for name in ("num_in_warmup", "num_requests"))
        yield (
            f"The requests that came in the first {runs[0].warmup_s:g} s of each run (report.warmup_s), "
            f"{fmt.number(left)} of {fmt.number(left + kept)}, count in no latency and no SLO attainment; throughput "
            "and goodput count those of them, too, that ended after these seconds."
        )


def warm_up(arms: Sequence[Arm], margin: float) -> Iterator[str]:
    """A sentence if the start of the runs, as MSER-5 determines it from TTFT, lowers mean TTFT by more than the margin
    in the median replicate of an arm. A slow start does not count: an empty system is fast, so this is a burst."""
    changes = {arm.name: [(run, change_by_warm_up(run)) for run in counted(arm)] for arm in arms}
    if not any(np.median([change for _, change in each]) > margin for each in changes.values()):
        return
    changed = [(name, run) for name, each in changes.items() for run, change in each if change > margin]
    most = max(change for each in changes.values() for _, change in each)
    said, longer = "The start, when the system is still empty,", ""
    if warmup_s := changed[0][1].warmup_s:
        said, longer = f"After the first {warmup_s:g} s the system still fills up, which", "a longer "
    yield (
        f"{said} is part of all numbers: without it (MSER-5's cut) mean TTFT {_in_which(changed, arms)}would be up to "
        f"{fmt.change(100 * most)} off what is shown. A longer trace helps, or {longer}report.warmup_s."
    )


def change_by_warm_up(run: Run) -> float:
    """The relative change of mean TTFT if the start is cut; 0 where there is no steady state: beyond capacity, and if
    all requests came at once."""
    if state_of(run) == "beyond" or (state_of(run) == "at once" and not is_closed_loop(run)):
        return 0.0
    requests, _ = run.counted
    ttft = requests.numbers("ttft_s")[np.argsort(requests.whole("arrival_ns"), kind="stable")]
    ttft = ttft[~np.isnan(ttft)]
    cut = mser5(ttft)
    return float(ttft[cut:].mean() / ttft.mean() - 1.0) if cut and ttft.mean() > 0 else 0.0
