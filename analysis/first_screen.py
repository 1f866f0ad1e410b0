"""What a report's first screen says: the answer in a few sentences, by the size of effects, and how far to trust it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import pandas as pd

from analysis import format as fmt
from analysis.arms import Arm, Pair, factor_name, paired_replicates
from analysis.cautions import is_outrun
from analysis.checks import failures
from analysis.compare import SLO_METRICS, Comparison, mean_over_replicates
from analysis.effects import Effect, by_factor
from analysis.findings import metric_name
from analysis.load import Run
from analysis.metrics import SLO

MAX_SENTENCES = 5
_MAX_CLAIMS = 2  # of each kind in a sentence
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


def answer(groups: Sequence[Compared], slo: SLO | None, margin: float) -> list[str]:
    """At most MAX_SENTENCES: who serves most within the SLO, then claimed changes by their size, the largest first."""
    ranked: list[tuple[float, str]] = []
    num_quiet = 0
    for group in groups:
        at_load = f"At {group.load}, " if group.load else ""
        for subject, rows in _subjects(group):
            claims = [row for row in rows if row.verdict in ("higher", "lower") and row.estimate is not None]
            if not claims:
                num_quiet += 1
                continue
            size = max(abs(row.estimate.value) for row in claims if row.estimate is not None)
            ranked.append((size, f"{at_load}{subject}: {_told(claims)}."))
    ranked.sort(key=lambda item: -item[0])
    best = [] if slo is None else [text for group in groups if (text := _best_within(group, slo, margin))]
    said = [*best[: MAX_SENTENCES - 2], *(text for _, text in ranked)]
    if not said and num_quiet:
        return ["Nothing that was compared differs beyond the noise."]
    if len(said) > MAX_SENTENCES:
        left = len(said) - MAX_SENTENCES + 1
        said = [*said[: MAX_SENTENCES - 1], f"{left} more differences are below, under “All findings”."]
    elif num_quiet and len(said) < MAX_SENTENCES:
        said.append(
            f"{num_quiet} more comparison{'s show' if num_quiet > 1 else ' shows'} no difference beyond the noise."
        )
    return said


def _subjects(group: Compared) -> list[tuple[str, list[Comparison]]]:
    if group.effects:
        return [
            (
                f"{factor_name(first.factor)} {fmt.plain(first.level)} instead of {fmt.plain(first.base_level)}",
                [effect.comparison for effect in effects],
            )
            for effects in by_factor(group.effects).values()
            for first in effects[:1]
        ]
    by_arm: dict[str, list[Comparison]] = {}
    for row in group.rows:
        by_arm.setdefault(f"{row.arm} against {group.arms[0].name}", []).append(row)
    return list(by_arm.items())


def _told(claims: Sequence[Comparison]) -> str:
    """The largest improvements and the largest losses."""
    parts = []
    for word, sign in (("better", 1), ("worse", -1)):
        mine = [row for row in claims if row.estimate is not None and row.estimate.value * row.metric.better * sign > 0]
        mine.sort(key=lambda row: -abs(row.estimate.value) if row.estimate is not None else 0.0)
        texts = [
            f"{row.metric.label} ({fmt.change(row.estimate.percent()[0])})"
            for row in mine[:_MAX_CLAIMS]
            if row.estimate is not None
        ]
        if texts:
            parts.append(f"{word} in {fmt.listing(texts)}")
    return "; ".join(parts) or "different, in nothing that is better or worse"


def _best_within(group: Compared, slo: SLO, margin: float) -> str:
    """The arm with the highest goodput, and the baseline's; the baseline where none has more, beyond the margin."""
    share, goodput = SLO_METRICS
    known = {
        arm.name: (mean_over_replicates(arm, goodput, slo), mean_over_replicates(arm, share, slo)) for arm in group.arms
    }
    served = {name: (rate, kept) for name, (rate, kept) in known.items() if rate is not None and kept is not None}
    base = group.arms[0].name
    if len(served) < 2 or base not in served:
        return ""
    best = max(served, key=lambda name: served[name][0])
    rate, kept = served[best]
    if rate <= served[base][0] * (1.0 + margin):
        best, (rate, kept) = base, served[base]
    where = f"At {group.load}, " if group.load else ""
    told = f"{goodput.write(rate)} ({share.write(kept)} of its requests)"
    if best == base:
        return f"{where}no arm serves more within the SLO than {base}: {told}."
    before = f"{base} {goodput.write(served[base][0])} ({share.write(served[base][1])})"
    return f"{where}{best} serves most within the SLO: {told}, {before}."


def trust(groups: Sequence[Compared], pairs: Sequence[Pair], errors: Mapping[str, pd.DataFrame]) -> list[Trust]:
    """The lights: fidelity, prices, replicates, load, records."""
    arms = [arm for group in groups for arm in group.arms]
    runs = [run for arm in arms for run in arm.runs]
    lights = [_fidelity(arms, pairs, errors)]
    if any(run.manifest.get("backend") == "sim" for run in runs):
        lights.append(_prices(runs))
    num = min((len(paired_replicates(group.arms[0], arm)) for group in groups for arm in group.arms), default=0)
    level: Level = "good" if num >= _FEW else "fair" if num > 1 else "poor"
    many = f"{num} replicates" if num > 1 else "one replicate: nothing says how the result varies between traces"
    lights.append(Trust("replicates", level, many))
    beyond = sorted({arm.name for arm in arms if any(is_outrun(run) for run in arm.runs)})
    why = f"beyond the capacity of {fmt.listing(beyond)}" if beyond else "every arm kept up with what came"
    lights.append(Trust("load", "fair" if beyond else "good", why))
    failed = [text for run in runs for text in failures(run.summary["checks"])]
    return [*lights, Trust("records", "poor" if failed else "good", failed[0] if failed else "all checks hold")]


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
    where = {(run.manifest.get("model"), run.manifest.get("device")) for run in runs}
    measured = {(pair.real.manifest.get("model"), pair.sim.manifest.get("device")) for pair in pairs}
    worst: dict[str, float] = {}
    for table in errors.values():
        found = table.set_index("metric")["error"].dropna()
        for path in _ERRORS:
            if path in found.index:
                worst[path] = max(worst.get(path, 0.0), abs(float(found[path])))
    told = fmt.listing([f"{metric_name(path)} {fmt.significant(100 * value, 2)} %" for path, value in worst.items()])
    if not where <= measured:
        return Trust("fidelity", "fair", f"measured with another model or device: errors up to {told}")
    most = max(worst.values(), default=1.0)
    level: Level = "good" if most <= _NEAR else "fair" if most <= _FAR else "poor"
    return Trust("fidelity", level, f"measured on this model and device: errors up to {told}")
