"""Sentences from numbers: each says a difference with its interval and how it was got, and nothing beyond that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from analysis import format as fmt
from analysis.arms import Arm, Pair, replicates
from analysis.checks import failures
from analysis.compare import Comparison, metric_of
from analysis.effects import Effect
from analysis.fidelity import worst_errors
from analysis.load import Run
from analysis.naming import factor_name
from analysis.statistics import ALIKE


def failed_checks(links: Mapping[str, str], runs: Sequence[Run]) -> list[str]:
    """A sentence on each check that a run's records fail: what else is said rests on them. links: by path."""
    said = {f"{links[str(run.path)]}: {sentence}": None for run in runs for sentence in failures(run.summary["checks"])}
    return list(said)


def change_text(comparison: Comparison) -> str:
    """The change in percent, "−23 %", to and from 0 as "from 3.1 req/s to 0 req/s"; "" where there is none."""
    estimate, write = comparison.estimate, comparison.metric.write
    if estimate is None:
        return ""
    if comparison.verdict == "identical":
        return f"0{fmt.SPACE}%"
    if estimate.scale == "difference":
        base = comparison.base or 0.0
        return f"from {write(base)} to {write(base + estimate.value)}"
    return fmt.change(estimate.percent()[0])


def bounds_text(comparison: Comparison) -> str:
    """Its 95 % interval: "[−28, −18]" in percent, of a difference in its unit; "" without one."""
    estimate, write = comparison.estimate, comparison.metric.write
    if estimate is None or comparison.verdict in ("identical", "unknown"):
        return ""
    if estimate.scale == "difference":
        return f"by [{write(estimate.low)}, {write(estimate.high)}]"
    ends = [fmt.change(end).removesuffix(f"{fmt.SPACE}%") for end in estimate.percent()[1:]]
    return f"[{ends[0]},{fmt.SPACE}{ends[1]}]"


def interval_text(comparison: Comparison) -> str:
    """Both: "−23 % [−28, −18]"; "" for neither."""
    return " ".join(text for text in (change_text(comparison), bounds_text(comparison)) if text)


def verdict_text(comparison: Comparison, margin: float) -> str:
    """The verdict in words for a table cell."""
    estimate, p_holm = comparison.estimate, comparison.p_holm
    words = {
        "identical": "identical",
        "equivalent": f"equivalent (±{margin * 100:g}{fmt.SPACE}%)",
        "inside the noise": "inside the noise",
        "unknown": "not comparable" if estimate is None else "no interval",
    }
    if comparison.verdict == "unknown" and estimate is not None and estimate.method == ALIKE:
        return f"the same in all {estimate.num} replicates"
    is_beside_zero = estimate is not None and not estimate.low <= 0.0 <= estimate.high
    if comparison.verdict == "inside the noise" and is_beside_zero and p_holm is not None:
        return f"inside the noise (Holm p = {p_holm:.2g})"  # its own interval does not say so
    if comparison.verdict in words:
        return words[comparison.verdict]
    good = comparison.metric.better * (1 if comparison.verdict == "higher" else -1)
    return {1: "better", -1: "worse"}.get(good, comparison.verdict)


def arm_finding(rows: Sequence[Comparison], opening: str, margin: float) -> str:
    """A few sentences on one arm: what is better, worse, inside the noise, and what could not be compared.

    `opening` says against what: "Against <baseline>".
    """
    return _sentences(f"{opening}, {rows[0].arm}", rows, margin)


def effect_finding(effects: Sequence[Effect], margin: float) -> str:
    """A few sentences on one factor's step, averaged over the other factors; and where its size depends on these."""
    first = effects[0]
    name = f"{factor_name(first.factor)} {fmt.plain(first.level)} instead of {fmt.plain(first.base_level)}"
    text = _sentences(f"On average over the other factors, {name}", [effect.comparison for effect in effects], margin)
    uneven = [_interaction_text(effect) for effect in effects if effect.interaction is not None]
    return text + (f" It depends on the other factors: {'; '.join(uneven)}." if uneven else "")


def _interaction_text(effect: Effect) -> str:
    assert effect.interaction is not None
    comparison, (cells, least, most, apart) = effect.comparison, effect.interaction
    if apart.scale == "difference":
        told = [comparison.metric.write(value) for value in (least, most)]
        by = bounds_text(replace(comparison, estimate=apart, verdict="higher")).removeprefix("by ")
    else:
        told = [fmt.change(100.0 * math.expm1(value)) for value in (least, most)]
        by = interval_text(replace(comparison, estimate=apart, verdict="higher"))
    return f"{comparison.metric.label} by {told[0]} with {cells[0]} and by {told[1]} with {cells[1]} (apart by {by})"


def best_arms(rows: Sequence[Comparison], baseline: str) -> list[str]:
    """For each metric the arm whose claimed improvement is largest; silence where no arm is better beyond the noise."""
    by_arm: dict[str, list[str]] = {}
    for metric in dict.fromkeys(row.metric for row in rows):
        better = [row for row in rows if row.metric is metric and row.is_claim and row.gain > 0]
        if better:
            best = max(better, key=lambda row: row.gain)
            by_arm.setdefault(best.arm, []).append(f"{metric.label} ({interval_text(best)})")
    return [
        f"The largest improvement on {baseline} in {fmt.listing(texts)} is that of {arm}."
        for arm, texts in by_arm.items()
    ]


def _sentences(subject: str, rows: Sequence[Comparison], margin: float) -> str:
    groups: dict[str, list[str]] = {}
    for row in rows:
        said = row.verdict if row.verdict in _CLOSINGS else verdict_text(row, margin)
        is_alike = row.verdict == "unknown" and row.estimate is not None and row.estimate.method == ALIKE
        key = "same" if row.verdict in ("identical", "equivalent") else "alike" if is_alike else said
        told = f"{change_text(row)}: {said}" if is_alike else interval_text(row)
        text = f"{row.metric.label} ({told})" if row.estimate is not None and key != "same" else row.metric.label
        groups.setdefault(key, []).append(text)
    parts = [f"{word} in {fmt.listing(groups[word])}" for word in _CLAIMS if word in groups]
    if parts:
        sentences = [f"{subject} is {'; '.join(parts)}."]
    elif "inside the noise" in groups or "same" in groups:
        sentences = [f"{subject} shows no difference beyond the noise."]
    else:
        sentences = [f"{subject}:"]
    return " ".join([*sentences, *[form(groups[key], margin) for key, form in _CLOSINGS.items() if key in groups]])


_CLAIMS = ("better", "worse", "higher", "lower")
_CLOSINGS: dict[str, Callable[[list[str], float], str]] = {
    "inside the noise": lambda texts, _: f"Inside the noise: {fmt.listing(texts)}.",
    "same": lambda texts, margin: f"No difference within ±{margin * 100:g} %: {fmt.listing(texts)}.",
    "alike": lambda texts, _: (
        "No claim is made of what differed equally in so few replicates that chance may do it (up to 5): "
        f"{fmt.listing(texts)}."
    ),
    "no interval": lambda texts, _: f"Observed without an interval, so no claim is made: {fmt.listing(texts)}.",
    "not comparable": lambda texts, _: (
        f"Not comparable (zero, not reached, not recorded, or of an arm that ignored requests): {fmt.listing(texts)}."
    ),
}


def interval_method(rows: Sequence[Comparison], num_replicates: int) -> str:
    """How the intervals were got, and over what they generalise."""
    methods = {row.estimate.method.split(" of ")[0] for row in rows if row.estimate is not None}
    if num_replicates >= 2:
        return (
            f"Changes are relative: means of log-ratios over {num_replicates} replicates, paired on the same "
            "trace, with 95 % Student intervals; where a value is 0, differences instead. A change counts when its "
            "p-value, corrected by Holm over the arms of a metric at one load, is below 0.05 (so does how much a "
            "factor's effect depends on the others); the intervals are those of single comparisons. Holm's correction "
            "raises the p-values so that among all arms of a metric even one false claim has a chance below 5 %; over "
            "many metrics and loads a few false claims are to be expected. d is Cohen's d_z, with Hedges' correction: "
            "the mean paired difference over its standard deviation."
        )
    if "moving blocks" in methods:
        return (
            "There is one replicate. Changes are relative; their 95 % intervals are of a moving-block bootstrap over "
            "the requests of that one trace: they cover the variation within it, not that between traces or seeds, and "
            "are not corrected for the number of comparisons. Rates of a single run, and tails beyond which fewer than "
            "five requests lie, have no interval."
        )
    return "There is one replicate and too few requests for an interval: the changes are observations, not estimates."


_TOO_NOISY = 0.3  # two equal real runs this far apart, in more than a tail: what they say of a simulator is little
_ERRORS_TOLD = ("ttft_s.p50", "ttft_s.p99", "tpot_s.mean", "e2e_s.p50", "throughput.output_tokens_per_s")


def too_noisy(noise: Mapping[str, float]) -> list[str]:
    """A warning, one sentence: what real runs say rests on them. noise: of each metric, as `fidelity.real_noise`."""
    largest, path = _largest(noise)
    if largest <= _TOO_NOISY:
        return []
    return [
        "The machine was too noisy for a comparison with the real engine: two equal real runs differed by up to "
        f"{fmt.significant(100 * largest, 2)} % in {metric_of(path).label}. Run it again when the machine is idle; "
        "on a CPU backend.pace=probe_scaled helps."
    ]


def probe_of(manifest: Mapping[str, Any]) -> int | None:
    """What a real run's times are scaled to, ns of a probe; None: they are as they were measured."""
    found: int | None = ((manifest.get("replay") or {}).get("probe") or {}).get("probe_ns")
    return found


def unlike_clocks(probes: Iterable[int | None]) -> tuple[str, ...]:
    """A warning, one sentence, where times that are compared are not of one clock. probes: as `probe_of`."""
    found = sorted(set(probes), key=lambda probe: probe or 0)
    if len(found) < 2:
        return ()
    plain = "as they were measured"
    said = [plain if probe is None else f"scaled to a probe of {fmt.seconds(probe / 1e9)}" for probe in found]
    return (
        f"Times that are compared here are {fmt.listing(said)}: errors are off by as much. Give every run, and "
        "`testbed calibrate`, the same backend.pace and backend.probe_ns.",
    )


def _largest(noise: Mapping[str, float]) -> tuple[float, str]:
    """Of the metrics that are told, those aside that hang on a few requests; and which it is."""
    return max(((noise[path], path) for path in _ERRORS_TOLD if path in noise and "p99" not in path), default=(0.0, ""))


def winners(rankings: Mapping[str, pd.DataFrame]) -> list[str]:
    """Whether the simulator picks the real engine's best policy, a sentence for each load. rankings: by load, as
    `fidelity.ranking_agreement` makes them."""
    said = []
    for load, ranking in rankings.items():
        told = ranking[ranking["winner_is_clear"]]
        where = f"At {load}" if load else "On this trace"
        if told.empty:
            said.append(f"{where} the real engine tells no policy apart as the best in any metric: no pick is checked.")
            continue
        missed = [
            f"{metric_of(str(row['metric'])).label} "
            f"({row['sim_winner']}, on the engine {_share(row['regret'])} behind {row['real_winner']})"
            for row in told[~told["same_winner"].astype(bool)].to_dict("records")
        ]
        said.append(
            f"{where} the simulator picks the real engine's best policy in {len(told) - len(missed)} of the "
            f"{len(told)} metrics in which the engine tells it apart from the second best"
            + (f"; not in {fmt.listing(missed)}." if missed else ".")
        )
    return said


def _share(value: float | None) -> str:
    return "somewhat" if value is None or math.isnan(value) else f"{fmt.significant(100 * value, 2)} %"


def fidelity_findings(
    pairs: Sequence[Pair],
    tables: Mapping[str, pd.DataFrame],
    rankings: Mapping[str, pd.DataFrame],
    margin: float,
    noise: Mapping[str, float],
) -> list[str]:
    """What the pairs show: whether the best policy is the engine's, the error of each latency and rate, the machine's
    own noise, the order of the policies. rankings: by load."""
    said = winners(rankings)
    known = [path for path in _ERRORS_TOLD if path in noise]
    for pair in pairs:
        errors = tables[pair.label].set_index("metric")["error"].dropna()
        shown = [
            f"{metric_of(path).label} {fmt.change(100 * errors[path])}" for path in _ERRORS_TOLD if path in errors.index
        ]
        if shown:
            said.append(f"{pair.label}: the simulator's signed error is {fmt.listing(shown)}.")
    if known:
        told = fmt.listing([f"{metric_of(path).label} ±{fmt.significant(100 * noise[path], 2)} %" for path in known])
        reach = "" if _largest(noise)[0] > _TOO_NOISY else ": a smaller error cannot be told from that"
        said.append(f"The real engine itself, run again on one trace under one policy, differed by {told}{reach}.")
    for load, ranking in rankings.items():
        told_apart, same = int(ranking["num_told_apart"].sum()), int(ranking["num_same_order"].sum())
        limit = f"{margin * 100:g} %" + (" and by more than its own noise" if noise else "")
        order = f"; the simulator orders {same} of these alike" if told_apart else ", so their order is not checked"
        said.append(
            f"Over all metrics{f' at {load}' if load else ''} the real engine tells {told_apart or 'no'} pairs of "
            f"policies apart by more than {limit}{order}."
        )
    return said


def smaller_than_error(rows: Sequence[Comparison], tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """A warning, one sentence: claimed changes that are smaller than the simulator's measured error of their metric."""
    worst = {path: 100 * error for path, error in worst_errors(tables.values()).items()}
    claimed: dict[str, int] = {}
    smaller: dict[str, int] = {}
    labels = {row.metric.path: row.metric.label for row in rows}
    for row in rows:
        path = row.metric.path
        if row.is_claim and row.estimate is not None and path in worst:
            claimed[path] = claimed.get(path, 0) + 1
            if row.estimate.scale == "log_ratio" and abs(row.estimate.percent()[0]) < worst[path]:
                smaller[path] = smaller.get(path, 0) + 1
    if not smaller:
        return []
    counted = [
        f"{num} of {claimed[path]} in {labels[path]} (error up to {fmt.significant(worst[path], 2)} %)"
        for path, num in smaller.items()
    ]
    return [
        "Changes that are smaller than the simulator's largest measured error in their metric, to be confirmed on the "
        f"real engine before they are relied on: {fmt.listing(counted)}. Errors that all arms share cancel in a "
        "change, so this is a caution and not a verdict."
    ]


def not_measured(arms: Sequence[Arm], pairs: Sequence[Pair]) -> list[str]:
    """What the fidelity numbers do not cover, plainly."""
    runs = [run for arm in arms for run in arm.runs if run.manifest.get("backend") == "sim"]
    if not runs:
        return []
    if not pairs:
        return ["No real run was given. How far the simulated numbers are from a real engine was not measured."]
    said = []
    for key, word in (("device", "device"), ("model", "model")):
        simulated = {str(run.manifest.get(key)) for run in runs}
        measured = {str(pair.real.manifest.get(key)) for pair in pairs}
        if simulated - measured:
            said.append(
                f"The ablation simulates the {word} {fmt.listing(sorted(simulated - measured))}; the real runs used "
                f"{fmt.listing(sorted(measured))}. The error on the former was not measured."
            )
    traces = {run.fingerprint for run in runs}
    if not traces & {pair.real.fingerprint for pair in pairs}:
        said.append(
            "The real runs used another trace than the ablation; the errors on its own trace were not measured."
        )
    if len(pairs) < len(arms):
        said.append(f"{len(pairs)} of the policies ran on the real engine; the errors of the others were not measured.")
    return said


def limits(arms: Sequence[Arm], slo_given: bool) -> list[str]:
    """What a reader must know before using the numbers."""
    said = []
    counts = sorted({len(replicates(arm)) for arm in arms})
    if counts and counts[0] == 1:
        said.append("At least one arm has a single replicate: nothing here says how the result varies between traces.")
        if any(len(replicates(arm)) < len(arm.runs) for arm in arms):
            said.append("Of a recorded trace a seed makes no replicate; docs/traces.md says what does.")
    elif counts and counts[0] < 5:
        said.append(f"There are only {counts[0]} replicates: intervals over so few are wide and lean on normality.")
    unfinished = sum(run.summary.get("num_unfinished", 0) for arm in arms for run in arm.runs)
    if unfinished:
        said.append(
            f"{fmt.number(unfinished)} requests were unfinished when their run ended. They are censored, not dropped: "
            "quantiles are Kaplan–Meier's, a mean over them cannot be known, and each has failed its SLO."
        )
    unsent = sum(run.summary.get("num_unsent") or 0 for arm in arms for run in arm.runs)
    if unsent:
        said.append(
            f"{fmt.number(unsent)} requests of the traces were never sent: their session's earlier turn was ignored or "
            "aborted, or their run was cut off."
        )
    if not slo_given:
        said.append("No SLO was given, so there is no goodput.")
    if any(run.manifest.get("backend") == "sim" for arm in arms for run in arm.runs):
        said.append("Simulated numbers are a cost model's predictions; see above for what was measured of its error.")
    return said
