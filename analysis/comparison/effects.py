"""Main effects of a factorial ablation: the effect of one factor, averaged over the levels of the others.

Within each replicate, arms that differ only in that factor are paired, and their log-ratios (differences for shares)
are averaged; the replicate stays the unit of the interval. If the effects in different cells differ by more than the
noise, the factors interact, which the average hides: see `Interaction`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from analysis.comparison.arms import Arm, alike, grouped, level_groups, paired_replicates, same_prices
from analysis.comparison.compare import Comparison, Metric, judge, noise_limit, paired_values
from analysis.comparison.sharing import common_share, correlation
from analysis.load import Run
from analysis.measures.slo import SLO
from analysis.measures.statistics import ALPHA, Estimate, Scale, differences, mean_t
from analysis.naming import level_names
from analysis.reading.rows import FloatArray
from testbed.errors import RunFolderError

_VICTIM = "scheduler.victim"


class Interaction(NamedTuple):
    """The effect in each cell, with Holm's verdicts over the cells; a cell's `arm` is the levels of the other factors.
    estimate: the difference between the largest and the smallest effect, paired by replicate. Its p-value and interval
    are corrected for the number of pairs of cells."""

    cells: tuple[Comparison, ...]
    estimate: Estimate


def _signed(cell: Comparison) -> float:
    assert cell.estimate is not None
    return cell.estimate.value


@dataclass(frozen=True, slots=True)
class Effect:
    """The change of one factor from the baseline's level to another, in one metric. pairs: for each cell the arms at
    both levels; arms that are `alike` appear as the first of them. interaction: None unless it is a claim."""

    factor: str
    base_level: Any
    level: Any
    comparison: Comparison  # its `arm` is the level's name
    pairs: tuple[tuple[str, str], ...]
    interaction: Interaction | None

    @property
    def is_alike(self) -> bool:
        """Whether the factor changed no decision in any cell."""
        return all(base == arm for base, arm in self.pairs)

    @property
    def ends(self) -> list[Comparison]:
        """The cells with the smallest and the largest effect, if there is an interaction."""
        return [end(self.interaction.cells, key=_signed) for end in (min, max)] if self.interaction else []

    @property
    def is_uneven(self) -> bool:
        """Whether the two `ends` have different claims, or different signs while the average is a claim."""
        is_turned = self.comparison.is_claim and len({_signed(end) > 0 for end in self.ends}) > 1
        return is_turned or len({end.claim for end in self.ends}) > 1


def main_effects(
    arms: Sequence[Arm], baseline: Arm, metrics: Sequence[Metric], margin: float = 0.02, slo: SLO | None = None
) -> list[Effect]:
    """The effects of every factor and every level except the baseline's, if at least two factors are fully crossed.
    Empty if not every combination of levels ran, as a factor's mean would then include effects of the others. A level
    that means different things in different cells has no effect (`meanings`)."""
    if not is_full_design(arms):
        return []
    steps, first = [*_steps(arms, baseline)], alike(arms)
    noise = {metric.label: noise_limit(arms, metric, slo) for metric in metrics}
    return _judge([_effect(step, of, slo, noise[of.label], first) for of in metrics for step in steps], margin)


def is_full_design(arms: Sequence[Arm]) -> bool:
    """Whether there are several factors, and an arm of every combination of their levels."""
    factors = level_groups(arms)
    num_combinations = prod(len({_level(arm, factor) for arm in arms}) for factor in factors)
    return len(factors) > 1 and len(arms) >= num_combinations


def meanings(arms: Iterable[Arm]) -> dict[str, str]:
    """Arm -> what `auto` as its victim stands for, which depends on its queue order; without arms of other victims."""
    auto = [arm for arm in arms if arm.levels.get(_VICTIM) == "auto"]
    return {arm.name: str(arm.runs[0].manifest.get("victim_of_auto")) for arm in auto}


def _means_one_thing(factor: Sequence[str], arms: Iterable[Arm]) -> bool:
    """Whether a factor's level is the same setting in all these arms, which have it: see `meanings`."""
    return _VICTIM not in factor or len(set(meanings(arms).values())) < 2


def _level(arm: Arm, factor: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(repr(arm.levels.get(key)) for key in factor)


class _Step(NamedTuple):
    """The change of a factor from the baseline's level to another. pairs: the arms at both levels, for each cell (a
    combination of levels of the other factors)."""

    factor: str
    others: Sequence[str]
    pairs: Sequence[tuple[Arm, Arm]]


def _steps(arms: Sequence[Arm], baseline: Arm) -> Iterator[_Step]:
    factors = level_groups(arms)
    for factor in factors:
        others = [other for other in factors if other != factor]
        by_level: dict[tuple[str, ...], dict[tuple[tuple[str, ...], ...], Arm]] = {}
        for arm in arms:
            by_level.setdefault(_level(arm, factor), {})[tuple(_level(arm, other) for other in others)] = arm
        at_base = by_level.pop(_level(baseline, factor))
        for at_level in by_level.values():
            pairs = [(arm, at_level[cell]) for cell, arm in at_base.items() if cell in at_level]
            if pairs and all(_means_one_thing(factor, at_one) for at_one in zip(*pairs, strict=True)):
                yield _Step(factor[0], [other[0] for other in others], pairs)


def _effect(step: _Step, metric: Metric, slo: SLO | None, noise: float | None, first: Mapping[str, str]) -> Effect:
    base_level, level = (arm.levels.get(step.factor) for arm in step.pairs[0])
    is_of_prices = not same_prices(*step.pairs[0])
    comparison = Comparison(str(level), metric, None, None, "unknown", noise=noise, is_of_prices=is_of_prices)
    interaction = None
    if (found := _cells(step.pairs, metric, slo)) is not None:
        *known, runs = found
        rows, scale = differences(*known, are_shares=metric.is_share)
        base, value = (float(side.mean()) for side in known)
        shared = correlation(common_share(runs))
        mean, *of_cells = (
            mean_t(row, scale, correlation=shared, limit=metric.limit) for row in (rows.mean(axis=0), *rows)
        )
        comparison = replace(comparison, value=value, base=base, estimate=mean)
        names = [level_names({key: arm.levels.get(key) for key in step.others}) for _, arm in step.pairs]
        apart = replace(comparison, noise=None)
        cells = [
            replace(apart, arm=name, value=float(theirs.mean()), base=float(ours.mean()), estimate=one)
            for name, one, ours, theirs in zip(names, of_cells, *known, strict=True)
        ]
        interaction = _interaction(rows, scale, cells, shared)
    pairs = tuple((first[one.name], first[other.name]) for one, other in step.pairs)
    return Effect(step.factor, base_level, level, comparison, pairs, interaction)


def _cells(
    cells: Sequence[tuple[Arm, Arm]], metric: Metric, slo: SLO | None
) -> tuple[FloatArray, FloatArray, list[Run]] | None:
    """The metric at both levels `[num_cells, num_replicates]`, a column for each trace that all cells have, and a run
    on each of these; None if a value is missing, or if the cells share less than two of several traces."""
    try:
        pairs = [{ours[0].fingerprint: (ours, theirs) for ours, theirs in paired_replicates(*cell)} for cell in cells]
    except RunFolderError:
        return None
    traces = [trace for trace in pairs[0] if all(trace in by_trace for by_trace in pairs)]
    if len(traces) < min(2, max(map(len, pairs))):
        return None
    values = [paired_values([by_trace[trace] for trace in traces], metric, slo) for by_trace in pairs]
    known = [each for each in values if each is not None]
    if len(known) < len(values):
        return None
    runs = [pairs[0][trace][0][0] for trace in traces]
    return np.array([base for base, _ in known]), np.array([other for _, other in known]), runs


def _interaction(rows: FloatArray, scale: Scale, cells: Sequence[Comparison], correlation: float) -> Interaction | None:
    """The interaction of effects `[num_cells, num_replicates]`; None for fewer than two cells or replicates, and for
    equal means. correlation: between the replicates."""
    num_cells, num_replicates = rows.shape
    if num_cells < 2 or num_replicates < 2:
        return None
    means, num_pairs = rows.mean(axis=1), num_cells * (num_cells - 1) // 2
    low, high = int(means.argmin()), int(means.argmax())
    if low == high:
        return None
    limit = 2 * cells[0].metric.limit
    estimate = mean_t(rows[high] - rows[low], scale, 1 - ALPHA / num_pairs, correlation, limit)
    if estimate.p_value is not None:
        estimate = replace(estimate, p_value=min(1.0, estimate.p_value * num_pairs))
    return Interaction(tuple(cells), estimate)


def _judge(effects: Sequence[Effect], margin: float) -> list[Effect]:
    """The effects with verdicts (see `judge`); interactions that are no claim are dropped."""
    pairs = [effect.pairs for effect in effects]
    judged = judge([effect.comparison for effect in effects], margin, pairs)
    asked = [(i, effect.interaction) for i, effect in enumerate(effects) if effect.interaction is not None]
    apart = judge([replace(judged[i], estimate=one.estimate) for i, one in asked], margin, [pairs[i] for i, _ in asked])
    claimed = {
        i: one._replace(cells=tuple(judge([replace(cell, noise=row.noise) for cell in one.cells], margin, pairs[i])))
        for (i, one), row in zip(asked, apart, strict=True)
        if row.is_claim
    }
    return [
        replace(effect, comparison=row, interaction=claimed.get(i))
        for i, (effect, row) in enumerate(zip(effects, judged, strict=True))
    ]


def by_factor(effects: Sequence[Effect]) -> Mapping[tuple[str, str, str], list[Effect]]:
    """(factor, base level, level) -> its effects over metrics."""
    return grouped(effects, lambda effect: (effect.factor, repr(effect.base_level), repr(effect.level)))


class Compared(NamedTuple):
    """The comparisons at one load; the first arm is the baseline. classes: class of requests -> its comparisons."""

    load: str
    arms: Sequence[Arm]
    rows: Sequence[Comparison]
    effects: Sequence[Effect]  # main effects, of a replicated full design
    classes: Mapping[str, Sequence[Comparison]] = MappingProxyType({})
