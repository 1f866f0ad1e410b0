"""The first screen of a report: the answer in a few sentences, by the size of effects. A sentence on an arm begins with
the metrics that the user chose."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from analysis import format as fmt
from analysis.comparison.arms import (
    Arm,
    alike,
    grouped,
    joined,
    level_groups,
    num_replicates,
    on_shared_traces,
    repeats,
    was_busy,
)
from analysis.comparison.compare import LATENCY, P99_ITL, SLO_METRICS, Comparison, Metric
from analysis.comparison.effects import Compared, Effect, by_factor
from analysis.comparison.triggered import is_of_preemption, num_preempted, same_arms, same_decisions
from analysis.comparison.wording import cells_text, change_text, no_more_than, reached_text, step_text, undecided
from analysis.measures.slo import SLO
from analysis.naming import apart, factor_name, level_text
from analysis.reports.keeping_slo import best_within, is_chosen, kept, kept_briefly, tells_apart
from analysis.reports.keeping_up import judged, serves_nothing, who
from analysis.reports.observed import values_of
from analysis.reports.one_arm import descriptions
from analysis.reports.trust import shared

MAX_SENTENCES = 5
_MAX_CLAIMS = 2  # of each kind in a sentence, and metrics that are described by cells
_MAX_NAMED = 3  # comparisons in one sentence, and metrics whose effect depends on other factors
_MAX_BEYOND = 2  # arms that are named as beyond their capacity
_CLAIMS = ("better", "worse", "longer", "shorter", "higher", "lower")


_Factors = tuple[str, ...]


class _Said(NamedTuple):
    """A sentence on some factors. is_beside: whether it is on no metric that the user chose. rank: minus its largest
    change (of the metrics that the user chose, if any), or infinite."""

    is_beside: bool
    rank: float
    about: _Factors
    text: str


class _Subject(NamedTuple):
    """One comparison: of an arm with the baseline, or of a factor's levels (arm: ""). what: the rest of its name.
    rows: its metrics, for these arms. hidden: a text on metrics in which the size of a factor's effect depends on
    others. by_cell: effects that differ between cells in claim or sign. average: a prefix for averaged effects. about:
    the settings that differ, of each factor the one that names it."""

    arm: str
    what: str
    rows: Sequence[Comparison]
    arms: Sequence[Arm]
    hidden: str = ""
    by_cell: Sequence[Effect] = ()
    average: str = ""
    is_of_preemption: bool = False
    about: _Factors = ()

    @property
    def name(self) -> str:
        return self.arm + self.what

    @property
    def claims(self) -> list[Comparison]:
        return [row for row in self.rows if row.is_claim]

    @property
    def is_untested(self) -> bool:
        """Whether no metric could be tested."""
        return all(row.verdict == "unknown" for row in self.rows)

    def lacks_data(self, margin: float) -> bool:
        """Whether more data may show a difference: not for what is equal so far and has no interval within any trace,
        as rates and P99 ITL."""
        untested = [row for row in self.rows if row.verdict == "unknown" and row.estimate is not None]
        within = [row for row in untested if row.metric in LATENCY and row.metric != P99_ITL]
        return self.is_untested or bool(within) or any(row.size > margin for row in untested)


def answer(groups: Sequence[Compared], slo: SLO | None, margin: float = 0.02, most: int = MAX_SENTENCES) -> list[str]:
    """At most `most` sentences: which arms keep the SLO, if it tells them apart or the user chose its metrics; which
    serves most within it; then claimed changes, the largest first. The metrics that the user chose come first, and
    each factor before another load of one. Without comparisons, a description of the one arm at the first few loads.
    margin: of the comparisons."""
    if serves_nothing([arm for group in groups for arm in group.arms]):
        return ["No request was served to its end in any run, so nothing can be compared."]
    if not any(group.rows for group in groups):
        return descriptions(groups, slo, most)
    is_told = slo is not None and (is_chosen(groups) or tells_apart(groups, slo))
    share = "" if slo is None else kept(groups, slo, margin) if is_told else kept_briefly(groups, slo)
    of_slo = [f"{_as_sentence(share)}."] if share else []
    changes = _differences(groups, slo, margin, most - len(of_slo))
    return [*of_slo, *changes] if is_told and is_chosen(groups) is not False else [*changes, *of_slo]


def _differences(groups: Sequence[Compared], slo: SLO | None, margin: float, most: int) -> list[str]:
    """At most `most` sentences: the arm that serves most within the SLO, changes whose sign depends on the load, the
    claimed changes, settings that changed no decision, and comparisons without a difference."""
    changes: dict[tuple[_Said, str], list[str]] = {}  # (what is said after the names, conditions): arms (factors: "")
    claimed: dict[tuple[str, str, _Factors], list[tuple[str, Comparison]]] = {}  # by subject, metric: (conditions, row)
    quiet: list[tuple[str, _Subject]] = []  # (conditions, what has no difference under them)
    for group in groups:
        for subject in _subjects(group):
            at = ", ".join(conditions(group.load, subject.arms))
            for one in _changes(subject, margin):
                changes.setdefault((one, at), []).append(subject.arm)
            for row in subject.claims:
                key = subject.average + subject.name, row.metric.label, subject.about
                claimed.setdefault(key, []).append((at, row))
            if not subject.claims and not subject.by_cell:
                quiet.append((at, subject))
    ranked = _turning(claimed)
    for (one, at), arms in changes.items():
        who_are = arms[0] if len(arms) == 1 else fmt.names(arms, _MAX_NAMED)
        ranked.append(one._replace(text=under(at, f"{who_are}{one.text}")))
    best = [
        under(", ".join(conditions(group.load, group.arms)), text)
        for group in groups if slo is not None and (text := best_within(group, slo, margin))
    ]  # fmt: skip
    said = _in_order(ranked)
    num_first = {True: max(1, most - 2), None: 1, False: 0}[is_chosen(groups)]
    said = [*best[:num_first], *said, *best[num_first:]]
    same = _same(groups)
    every = [one for _, one in quiet]
    pooled = "over all requests, " if any(group.classes for group in groups) else ""
    if not said and any(one.lacks_data(margin) for one in every):
        return [*same, under(_over(every), f"{pooled}{_too_little(every, margin)}")]
    if not said and not same and quiet:
        beyond = f"{_no_more_than(every, margin)}{_preempted(every)}{_chosen_values(groups, slo)}"
        told = undecided([(f"{one.name}{one.average and ', on average'}", row) for one in every for row in one.rows])
        nothing = f"nothing {'else ' if told else ''}that was compared differs"
        return [*told, under(_over(every), f"{pooled}{nothing} beyond {beyond}{_left_open(every, ['unknown'])}")][:most]
    most -= len(same)
    if len(said) > most:
        num_told = max(1, most - 1)
        left = len(said) - num_told
        more = f"{fmt.left(left, 'difference')}."
        told = [*said[:num_told], more] if most > 1 else [f"{said[0].removesuffix('.')}; {more}"]
        return [*told, *same]
    return [*said, *same, *_quiet(quiet, {subject for subject, *_ in claimed}, margin, pooled)[: most - len(said)]]


def _in_order(said: Sequence[_Said]) -> list[str]:
    """The sentences: those on metrics that the user chose before others, the first on each factor before the second
    on any, and the largest changes first."""
    num: Counter[_Factors] = Counter()
    placed = []
    for one in sorted(said, key=lambda one: one[:2]):
        placed.append((one.is_beside, num[one.about], one.text))
        num[one.about] += 1
    return [text for *_, text in sorted(placed, key=lambda one: one[:2])]


def _chosen_values(groups: Sequence[Compared], slo: SLO | None) -> str:
    """A suffix with the arms' values of tested metrics that the user chose; the attainment has a sentence."""
    rows = [row for group in groups for row in group.rows if row.verdict != "unknown"]
    metrics = dict.fromkeys(row.metric for row in rows if row.metric.is_chosen)
    parts = values_of([metric for metric in metrics if metric != SLO_METRICS[0]], groups, slo)
    return f" ({'; '.join(parts)})" if parts else ""


def _preempted(subjects: Sequence[_Subject]) -> str:
    """How often anything was preempted in all runs that a sentence on these is about, if one is of preemptions."""
    if not any(subject.is_of_preemption for subject in subjects):
        return ""
    return f" ({num_preempted([arm for subject in subjects for arm in subject.arms])})"


def _over(subjects: Sequence[_Subject]) -> str:
    """The conditions of all of these comparisons, at whatever load."""
    return ", ".join(conditions("", joined(arm for subject in subjects for arm in subject.arms)))


def _names(rows: Sequence[Comparison]) -> list[str]:
    return list(dict.fromkeys(row.metric.label for row in rows))


_OPEN = {"undecided": ("is undecided", "are undecided"), "unknown": ("has no interval", "have no interval")}


def _left_open(subjects: Sequence[_Subject], verdicts: Sequence[str] = (*_OPEN,)) -> str:
    """A suffix that names the metrics whose change is undecided or has no interval, so that they are not taken for
    equal, with the changes of a single subject."""
    said = ""
    for verdict in verdicts:
        rows = [row for one in subjects for row in one.rows if row.verdict == verdict and row.estimate is not None]
        names = [f"{row.metric.label} ({change_text(row)})" for row in rows] if len(subjects) == 1 else _names(rows)
        said += f"; {fmt.listing(names)} {_OPEN[verdict][len(names) > 1]}" if names else ""
    return said


def _too_little(subjects: Sequence[_Subject], margin: float) -> str:
    """A sentence on what could not be tested, and on the metrics that could."""
    said = f"there is too little data for a claim{_preempted(subjects)}: too few replicates, or too few requests of one"
    if all(subject.is_untested for subject in subjects):
        return said
    names = _names([row for subject in subjects for row in subject.rows if row.verdict == "unknown"])
    rest = f"no difference beyond {_no_more_than(subjects, margin)} in the rest{_left_open(subjects, ['undecided'])}"
    return f"{said}, in {fmt.listing(names)}; {rest}"


def _no_more_than(subjects: Sequence[_Subject], margin: float) -> str:
    return no_more_than({row.verdict for subject in subjects for row in subject.rows}, margin)


def _quiet(quiet: Sequence[tuple[str, _Subject]], claimed: Container[str], margin: float, pooled: str) -> list[str]:
    """Sentences on comparisons without a difference: first on those that have none under any conditions. pooled: a
    prefix where requests are of several classes."""
    by_at: dict[str, dict[str, list[_Subject]]] = {"": {}}
    for at, subject in quiet:
        name = subject.average + subject.name
        if not subject.is_untested:
            by_at.setdefault(at if name in claimed else "", {}).setdefault(name, []).append(subject)
    found = []
    for at, subjects in by_at.items():
        every = [one for those in subjects.values() for one in those]
        average = every[0].average if len({one.average for one in every}) == 1 else ""
        names = fmt.listing([name.removeprefix(average) for name in subjects])
        names = f"{average}{names}" if len(subjects) <= _MAX_NAMED else f"{len(subjects)} more comparisons"
        none = f"no difference beyond {_no_more_than(every, margin)}{_preempted(every)}"
        text = f"{pooled}{names} show{'s' * (len(subjects) == 1)} {none}{_left_open(every)}"
        found += [under(at or _over(every), text)] if subjects else []
    return found


def under(at: str, text: str) -> str:
    """A sentence with the conditions under which it holds."""
    return f"{at[0].upper()}{at[1:]}, {text}." if at else f"{_as_sentence(text)}."


def _as_sentence(text: str) -> str:
    """The text with a capital letter, unless it begins with an arm's name."""
    is_word = text.startswith(("at ", "no ", "every ", "on average ", "nothing ", "there is ", "over all "))
    return f"{text[0].upper()}{text[1:]}" if is_word else text


def conditions(load: str, arms: Sequence[Arm]) -> list[str]:
    """The conditions under which claims on these arms hold, from the runs on the traces that they share."""
    arms = on_shared_traces(arms)
    parts = [f"at {load}"] if load else []
    beyond = [one for one in judged(arms) if one.state == "beyond"]
    if not all(one.is_whole for one in beyond):
        num, num_of = sum(len(one.runs) for one in beyond), sum(one.num_runs for one in judged(arms))
        parts.append(f"over all runs ({num} of {num_of} are beyond capacity)")
    elif beyond:
        parts.append(f"beyond the capacity of {who(judged(arms), 'beyond', _MAX_BEYOND)}")
    if num_replicates(arms) == 1:
        parts.append("on this one trace")
    elif shared([run for arm in arms for run in arm.runs])[0] == "poor":
        parts.append("on poor replicates, which share requests")
    once = [len(repeats(arm, run)) == 1 for arm in arms for run in arm.runs if not run.is_simulated]
    if any(once):
        parts.append("each measured once" if all(once) else "some measured once")
    if any(was_busy(run) for arm in arms for run in arm.runs):
        parts.append("on a busy machine")
    return parts


def _changes(subject: _Subject, margin: float) -> list[_Said]:
    """The claims as text without the arm's name, for cells and for averages; the rank is by the metrics that the user
    chose, if any."""
    found = []
    if subject.by_cell:

        def rank(one: Effect) -> tuple[bool, bool, float]:
            metric = one.comparison.metric
            return not metric.is_chosen, metric != SLO_METRICS[1], -_largest(one)

        ordered = sorted(subject.by_cell, key=rank)
        texts = [cells_text(effect, change_text) for effect in ordered[:_MAX_CLAIMS]]
        of_cells = _rank([(one.comparison.metric, _largest(one)) for one in ordered])
        if not subject.claims and (quiet := told_of(subject.rows, margin)):
            texts.append(f"{subject.average}{quiet}")
        found.append(_Said(*of_cells, subject.about, f"{subject.what}: {'; '.join(texts)}"))
    if claims := subject.claims:
        text = f"{subject.average}{subject.what}: {told_of(subject.rows, margin)}{subject.hidden}"
        found.append(_Said(*_rank([(row.metric, row.size) for row in claims]), subject.about, text))
    return found


def _rank(changes: Sequence[tuple[Metric, float]]) -> tuple[bool, float]:
    """`is_beside` and `rank` of a sentence on these metrics and their changes."""
    chosen = [size for metric, size in changes if metric.is_chosen]
    return not chosen, -max(chosen or [size for _, size in changes])


def _largest(effect: Effect) -> float:
    return max(end.size for end in effect.ends)


def _same(groups: Sequence[Compared]) -> list[str]:
    """One sentence on the settings that changed no decision against the baseline, with the loads; none if all did."""
    found = [(text, group.load) for group in groups for text in _same_at(group)]
    by_text = {text: [load for _, load in those] for text, those in grouped(found, lambda one: one[0]).items()}
    parts = [f"at {fmt.listing(loads)}, {text}" if any(loads) else text for text, loads in by_text.items()]
    return [f"{_as_sentence('; '.join(parts))}."] if parts else []


def _same_at(group: Compared) -> list[str]:
    if not group.effects:
        first = alike(group.arms)
        same = [arm for arm in group.arms if first[arm.name] == group.arms[0].name]
        return [same_arms(same)] if len(same) > 1 else []
    factors, told = {keys[0]: keys for keys in level_groups(group.arms)}, []
    for step, *_ in by_factor(group.effects).values():
        if step.is_alike:
            name, levels = factor_name(step.factor), (step.base_level, step.level)
            arms = [arm for arm in group.arms if arm.levels.get(step.factor) in levels]
            base, changed = (f"{name} {level_text(step.factor, level)}" for level in levels)
            told.append((changed, same_decisions([""], base, arms, factors[step.factor])))
    by_text = grouped(told, lambda one: one[1])
    return [fmt.names([level for level, _ in those]) + text for text, those in by_text.items()]


def _turning(claimed: Mapping[tuple[str, str, _Factors], Sequence[tuple[str, Comparison]]]) -> list[_Said]:
    """One sentence on a metric that is better at some loads and worse at others: one that the user chose, else the one
    with the largest loss. Empty if there is none. claimed: by subject and metric, each with its conditions."""
    found = []
    for (subject, label, about), every in claimed.items():
        (at_worst, worst), (at_best, best) = (pick(every, key=lambda one: one[1].gain) for pick in (min, max))
        if worst.gain < 0 < best.gain:
            ends = f"worse ({change_text(worst)}) {at_worst}, and better ({change_text(best)}) {at_best}"
            first, other = (at.partition(", ")[0] for at in (at_worst, at_best))  # see `arms.by_load`
            what = "trace" if first.startswith("at trace = ") and first != other else "load"
            text = f"{_as_sentence(subject)} turns with the {what}: {label} is {ends}."
            found.append(_Said(not worst.metric.is_chosen, worst.gain, about, text))
    return [one._replace(rank=-math.inf) for one in sorted(found)[:1]]


def _subjects(group: Compared) -> list[_Subject]:
    """The comparisons whose decisions differ. For a factorial design these are the factors, and also arms, but only in
    metrics that no factor changes on average or by cells."""
    found, first, base = [], alike(group.arms), group.arms[0]
    for effects in by_factor(group.effects).values():
        step = effects[0]
        if step.is_alike:
            continue
        by_cell = [effect for effect in effects if effect.is_uneven]
        even = [effect for effect in effects if effect not in by_cell]
        sizes = [effect.comparison.metric.label for effect in even if effect.interaction is not None]
        hidden = f" (in {fmt.listing(sizes, _MAX_NAMED)} the effect depends on the other factors)" if sizes else ""
        rows = [effect.comparison for effect in even]
        compared = {name for effect in effects for pair in effect.pairs for name in pair}
        arms = [arm for arm in group.arms if first[arm.name] in compared]
        which, average = is_of_preemption([step.factor]), "on average over the other factors, "
        found.append(_Subject("", step_text(step), rows, arms, hidden, by_cell, average, which, (step.factor,)))
    known = {row.metric.label for one in found for row in (*one.claims, *(e.comparison for e in one.by_cell))}
    rows = [row for row in group.rows if not group.effects or (row.is_claim and row.metric.label not in known)]
    for name, mine in grouped((row for row in rows if first.get(row.arm) != base.name), lambda row: row.arm).items():
        both = [base, *(arm for arm in group.arms if arm.name == name)]
        factors = level_groups(both)
        which, about = is_of_preemption([key for keys in factors for key in keys]), tuple(keys[0] for keys in factors)
        found.append(_Subject(*_against(name, base.name), mine, both, is_of_preemption=which, about=about))
    return found


def _against(name: str, base: str) -> tuple[str, str]:
    """An arm's name and what follows it, with common levels only once:
    "decode_first", " against prefill_first (both watermark 0, prefix caching on)"."""
    mine, theirs, both = apart(name, base)
    return mine, f" against {theirs}{f' (both {both})' if both else ''}"


def told_of(rows: Sequence[Comparison], margin: float) -> str:
    """The largest improvements and the largest losses, as text; where nothing is better, the largest changes. First the
    metrics that the user chose, and last those of them that are inside the noise."""
    told: list[tuple[bool, str]] = []  # (whether the user chose none of its metrics, text)
    for word in _CLAIMS:
        mine = [row for row in rows if row.claim == word]
        if mine:
            mine.sort(key=lambda row: (not row.metric.is_chosen, -row.size))
            num = max(_MAX_CLAIMS, sum(row.metric.is_chosen for row in mine))
            texts = [f"{row.metric.label} ({reached_text(row)})" for row in mine[:num]]
            told.append((not mine[0].metric.is_chosen, f"{word} in {fmt.listing(texts)}"))
    parts = [text for _, text in sorted(told, key=lambda item: item[0])]
    chosen = [row for row in rows if row.metric.is_chosen and not row.is_claim and row.verdict != "unknown"]
    if quiet := [row for row in chosen if row.verdict != "undecided"]:
        most = no_more_than({row.verdict for row in quiet}, margin)
        parts.append(f"no difference beyond {most} in {fmt.listing([row.metric.label for row in quiet])}")
    if open_ := [f"{row.metric.label} ({change_text(row)})" for row in chosen if row.verdict == "undecided"]:
        parts.append(f"undecided in {fmt.listing(open_)}")
    return "; ".join(parts)
