"""Sentences from numbers: each states a difference with its interval and method, and nothing beyond that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from analysis import format as fmt
from analysis.comparison.arms import Arm, num_replicates
from analysis.comparison.compare import Comparison
from analysis.comparison.effects import Effect
from analysis.comparison.wording import (
    bounds_text,
    cells_text,
    change_text,
    correction_text,
    difference_text,
    interval_text,
    no_more_than,
    step_text,
    verdict_text,
)
from analysis.load import Run
from analysis.measures.checks import failures
from analysis.measures.metrics import SLO


def failed_checks(links: Mapping[str, str], runs: Sequence[Run]) -> Iterable[str]:
    """A sentence on each check that the records of a run fail; all other results depend on these. links: by path."""
    said = (f"{links[str(run.path)]}: {text}" for run in runs for text in failures(run.summary["checks"]))
    return dict.fromkeys(said)


def effect_finding(effects: Sequence[Effect], margin: float) -> str:
    """A few sentences on the change of one factor: its effect by cells in metrics where cells disagree, its average
    effect in the other metrics, and the metrics in which the size depends on other factors."""
    first, turned = effects[0], [effect for effect in effects if effect.is_uneven]
    name = step_text(first)
    said = [f"{name}: {'; '.join([cells_text(effect, interval_text) for effect in turned])}."] if turned else []
    even = [effect for effect in effects if effect not in turned]
    if even:
        average = "on average over the other factors"
        subject = f"In other metrics, {average}, it" if turned else f"{average.capitalize()}, {name}"
        said.append(finding(subject, [effect.comparison for effect in even], margin))
    uneven = [_interaction_text(effect) for effect in even if effect.interaction is not None]
    return " ".join([*said, *([f"Its size depends on the other factors: {'; '.join(uneven)}."] if uneven else [])])


def _interaction_text(effect: Effect) -> str:
    assert effect.interaction is not None
    comparison, apart = effect.comparison, effect.interaction.estimate
    ends = effect.interaction.least, effect.interaction.most
    sizes = [end.estimate.value for end in ends if end.estimate is not None]
    claimed = replace(comparison, estimate=apart, verdict="higher")
    if apart.scale == "difference":
        told = [difference_text(comparison.metric, size) for size in sizes]
    else:
        told = fmt.changes([100.0 * math.expm1(size) for size in sizes])
    is_in_unit = apart.scale == "difference" and not comparison.metric.is_share
    by = bounds_text(claimed).removeprefix("by ") if is_in_unit else interval_text(claimed)
    where = [f"by {size} with {end.arm}" for size, end in zip(told, ends, strict=True)]
    return f"{comparison.metric.label} {' and '.join(where)} (apart by {by})"


def best_arms(rows: Sequence[Comparison], baseline: str) -> list[str]:
    """Sentences that name, for each metric, the arms with the largest claimed improvement, if there is any."""
    by_arms: dict[tuple[str, ...], list[str]] = {}
    for metric in dict.fromkeys(row.metric for row in rows):
        better = [row for row in rows if row.metric is metric and row.is_claim and row.gain > 0]
        best = [row for row in better if row.gain == max(row.gain for row in better)]
        if best:
            names = tuple(row.arm for row in best)
            by_arms.setdefault(names, []).append(f"{metric.label} ({interval_text(best[0])})")
    return [
        f"Of the claimed improvements on {fmt.names([baseline])}, the largest in {fmt.listing(texts)} is that of "
        f"{fmt.names(names)}."
        for names, texts in by_arms.items()
    ]


def finding(subject: str, rows: Sequence[Comparison], margin: float) -> str:
    """A few sentences on an arm or a factor: the metrics that are better, worse, inside the noise or not comparable."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        said = row.verdict if row.verdict in _CLOSINGS else verdict_text(row, margin)
        key = "alike" if row.is_alike else said
        told = ", ".join(filter(None, (interval_text(row), correction_text(row))))
        told = f"{change_text(row)}: {said}" if row.is_alike else told
        is_told = row.estimate is not None and key not in ("identical", "equivalent")
        text = f"{row.metric.label} ({told})" if is_told else row.metric.label
        groups.setdefault(key, []).append(text)
    parts = [f"{word} in {fmt.listing(groups[word])}" for word in CLAIMS if word in groups]
    if parts:
        sentences = [f"{subject} is {'; '.join(parts)}."]
    elif {"inside the noise", "inside the engine's noise", "undecided", "equivalent"} & set(groups):
        sentences = [f"{subject} shows no difference beyond {no_more_than(groups, margin)}."]
    elif set(groups) == {"identical"}:
        sentences = [f"{subject} shows no difference."]
    else:
        sentences = [f"{subject}:"]
    return " ".join([*sentences, *[form(groups[key], margin) for key, form in _CLOSINGS.items() if key in groups]])


CLAIMS = ("better", "worse", "longer", "shorter", "higher", "lower")
_CLOSINGS: dict[str, Callable[[list[str], float], str]] = {
    "inside the noise": lambda texts, _: f"Inside the noise: {fmt.listing(texts)}.",
    "inside the engine's noise": lambda texts, _: (
        f"Inside the engine's own noise, as far as its repeats show it: {fmt.listing(texts)}."
    ),
    "undecided": lambda texts, _: f"Undecided, more replicates would tell: {fmt.listing(texts)}.",
    "identical": lambda texts, _: f"Identical: {fmt.listing(texts)}.",
    "equivalent": lambda texts, margin: f"No difference within ±{margin * 100:g} %: {fmt.listing(texts)}.",
    "alike": lambda texts, _: (
        f"No claim is made of what differed equally in so few replicates that chance may do it: {fmt.listing(texts)}."
    ),
    "no interval": lambda texts, _: f"Observed without an interval, so no claim is made: {fmt.listing(texts)}.",
    "not comparable": lambda texts, _: (
        "Not comparable (zero, not reached, not recorded, of other traces, or of an arm that ignored requests): "
        f"{fmt.listing(texts)}."
    ),
}


def interval_method(rows: Sequence[Comparison], num_replicates: int, single: list[str]) -> str:
    """A text on how the intervals were computed, and to what they generalise. single: the arms with one replicate, if
    others have several."""
    methods = {row.estimate.method.split(" of ")[0] for row in rows if row.estimate is not None}
    if num_replicates >= 2 or single:
        over = f"{num_replicates} replicates" if num_replicates >= 2 else "an arm's replicates"
        one = f" Of {fmt.names(single)} there is one replicate: {_ONE_TRACE}" if single else ""
        return (
            f"Changes are relative: means of log-ratios over {over}, paired on the same "
            "trace, with 95 % Student intervals; of shares, and where a value is 0, they are differences. A change "
            "counts when its p-value, corrected over arms or factors (Holm) and metrics (Benjamini and Hochberg) at "
            "one load, is below 0.05 (so does how much a factor's effect depends on the others, and, by Holm, its "
            "effect in single cells); arms that took the same decisions at every step are one comparison; the "
            "intervals are those of single comparisons. So an arm that is equal to the baseline is claimed to differ, "
            "in any metric, with a chance below 5 %, and of the claims on an arm that differs 5 % at most are "
            "expected to be false; over many loads a few false claims are to be expected. d is Cohen's d_z, with "
            f"Hedges' correction: the mean paired difference over its standard deviation.{one}"
        )
    if "circular blocks" in methods:
        return f"There is one replicate. Changes are relative; {_ONE_TRACE}"
    return "There is one replicate and too few requests for an interval: the changes are observations, not estimates."


_ONE_TRACE = (
    "their 95 % intervals are of a circular-block bootstrap over the requests of that one trace: they cover the "
    "variation within it, not that between traces or seeds, and are not corrected for the number of comparisons. Rates "
    "of a single run, and tails beyond which fewer than five requests lie, have no interval."
)


def limits(compared: Iterable[Sequence[Arm]], arms: Sequence[Arm], slo: SLO | None) -> Iterator[str]:
    """Sentences on limits of the numbers, in addition to the trust indicators and the cautions. compared: the arms of
    each load."""
    least = min(map(num_replicates, compared), default=0)
    if 1 < least < 5:
        yield (
            f"There are only {least} replicates: intervals over so few are wide and lean on normality. What happens in "
            f"one trace of ten, such as an overload, is in none of them with a chance of {fmt.percent(0.9**least)}; "
            "neither an interval nor a statement of no difference holds it then."
        )
    unfinished = sum(run.summary.get("num_unfinished", 0) for arm in arms for run in arm.runs)
    if unfinished:
        yield (
            f"{fmt.number(unfinished)} requests were unfinished when their run ended. They are censored, not dropped: "
            "quantiles are Kaplan–Meier's, a mean over them cannot be known, and each has failed its SLO."
        )
    unsent = sum(run.summary.get("num_unsent") or 0 for arm in arms for run in arm.runs)
    if unsent:
        yield (
            f"{fmt.number(unsent)} requests of the traces were never sent: their session's earlier turn was ignored or "
            "aborted, or their run was cut off."
        )
    if slo is None:
        yield "No SLO was given, so there is no goodput."
    elif slo.lateness_s is not None:
        runs = [run for arm in arms for run in arm.runs]
        if num := sum(run.summary["deadlines"] is None for run in runs):
            yield (
                f"{fmt.number(num)} of {fmt.number(len(runs))} runs recorded no deadline: "
                "the limit on lateness binds no request of theirs."
            )
