"""The classes of requests in a report (tenants, or priorities): a table for each, and what the headlines pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from analysis import format as fmt
from analysis.comparison.arms import Arm
from analysis.comparison.compare import Comparison, Metric, compare, of_classes
from analysis.comparison.effects import Compared
from analysis.comparison.wording import change_text
from analysis.measures.classes import MAX_CLASSES
from analysis.measures.slo import SLO
from analysis.reports.first_screen import conditions, told_of, under
from analysis.reports.tables import Table, ablation_table

_JUDGED = (
    "Each class is judged by itself, as all requests are: p-values are corrected over arms and metrics, not over "
    "classes."
)


def compared_classes(arms: Sequence[Arm], margin: float, slo: SLO | None) -> dict[str, list[Comparison]]:
    """Class -> the comparisons of its metrics with the first arm, over the runs that have the class."""
    return {name: compare(those, those[0], of, margin, slo) for name, of, those in _classes(arms, slo)}


def class_tables(
    arms: Sequence[Arm], classes: Mapping[str, Sequence[Comparison]], at_load: str, margin: float, slo: SLO | None
) -> Iterator[Table]:
    """One table for each class, as those of all requests. classes: from `compared_classes`."""
    for name, of, those in _classes(arms, slo):
        table = ablation_table(f"Class {name}{at_load}", those, of, classes[name], margin, slo)
        notes = [table.note]
        num, num_of = (sum(len(arm.runs) for arm in each) for each in (those, arms))
        if num < num_of:
            notes.append(f"{num_of - num} of {num_of} runs have no request of this class, and are left out here.")
        if name == [*classes][-1] and len(arms) > 1:
            notes.append(_JUDGED)
        yield replace(table, note=" ".join(filter(None, notes)))


def _classes(arms: Sequence[Arm], slo: SLO | None) -> Iterator[tuple[str, Sequence[Metric], list[Arm]]]:
    """(class, its metrics, the arms with those of their runs that have it), without classes that an arm has not."""
    for name, metrics in of_classes([run for arm in arms for run in arm.runs], with_slo=slo is not None).items():
        those = [replace(arm, runs=tuple(run for run in arm.runs if metrics[0].is_known_in(run))) for arm in arms]
        if all(arm.runs for arm in those):
            yield name, metrics, those


def pooled_said(groups: Sequence[Compared]) -> list[str]:
    """A sentence if the numbers of all requests pool several classes, or more tenants than are compared; with the
    largest claim in a class that all requests together contradict."""
    names = list(dict.fromkeys(name for group in groups for name in group.classes))
    if not names:
        runs = [run for group in groups for arm in group.arms for run in arm.runs]
        num = max(((run.summary["fairness"] or {}).get("num_tenants", 0) for run in runs), default=0)
        most = f"These numbers pool {num} tenants: classes are compared for up to {MAX_CLASSES}."
        return [most] if num > MAX_CLASSES else []
    said = f"These numbers pool the classes of requests ({fmt.listing(names)})"
    if all(len(group.arms) == 1 for group in groups):
        return [f"{said}, of which each has a table."]
    said += ", which are compared one by one in tables"
    turned = [one for group in groups for one in _turned(group)]
    if not turned:
        return [f"{said}."]
    name, group, pooled, row = max(turned, key=lambda one: (one[2].is_claim, one[3].size))
    told = f"{row.arm} is {row.claim} in {row.metric.label} for {name} ({change_text(row)})"
    noise = f", which is {pooled.verdict}" if pooled.verdict.startswith(("inside", "undecided")) else ""
    over_all = f"{change_text(pooled)} over all requests{noise}"
    both = [arm for arm in group.arms if arm.name in (group.arms[0].name, row.arm)]
    return [f"{said}, and may hide one: {', '.join([*conditions(group.load, both), told])}, at {over_all}."]


def class_claims(groups: Sequence[Compared], margin: float, most: int) -> list[str]:
    """At most `most` sentences, each on arms' claims in classes that all requests together do not make, the largest
    first."""
    found: dict[tuple[str, str], list[str]] = {}  # (conditions, what is said after their names): arms
    sizes: dict[tuple[str, str], float] = {}
    for group in groups:
        base = group.arms[0]
        for arm in group.arms[1:]:
            if hidden := _hidden(group, arm.name):
                told = [f"for {name}, {told_of(rows, margin)}" for name, rows in hidden.items()]
                key = ", ".join(conditions(group.load, [base, arm])), f" against {base.name}: {'; '.join(told)}"
                found.setdefault(key, []).append(arm.name)
                largest = max(row.size for rows in hidden.values() for row in rows)
                sizes[key] = max(largest, sizes.get(key, largest))
    said = [under(at, fmt.names(found[at, text]) + text) for at, text in sorted(found, key=lambda key: -sizes[key])]
    if (left := len(said) - most) > 0 and most > 0:
        more = f"{fmt.count(left, 'more difference')} in classes {'is' if left == 1 else 'are'} in their tables."
        said[most - 1] = f"{said[most - 1]} {more}"
    return said[: max(0, most)]


def _hidden(group: Compared, arm: str) -> dict[str, list[Comparison]]:
    """Class -> the arm's claims in it that neither its numbers over all requests nor a factor's effect make, too."""
    pooled = [*(row for row in group.rows if row.arm == arm), *(effect.comparison for effect in group.effects)]
    made = {(row.metric.label, row.claim) for row in pooled}
    rows = {
        name: [row for row in every if row.arm == arm and row.is_claim and (row.metric.label, row.claim) not in made]
        for name, every in group.classes.items()
    }
    return {name: those for name, those in rows.items() if those}


def _turned(group: Compared) -> Iterator[tuple[str, Compared, Comparison, Comparison]]:
    """(class, the group, the comparison over all requests, that in the class) where the latter is a claim of the other
    sign."""
    pooled = {(row.arm, row.metric.label): row for row in group.rows}
    for name, rows in group.classes.items():
        for row in rows:
            all_of_it = pooled.get((row.arm, row.metric.label))
            if all_of_it is not None and row.is_claim and row.gain * all_of_it.gain < 0:
                yield name, group, all_of_it, row
