"""Which metrics a report's question asks for: those that it names, not those that it means."""

from __future__ import annotations

from analysis.comparison.compare import LATENCY, RATES, SLO_METRICS, Metric

_WORDS = {
    "TTFT": ("ttft", "first token"),
    "TPOT": ("tpot", "per output token"),
    "E2E": ("e2e", "end to end", "end-to-end"),
    "requests/s": ("requests/s", "requests per second", "throughput"),
    "output tokens/s": ("tokens/s", "tokens per second", "throughput"),
    "goodput": ("goodput",),
    "attainment": ("attainment",),
}
_STATISTICS = {"mean": ("mean ", "average"), "P99": ("p99", "tail", "99th")}


def is_asked(metric: Metric, question: str) -> bool:
    """Whether the question names the metric. "TTFT" asks for its mean and its P99, "P99 TTFT" only for that."""
    said = question.casefold().replace("does it mean ", "")
    named = [name for name, words in _WORDS.items() if any(word in said for word in words)]
    which = [name for name, words in _STATISTICS.items() if any(word in said for word in words)]
    is_other = metric.label.startswith(tuple(_STATISTICS)) and not metric.label.startswith(tuple(which or _STATISTICS))
    return metric.label.endswith(tuple(named)) and not is_other


def asks_beside_slo(question: str) -> bool:
    """Whether the question names metrics, and neither goodput nor attainment."""
    of_slo, others = (any(is_asked(one, question) for one in those) for those in (SLO_METRICS, (*LATENCY, *RATES)))
    return others and not of_slo and "slo" not in question.casefold()
