"""What a report's first screen says: the answer in a few sentences, by the size of effects, and how far to trust it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from analysis import format as fmt
from analysis.arms import Arm, Pair, grouped, num_replicates, replicates
from analysis.cautions import is_outrun, num_ignored
from analysis.checks import failures
from analysis.compare import LATENCY, RATES, SLO_METRICS, Comparison, Metric, mean_over_replicates, metric_of
from analysis.effects import Effect, by_factor
from analysis.fidelity import worst_errors
from analysis.findings import change_text
from analysis.load import Run
from analysis.metrics import SLO
from analysis.naming import factor_name

MAX_SENTENCES = 5
_MAX_CLAIMS = 2  # of each kind in a sentence
_MAX_LOADS, _MAX_SHARES = 4, 4  # whose attainment is told
_DRAWN = ("bootstrap", "jitter", "thin", "sample_sessions", "window")  # transformations that make replicates
_FEW = 5  # replicates: below, intervals are wide
_NEAR, _FAR = 0.05, 0.15  # of measured errors
_ERRORS = ("ttft_s.mean", "tpot_s.mean", "e2e_s.mean", "throughput.output_tokens_per_s")

Level = Literal["good", "fair", "poor"]


class Trust(NamedTuple):
    """One light: what it is about, how far to trust it, and why."""

    about: str
    level: Level
    why: str


class Compared(NamedTuple):
    """What is known at one load; the first arm is the baseline."""

    load: str
    arms: Sequence[Arm]
    rows: Sequence[Comparison]
    effects: Sequence[Effect]  # main effects, of a replicated full design


def answer(groups: Sequence[Compared], slo: SLO | None) -> list[str]:
    """At most MAX_SENTENCES: which arms keep the SLO, who serves most within it, then claimed changes by their size,
    the largest first. Of one arm what it did, at each load."""
    if not any(group.rows for group in groups):
        return [_described(group, slo) for group in groups]
    kept = [] if slo is None else _kept(groups, slo)
    return [*kept, *_differences(groups, slo, MAX_SENTENCES - len(kept))]


def _kept(groups: Sequence[Compared], slo: SLO) -> list[str]:
    """One sentence: the share of requests that keep the SLO, of each arm; of loads beyond the first few, none."""
    told = [(group.load, text) for group in groups if (text := _kept_at(group, slo))]
    parts = [f"at {load}, {text}" if load else text for load, text in told[:_MAX_LOADS]]
    if len(told) > _MAX_LOADS:
        parts.append(f"{len(told) - _MAX_LOADS} more loads are in the tables")
    said = "; ".join(parts)
    is_word = said.startswith(("at ", "no ", "every "))  # else an arm's name, which stays as it is
    return [f"{said[0].upper() if is_word else said[0]}{said[1:]}."] if said else []


def _kept_at(group: Compared, slo: SLO) -> str:
    share = SLO_METRICS[0]
    known = {arm.name: mean_over_replicates(arm, share, slo) for arm in group.arms if arm.runs}
    values = {name: value for name, value in known.items() if value is not None}
    if not values:
        return ""
    if not any(values.values()):
        return f"no request keeps the SLO {'in any arm' if len(values) > 1 else 'in ' + next(iter(values))}"
    by_share = grouped(sorted(values, key=lambda name: -values[name]), lambda name: share.write(values[name]))
    (most, best), *others = by_share.items()
    how_sure = " (no difference beyond the noise)" if others and _is_noise(group, share) else ""
    if not others:
        both = " both" if len(best) == 2 else ""
        who = "every arm" if len(best) > 2 else f"{fmt.listing(best)}{both}"
        return f"{who} {'keep' if both else 'keeps'} the SLO for {most} of the requests"
    if len(by_share) > _MAX_SHARES:
        (least, worst) = others[-1]
        return (
            f"{fmt.listing(best)} {_keeps(best)} the SLO for {most} of the requests, the most of {len(values)} arms, "
            f"and {fmt.listing(worst)} for {least}, the least{how_sure}"
        )
    rest = [f"{fmt.listing(names)} for {text}" for text, names in others]
    return f"{fmt.listing(best)} {_keeps(best)} the SLO for {most} of the requests, {fmt.listing(rest)}{how_sure}"


def _is_noise(group: Compared, metric: Metric) -> bool:
    """Whether neither arms nor levels of a factor differ in it by more than the noise, as far as that is known."""
    every = [*group.rows, *(effect.comparison for effect in group.effects)]
    rows = [row for row in every if row.metric is metric and row.verdict != "unknown"]
    return bool(rows) and not any(row.is_claim for row in rows)


def _keeps(names: Sequence[str]) -> str:
    return "keep" if len(names) > 1 else "keeps"


def _differences(groups: Sequence[Compared], slo: SLO | None, most: int) -> list[str]:
    """At most so many sentences: who serves most within the SLO, what turns with the load, and the claimed changes."""
    ranked: list[tuple[float, str]] = []
    claimed: dict[tuple[str, str], list[tuple[str, Comparison]]] = {}  # by subject and metric: at which load
    num_quiet = num_unknown = 0
    for group in groups:
        where = _where(group)
        for subject, rows, uneven in _subjects(group):
            claims = [row for row in rows if row.is_claim]
            if not claims:
                num_unknown += all(row.verdict == "unknown" for row in rows)
                num_quiet += any(row.verdict != "unknown" for row in rows)
                continue
            for row in claims:
                claimed.setdefault((subject, row.metric.label), []).append((group.load, row))
            ranked.append((max(abs(row.gain) for row in claims), f"{where}{subject}: {_told(claims)}{uneven}."))
    ranked.sort(key=lambda item: -item[0])
    best = [] if slo is None else [text for group in groups if (text := _best_within(group, slo))]
    said = [*best[: most - 2], *_turning(claimed), *(text for _, text in ranked)]
    if not said and num_unknown:
        return ["There is too little data for a claim: too few replicates, or too few requests of one."]
    if not said and num_quiet:
        return ["Nothing that was compared differs beyond the noise."]
    if len(said) > most:
        left = len(said) - most + 1
        said = [*said[: most - 1], f"{left} more differences are below, under “All findings”."]
    elif num_quiet and len(said) < most:
        said.append(
            f"{num_quiet} more comparison{'s show' if num_quiet > 1 else ' shows'} no difference beyond the noise."
        )
    return said


def _where(group: Compared) -> str:
    """What a sentence on a load begins with."""
    parts = [f"at {group.load}"] if group.load else []
    if any(is_outrun(run) for arm in group.arms for run in arm.runs):
        parts.append("beyond the capacity of some arm")
    if num_replicates(group.arms) == 1:
        parts.append("on this one trace")
    said = ", ".join(parts)
    return f"{said[0].upper()}{said[1:]}, " if said else ""


def _turning(claimed: Mapping[tuple[str, str], Sequence[tuple[str, Comparison]]]) -> list[str]:
    """One sentence on what is better at some loads and worse at others, if anything is: that with the largest loss."""
    found: list[tuple[float, str]] = []
    for (subject, label), at_loads in claimed.items():
        (worst_load, worst), (best_load, best) = (pick(at_loads, key=lambda one: one[1].gain) for pick in (min, max))
        if worst.gain < 0 < best.gain:
            said = (
                f"{subject} turns with the load: {label} is worse at {worst_load} ({change_text(worst)}) and better at "
                f"{best_load} ({change_text(best)})."
            )
            found.append((worst.gain, said[0].upper() + said[1:] if subject.startswith("on average") else said))
    return [min(found)[1]] if found else []


def _described(group: Compared, slo: SLO | None) -> str:
    """What one arm did, in means over its replicates."""
    (arm,) = group.arms
    runs = list(replicates(arm).values())
    manifest, values = runs[0].manifest, {}
    for metric in (*LATENCY, *RATES, *SLO_METRICS):
        values[metric.label] = metric.write(mean_over_replicates(arm, metric, slo))
    sent = fmt.number(float(np.mean([run.summary["num_requests"] for run in runs])))
    offered = fmt.number(float(np.mean([run.summary["throughput"]["offered_per_s"] or 0.0 for run in runs])), "req/s")
    over = f", means over {len(runs)} replicates" if len(runs) > 1 else ""
    said = (
        f"{manifest.get('scheduler')} with {manifest.get('model')} on {manifest.get('device')} "
        f"({manifest.get('backend')}), {sent} requests at {offered}{f' ({group.load})' if group.load else ''}{over}: "
        f"TTFT {values['mean TTFT']} in the mean and {values['P99 TTFT']} at P99, TPOT {values['mean TPOT']} and "
        f"{values['P99 TPOT']}, {values['requests/s']} and {values['output tokens/s']} served."
    )
    if slo is not None:
        told = [run.summary_under(slo)["slo"]["attainment_ci95"] for run in runs]
        interval = f" [{', '.join(fmt.share(end) for end in told[0])}]" if len(told) == 1 and told[0] else ""
        said += f" {values['SLO attainment']}{interval} of its requests kept the SLO: goodput {values['goodput']}."
    return said + " There is one arm, so nothing is compared."


def _subjects(group: Compared) -> list[tuple[str, list[Comparison], str]]:
    """(what against what, its comparisons, in which metrics the average of a factor hides what others make of it).
    Of a factorial design its factors, and arms in metrics that no factor changes on average."""
    found: list[tuple[str, list[Comparison], str]] = []
    for effects in by_factor(group.effects).values():
        first = effects[0]
        change = f"{fmt.plain(first.level)} instead of {fmt.plain(first.base_level)}"
        uneven = [effect.comparison.metric.label for effect in effects if effect.interaction is not None]
        hidden = f" (in {fmt.listing(uneven)} the effect depends on the other factors)" if uneven else ""
        subject = f"on average over the other factors, {factor_name(first.factor)} {change}"
        found.append((subject, [effect.comparison for effect in effects], hidden))
    known = {effect.comparison.metric.label for effect in group.effects if effect.comparison.is_claim}
    rows = [row for row in group.rows if not group.effects or (row.is_claim and row.metric.label not in known)]
    by_arm = grouped(rows, lambda row: row.arm)
    return found + [(f"{arm} against {group.arms[0].name}", mine, "") for arm, mine in by_arm.items()]


def _told(claims: Sequence[Comparison]) -> str:
    """The largest improvements and the largest losses."""
    parts = []
    for word, sign in (("better", 1), ("worse", -1)):
        mine = sorted((row for row in claims if row.gain * sign > 0), key=lambda row: -abs(row.gain))
        if mine:
            texts = [f"{row.metric.label} ({change_text(row)})" for row in mine[:_MAX_CLAIMS]]
            parts.append(f"{word} in {fmt.listing(texts)}")
    return "; ".join(parts) or "different, in nothing that is better or worse"


def _best_within(group: Compared, slo: SLO) -> str:
    """The arm with the most goodput, where that is a claim: more than the baseline's, beyond the noise."""
    share, goodput = SLO_METRICS
    better = [row for row in group.rows if row.metric is goodput and row.verdict == "higher" and row.value is not None]
    if not better:
        return ""
    best = max(better, key=lambda row: row.value or 0.0)
    arms = {arm.name: arm for arm in group.arms}
    told = [
        f"{goodput.write(mean_over_replicates(arm, goodput, slo))} "
        f"({share.write(mean_over_replicates(arm, share, slo))} of its requests)"
        for arm in (arms[best.arm], group.arms[0])
    ]
    where = f"At {group.load}, " if group.load else ""
    return f"{where}{best.arm} serves most within the SLO: {told[0]}, {group.arms[0].name} {told[1]}."


def trust(
    groups: Sequence[Compared], pairs: Sequence[Pair], errors: Mapping[str, pd.DataFrame], num_left_out: int = 0
) -> list[Trust]:
    """The lights: fidelity, prices, replicates, load, records. num_left_out: runs that failed or did not end."""
    arms = [arm for group in groups for arm in group.arms]
    runs = [run for arm in arms for run in arm.runs]
    lights = [_fidelity(arms, pairs, errors)]
    if any(run.manifest.get("backend") == "sim" for run in runs):
        lights.append(_prices(runs))
    lights.append(_replicates(groups, runs))
    lights.append(_load(groups))
    return [*lights, _records(arms, num_left_out)]


def _replicates(groups: Sequence[Compared], runs: Sequence[Run]) -> Trust:
    num = min((num_replicates(group.arms) for group in groups if group.arms), default=0)
    if num < 2:
        return Trust("replicates", "poor", "one replicate: nothing says how the result varies between traces")
    steps = [step for run in runs for step in run.flat_config.get("trace.transforms") or () if isinstance(step, dict)]
    given = grouped(steps, lambda step: step.get("name"))
    drawn = [name for name in _DRAWN if len(set(map(repr, given.get(name, ())))) > (name == "window")]
    stated = [name for run in runs for name in run.flat_config.get("report.replicates") or ()]
    how = fmt.listing([*drawn, *dict.fromkeys(f"other {name}" for name in stated)])
    return Trust("replicates", "good" if num >= _FEW else "fair", f"{num} replicates" + (f", by {how}" if how else ""))


def _ignoring(arms: Sequence[Arm]) -> str:
    """The arms that ignored requests, "" for none."""
    return fmt.listing(list(dict.fromkeys(arm.name for arm in arms if num_ignored(arm))))


def _load(groups: Sequence[Compared]) -> Trust:
    arms = [arm for group in groups for arm in group.arms]
    if beyond := _where_so(groups, is_outrun):
        return Trust("load", "fair", f"beyond the capacity of {beyond}")
    if any(run.summary.get("steadiness") is None for arm in arms for run in arm.runs):
        return Trust("load", "fair", "not judged: requests came all at once")
    if untold := _where_so(groups, lambda run: run.summary["steadiness"]["is_outrun"] is None):
        why = "the trace ends before it shows whether the engine keeps up"
        return Trust("load", "fair", f"not judged for {untold}: {why}")
    if ignored := _ignoring(arms):
        return Trust("load", "fair", f"{ignored} ignored requests: less was served than came")
    return Trust("load", "good", "every arm kept up with what came")


def _where_so(groups: Sequence[Compared], is_so: Callable[[Run], bool]) -> str:
    """The arms of which some run is so, at their loads; one name for all."""
    by_load: dict[str, str] = {}
    for group in groups:
        names = [arm.name for arm in group.arms if any(map(is_so, arm.runs))]
        if names:
            by_load[group.load] = "every arm" if len(names) == len(group.arms) > 1 else fmt.listing(names)
    by_name = grouped(by_load, lambda load: by_load[load])
    told = [f"{who}{f' at {fmt.listing(loads)}' if any(loads) else ''}" for who, loads in by_name.items()]
    is_all = list(by_name) == ["every arm"] and len(by_load) == len(groups) > 1
    return "every arm" if is_all else "; ".join(told)


def _records(arms: Sequence[Arm], num_left_out: int) -> Trust:
    runs = [run for arm in arms for run in arm.runs]
    failed = [text for run in runs for text in failures(run.summary["checks"])]
    if failed:
        return Trust("records", "poor", failed[0])
    known = [check["holds"] for run in runs for check in run.summary["checks"].values()]
    if not all(known):
        return Trust("records", "fair", "not all checks could be made; the setup says which")
    if num_left_out:
        return Trust("records", "fair", f"{num_left_out} of the runs failed or did not end, and say nothing here")
    if ignored := _ignoring(arms):
        return Trust("records", "fair", f"requests of {ignored} were ignored, and have no latency")
    return Trust("records", "good", "all checks hold")


_PRICES: dict[str, tuple[Level, str]] = {
    "calibrated": ("good", "fitted to a measured profile, and inside of it"),
    "recorded": ("good", "a real run's own"),
    "tables": ("fair", "looked up in tables of measured operators"),
    "roofline": ("fair", "from a data sheet"),
}


def _prices(runs: Sequence[Run]) -> Trust:
    notes = [note for run in runs for note in run.manifest.get("cost_notes") or []]
    if notes:
        return Trust("prices", "fair", notes[0])
    known = [_PRICES.get(str(run.manifest.get("cost")), ("poor", "made up: they show a mechanism")) for run in runs]
    worst = max(known, key=lambda one: ("good", "fair", "poor").index(one[0]))
    return Trust("prices", *worst)


def _fidelity(arms: Sequence[Arm], pairs: Sequence[Pair], errors: Mapping[str, pd.DataFrame]) -> Trust:
    runs = [run for arm in arms for run in arm.runs]
    if all(run.manifest.get("backend") != "sim" for run in runs):
        return Trust("fidelity", "good", "measured on a real engine, nothing is simulated")
    if not pairs:
        return Trust("fidelity", "poor", "simulated; how far from a real engine was not measured")
    found = worst_errors(errors.values())
    worst = {path: found[path] for path in _ERRORS if path in found}
    told = fmt.listing(
        [
            f"{metric_of(path).label} {fmt.significant(100 * found[path], 2)} %"
            for path in (*_ERRORS, "ttft_s.p99")
            if path in found
        ]
    )
    most = max(worst.values(), default=1.0)
    level: Level = "good" if most <= _NEAR else "fair" if most <= _FAR else "poor"
    models = {run.manifest.get("model") for run in runs} - {pair.real.manifest.get("model") for pair in pairs}
    devices = [str(run.manifest.get("device")) for run in runs]
    elsewhere = not all(any(_is_of(device, pair.real) for pair in pairs) for device in devices)
    if models or elsewhere:
        other = fmt.listing([name for name, is_other in (("model", models), ("device", elsewhere)) if is_other])
        return Trust("fidelity", "poor" if level == "poor" else "fair", f"of another {other}: errors up to {told}")
    return Trust("fidelity", level, f"measured on this model and device: errors up to {told}")


def _is_of(device: str, real: Run) -> bool:
    """Whether a real run was on a device of the library: `h100` on `NVIDIA H100 80GB HBM3`, `cpu` on a CPU."""
    said = re.sub(r"[^a-z0-9]", "", str(real.manifest.get("device")).lower())
    is_cpu = (real.manifest.get("machine") or {}).get("gpu") is None or "thread" in said
    return is_cpu if device == "cpu" else re.sub(r"[^a-z0-9]", "", device.lower()) in said
