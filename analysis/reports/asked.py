"""Which metrics a report's question asks for: those that it names, not those that it means. Values of those without an
interval."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence

from analysis import format as fmt
from analysis.comparison.arms import Arm, grouped
from analysis.comparison.compare import (
    DEADLINES,
    FAIRNESS,
    HIT_RATE,
    LATENCY,
    P99_ITL,
    PREEMPTIONS,
    RATES,
    SLO_METRICS,
    Comparison,
    Metric,
    mean_over_replicates,
)
from analysis.comparison.effects import Compared
from analysis.load import Run
from analysis.measures.slo import SLO
from analysis.naming import apart
from analysis.reports.keeping_slo import over_replicates

_WORDS = {
    "TTFT": ("ttft", "first token"),
    "TPOT": ("tpot", "per output token"),
    "E2E": ("e2e", "end to end", "end-to-end"),
    "ITL": ("itl", "inter-token", "tbt", "between tokens", "stall"),
    "requests/s": ("requests/s", "requests per second", "throughput"),
    "output tokens/s": ("tokens/s", "tokens per second", "throughput"),
    "goodput": ("goodput",),
    "attainment": ("attainment",),
    "deadlines met": ("deadline",),
}
_STATISTICS = {"mean": ("mean ", "average"), "P99": ("p99", "tail", "99th")}
_OF_SLO = re.compile(r"\b(goodput|attainment|slos?)\b")
_MEAN_ITL = re.compile(rf"\b(?:mean|average) (?:{'|'.join(map(re.escape, _WORDS['ITL']))})")
_FAIR = r"\b(?:un)?fair(?:er|est|ness)?\b"
_UNJUDGED = {  # words for metrics without a verdict
    r"\bhits?\b(?! (?:the|its|their|an?|slos?|deadlines?)\b)": (HIT_RATE,),  # of a cache, not of a limit
    "preemptions": (PREEMPTIONS,),
    _FAIR: FAIRNESS,
}
_MAX_METRICS = 3  # that are told
_MAX_LOADS, _MAX_VALUES = 3, 4  # of one metric: loads, and different values at one load
_IN_SUMMARY = re.compile(r"\b(queueing|median|p50|p90|p95)\b(?!\.\d)")
_IN_TABLE = re.compile(r"\b(p(?!(?:50|90|95|99)\b(?!\.\d))\d\d(?:\.\d+)?)\b")  # other percentiles; P100 is a device


def is_asked(metric: Metric, question: str) -> bool:
    """Whether the user chose the metric or the question names it: "TTFT" its mean and its P99, "P99 TTFT" only
    for that."""
    if metric.is_chosen:
        return True
    said = question.casefold().replace("does it mean ", "")
    named, which = _named(_WORDS, said), _named(_STATISTICS, said)
    is_other = metric.label.startswith(tuple(_STATISTICS)) and not metric.label.startswith(tuple(which or _STATISTICS))
    return metric.label.endswith(tuple(named)) and not is_other


def _named(words: Mapping[str, Sequence[str]], said: str) -> list[str]:
    """Those of which a word stands in the text, not within another word as "itl" in "title"."""
    return [
        name for name, those in words.items() if any(re.search(f"(?<![a-z]){re.escape(word)}", said) for word in those)
    ]


def names_arm(arm: str, base: str, question: str) -> bool:
    """Whether the question has the level of a setting that sets the arm apart from the baseline, as "edf" of "queue
    order edf"."""
    levels = [one.split()[-1].casefold() for one in apart(arm, base)[0].split(", ")]
    return any(re.search(rf"(?<![\w.]){re.escape(level)}(?!\w)", question.casefold()) for level in levels)


def asks_beside_slo(question: str) -> bool:
    """Whether the question names metrics, and neither goodput nor attainment."""
    return any(is_asked(metric, question) for metric in (*LATENCY, *RATES)) and not asks_slo(question)


def asks_slo(question: str) -> bool:
    return _OF_SLO.search(question.casefold()) is not None


def have_gaps(runs: Sequence[Run]) -> bool:
    """Whether gaps between tokens are known of any of the runs."""
    return any(P99_ITL.of(run) is not None for run in runs)


def without_interval(rows: Iterable[Comparison], question: str) -> list[Metric]:
    """The metrics that the question names and of which no change has an interval, as rates of one trace. The sentence
    on the SLO says it of the attainment."""
    changed = [row for row in rows if row.estimate is not None and row.verdict != "identical"]
    tested = {row.metric.label for row in changed if row.verdict != "unknown" or row.is_alike}
    named = [row.metric for row in changed if is_asked(row.metric, question) and row.metric != SLO_METRICS[0]]
    return [metric for metric in dict.fromkeys(named) if metric.label not in tested]


def observed(groups: Sequence[Compared], question: str, slo: SLO | None) -> list[str]:
    """One sentence with the arms' values of what the question names and of which no change has an interval, the lowest
    first; of every latency that it names if nothing is compared; none if nothing."""
    rows = [row for group in groups for row in (*group.rows, *(effect.comparison for effect in group.effects))]
    untested, said = without_interval(rows, question), question.casefold()
    alone = [metric for metric in (*LATENCY, DEADLINES) if not rows and is_asked(metric, question)]
    unjudged = [metric for words, metrics in _UNJUDGED.items() if re.search(words, said) for metric in metrics]
    parts = values_of([*untested, *alone, *unjudged], groups, slo, untested)
    over = over_replicates([arm for group in groups for arm in group.arms])
    return [f"Observed{over}, without an interval: {'; '.join(parts)}."] if parts else []


def values_of(
    metrics: Sequence[Metric], groups: Sequence[Compared], slo: SLO | None, untested: Container[Metric] = ()
) -> list[str]:
    """Each metric's name with the arms' values at the first few loads; after a few metrics, how many are left."""
    parts = []
    for metric in metrics:
        told = [(group.load, text) for group in groups if (text := _values(metric, group.arms, slo))]
        texts = [f"at {load}: {text}" if load else text for load, text in told[:_MAX_LOADS]]
        if (left := len(told) - _MAX_LOADS) > 0:
            texts.append(f"{fmt.count(left, 'more load')} {'is' if left == 1 else 'are'} in the tables")
        more = " (more replicates give an interval)" if metric in untested else ""
        parts += [f"{metric.label} {'; '.join(texts)}{more}"] if texts else []
    if (left := len(parts) - _MAX_METRICS) > 0:
        parts[_MAX_METRICS:] = [f"{fmt.count(left, 'more metric')} {'is' if left == 1 else 'are'} in the tables"]
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


def absent(
    question: str,
    *,
    has_slo: bool,
    has_gaps: bool = True,
    has_deadlines: bool = True,
    has_tenants: bool = True,
    has_chosen: bool = False,
) -> list[str]:
    """One sentence on what the question names and the report does not compare, and what gives it; none if nothing."""
    said = question.casefold()
    of_slo, in_summary, in_table = (
        list(dict.fromkeys(words.findall(said))) for words in (_OF_SLO, _IN_SUMMARY, _IN_TABLE)
    )
    of_gaps = "ITL" in _named(_WORDS, said)
    if of_gaps and has_gaps and (_named(_STATISTICS, said) == ["mean"] or _MEAN_ITL.search(said)):
        in_summary.append("mean ITL")
    parts = [f"{_listed(of_slo)} (give an SLO, as --slo ttft_s=0.5)"] if of_slo and not has_slo else []
    parts += ["ITL (of runs with record.token_times=true)"] if of_gaps and not has_gaps else []
    if not has_deadlines and "deadlines met" in _named(_WORDS, said):
        parts.append("deadlines (of requests that have one, as by trace.deadline_s)")
    if not has_tenants and re.search(_FAIR, said):
        parts.append("fairness (of runs whose requests have several tenants, as by trace.tenants)")
    parts += [f"{_listed(in_summary)} (--metric adds them, as queueing_s.p99)"] if in_summary and not has_chosen else []
    parts += [f"{_listed(in_table)} (to be taken from the requests.parquet of each run)"] if in_table else []
    return [f"The question names what is not compared here: {'; '.join(parts)}."] if parts else []


def _listed(words: list[str]) -> str:
    return fmt.listing([word.upper() if len(word) <= 4 or word[1].isdigit() else word for word in words])
