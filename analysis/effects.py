"""Main effects of a factorial ablation: what one factor does, averaged over the levels of the others.

Within each replicate, arms that differ in that one factor only are paired, and their log-ratios averaged; the replicate
stays the unit of the interval. An effect that differs much between the other factors' levels is an interaction:
`spread` shows the smallest and the largest of its cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from analysis.arms import Arm, level_groups, paired_replicates
from analysis.compare import Comparison, Metric
from analysis.metrics import SLO
from analysis.statistics import Estimate, holm, paired_t, verdict
from testbed.errors import RunFolderError


@dataclass(frozen=True, slots=True)
class Effect:
    """One factor's step from the baseline's level to another, in one metric. `spread`: log-ratios of single cells."""

    factor: str
    base_level: Any
    level: Any
    comparison: Comparison  # its `arm` is the level's name
    num_cells: int
    spread: tuple[float, float] | None


def main_effects(
    arms: Sequence[Arm], baseline: Arm, metrics: Sequence[Metric], margin: float = 0.02, slo: SLO | None = None
) -> list[Effect]:
    """Every factor of a design with at least two crossed factors, every level but the baseline's; else nothing: where
    not every combination of levels ran, a factor's mean would mix in the others."""
    factors = level_groups(arms)
    num_combinations = prod(len({_level(arm, factor) for arm in arms}) for factor in factors)
    if len(factors) < 2 or len(arms) < num_combinations:
        return []
    found: list[Effect] = []
    for metric in metrics:
        rows = []
        for factor in factors:
            levels = list(dict.fromkeys(_level(arm, factor) for arm in arms))
            steps = [level for level in levels if level != _level(baseline, factor)]
            rows += [_effect(arms, baseline, factors, factor, level, metric, slo) for level in steps]
        found += _judge([row for row in rows if row is not None], margin)
    return found


def _level(arm: Arm, factor: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(repr(arm.levels.get(key)) for key in factor)


def _effect(
    arms: Sequence[Arm],
    baseline: Arm,
    factors: Sequence[tuple[str, ...]],
    factor: tuple[str, ...],
    level: tuple[str, ...],
    metric: Metric,
    slo: SLO | None,
) -> Effect | None:
    others = [other for other in factors if other != factor]
    base_level = _level(baseline, factor)

    def cell(arm: Arm) -> tuple[tuple[str, ...], ...]:
        return tuple(_level(arm, other) for other in others)

    at_base = {cell(arm): arm for arm in arms if _level(arm, factor) == base_level}
    at_level = {cell(arm): arm for arm in arms if _level(arm, factor) == level}
    shared = [key for key in at_base if key in at_level]
    if not shared:
        return None
    rows = _log_ratios([(at_base[key], at_level[key]) for key in shared], metric, slo)
    estimate, spread = None, None
    if rows is not None:
        per_replicate = rows.mean(axis=0)
        if (rows == 0).all():
            estimate = Estimate(0.0, 0.0, 0.0, rows.shape[1], "equal in every replicate", "log_ratio")
        else:
            estimate = paired_t(np.ones(rows.shape[1]), np.exp(per_replicate), "log_ratio")
        spread = (float(rows.mean(axis=1).min()), float(rows.mean(axis=1).max()))
    arm = next(iter(at_level.values()))
    comparison = Comparison(str(arm.levels.get(factor[0])), metric, None, estimate, "unknown")
    levels = baseline.levels.get(factor[0]), arm.levels.get(factor[0])
    return Effect(factor[0], *levels, comparison, len(shared), spread)


def _log_ratios(cells: Sequence[tuple[Arm, Arm]], metric: Metric, slo: SLO | None) -> Any:
    """Log-ratios `[num_cells, num_replicates]`; None where a value is missing or not positive, or replicates differ."""
    rows = []
    for base, arm in cells:
        try:
            pairs = paired_replicates(base, arm)
        except RunFolderError:
            return None
        values = [(metric.of(a.summary_under(slo)), metric.of(b.summary_under(slo))) for a, b in pairs]
        if any(a is None or b is None or min(a, b) <= 0 for a, b in values):
            return None
        rows.append([float(np.log(b / a)) for a, b in values if a is not None and b is not None])
    return np.array(rows) if len({len(row) for row in rows}) == 1 else None


def _judge(effects: Sequence[Effect], margin: float) -> list[Effect]:
    tested = [
        effect for effect in effects if effect.comparison.estimate and effect.comparison.estimate.p_value is not None
    ]
    raw = [float(e.comparison.estimate.p_value or 0.0) for e in tested if e.comparison.estimate is not None]
    adjusted = {id(effect): p for effect, p in zip(tested, holm(raw), strict=True)}
    judged = []
    for effect in effects:
        estimate, p = effect.comparison.estimate, adjusted.get(id(effect))
        if estimate is not None:
            said = verdict(estimate, float(np.log1p(margin)), p)
            effect = replace(effect, comparison=replace(effect.comparison, verdict=said, p_holm=p))
        judged.append(effect)
    return judged


def one_factor_away(arms: Sequence[Arm], baseline: Arm) -> set[str]:
    """Names of the arms that differ from the baseline in exactly one factor."""
    factors = level_groups(arms)
    return {arm.name for arm in arms if sum(_level(arm, f) != _level(baseline, f) for f in factors) == 1}


def by_factor(effects: Sequence[Effect]) -> Mapping[tuple[str, str, str], list[Effect]]:
    """(factor, base level, level) -> its effects over metrics."""
    groups: dict[tuple[str, str, str], list[Effect]] = {}
    for effect in effects:
        groups.setdefault((effect.factor, repr(effect.base_level), repr(effect.level)), []).append(effect)
    return groups
