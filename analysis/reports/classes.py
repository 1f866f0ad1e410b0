"""The classes of requests in a report (tenants, or priorities): a table for each, and what the headlines pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from analysis import format as fmt
from analysis.comparison.arms import Arm
from analysis.comparison.compare import Comparison, compare, of_classes
from analysis.comparison.effects import Compared
from analysis.comparison.wording import change_text
from analysis.measures.metrics import SLO
from analysis.reports.tables import Table, ablation_table

_JUDGED = (
    "Each class and metric is judged by itself, as the metrics of all requests are: p-values are corrected over the "
    "arms, not over classes."
)


def compared_classes(arms: Sequence[Arm], margin: float, slo: SLO | None) -> dict[str, list[Comparison]]:
    """Class -> the comparisons of its metrics with the first arm."""
    metrics = of_classes([run for arm in arms for run in arm.runs], with_slo=slo is not None)
    return {name: compare(arms, arms[0], of, margin, slo) for name, of in metrics.items()}


def class_tables(
    arms: Sequence[Arm], classes: Mapping[str, Sequence[Comparison]], at_load: str, margin: float, slo: SLO | None
) -> Iterator[Table]:
    """One table for each class, as those of all requests. classes: from `compared_classes`."""
    metrics = of_classes([run for arm in arms for run in arm.runs], with_slo=slo is not None)
    for name, of in metrics.items():
        table = ablation_table(f"Class {name}{at_load}", arms, of, classes[name], margin, slo)
        is_last = name == [*metrics][-1] and len(arms) > 1
        yield replace(table, note=" ".join(filter(None, (table.note, _JUDGED)))) if is_last else table


def pooled_said(groups: Sequence[Compared]) -> list[str]:
    """A sentence if the numbers of all requests pool several classes; with the largest claim in a class that all
    requests together contradict."""
    names = list(dict.fromkeys(name for group in groups for name in group.classes))
    if not names:
        return []
    said = f"These numbers pool {len(names)} classes of requests ({fmt.listing(names)}), which the tables of classes "
    said += "compare one by one"
    turned = [one for group in groups for one in _turned(group)]
    if not turned:
        return [f"{said}."]
    name, load, pooled, row = max(turned, key=lambda one: one[-1].size)
    at = f" at {load}" if load else ""
    told = f"{row.arm} is {row.claim} in {row.metric.label} for {name} ({change_text(row)}), at {change_text(pooled)}"
    return [f"{said}, and may hide one: {told} over all requests{at}."]


def _turned(group: Compared) -> Iterator[tuple[str, str, Comparison, Comparison]]:
    """(class, load, the comparison over all requests, that in the class) where the latter is a claim of the other
    sign."""
    pooled = {(row.arm, row.metric.label): row for row in group.rows}
    for name, rows in group.classes.items():
        for row in rows:
            all_of_it = pooled.get((row.arm, row.metric.label))
            if all_of_it is not None and row.is_claim and row.gain * all_of_it.gain < 0:
                yield name, group.load, all_of_it, row
