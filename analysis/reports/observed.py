"""The arms' values of metrics that the user chose: of those without an interval, and where nothing differs."""

from __future__ import annotations

from collections.abc import Sequence

from analysis import format as fmt
from analysis.comparison.arms import Arm, grouped
from analysis.comparison.compare import SLO_METRICS, Metric, mean_over_replicates
from analysis.comparison.effects import Compared
from analysis.measures.slo import SLO
from analysis.reports.keeping_slo import over_replicates

_MAX_METRICS = 3  # that are told
_MAX_LOADS, _MAX_VALUES = 3, 4  # of one metric: loads, and different values at one load


def observed(groups: Sequence[Compared], chosen: Sequence[Metric], slo: SLO | None) -> list[str]:
    """One sentence with the arms' values of the chosen metrics of which no change has an interval (of all of them, if
    nothing is compared), the lowest first; none if nothing. The sentence on the SLO says it of the attainment."""
    rows = [row for group in groups for row in (*group.rows, *(effect.comparison for effect in group.effects))]
    changed = [row for row in rows if row.estimate is not None and row.verdict != "identical"]
    known = {row.metric for row in changed}
    tested = {row.metric for row in changed if row.verdict != "unknown" or row.is_alike}
    untested = known - tested if rows else set(chosen)
    told = [metric for metric in chosen if metric in untested and metric != SLO_METRICS[0]]
    parts = values_of(told, groups, slo, are_untested=bool(rows))
    over = over_replicates([arm for group in groups for arm in group.arms])
    return [f"Observed{over}, without an interval: {'; '.join(parts)}."] if parts else []


def values_of(
    metrics: Sequence[Metric], groups: Sequence[Compared], slo: SLO | None, *, are_untested: bool = False
) -> list[str]:
    """Each metric's name with the arms' values at the first few loads; after a few metrics, how many are left."""
    parts = []
    for metric in metrics:
        told = [(group.load, text) for group in groups if (text := _values(metric, group.arms, slo))]
        texts = [f"at {load}: {text}" if load else text for load, text in told[:_MAX_LOADS]]
        if (left := len(told) - _MAX_LOADS) > 0:
            texts.append(fmt.left(left, "load"))
        more = " (more replicates give an interval)" if are_untested else ""
        parts += [f"{metric.label} {'; '.join(texts)}{more}"] if texts else []
    if (left := len(parts) - _MAX_METRICS) > 0:
        parts[_MAX_METRICS:] = [fmt.left(left, "metric")]
    return parts


def _values(metric: Metric, arms: Sequence[Arm], slo: SLO | None) -> str:
    """The arms' means over their replicates: "18 ms with a and 20 ms with b"; "" if none is known."""
    known = {arm.name: value for arm in arms if (value := mean_over_replicates(arm, metric, slo)) is not None}
    by_text = grouped(sorted(known, key=lambda name: known[name]), lambda name: metric.write(known[name]))
    told = [
        f"{text} with {'every arm' if len(names) == len(arms) > 2 else fmt.names(names, _MAX_VALUES)}"
        for text, names in by_text.items()
    ]
    return f"from {told[0]} to {told[-1]} ({len(known)} arms)" if len(told) > _MAX_VALUES else fmt.listing(told)
