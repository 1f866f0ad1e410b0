"""The answer of a report on one arm: what it reached, as nothing is compared with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis import format as fmt
from analysis.comparison.arms import replicates
from analysis.comparison.compare import LATENCY, RATES, SLO_METRICS, mean_over_replicates
from analysis.comparison.effects import Compared
from analysis.load import Run
from analysis.measures.slo import SLO

_TOO_NARROW = (
    "The interval (Wilson's) takes requests as independent, which they are not as they queue, and says nothing of "
    "other traces: it is too narrow."
)


def descriptions(groups: Sequence[Compared], slo: SLO | None, most: int) -> list[str]:
    """At most `most` descriptions of the only arm, by load; the last one says that nothing is compared."""
    told = [_described(group, slo) for group in groups[: max(1, most)]]
    left = len(groups) - len(told)
    more = f" {fmt.left(left, 'load')}." if left else ""
    if any("] of its requests kept the SLO" in text for text in told):
        more = f" {_TOO_NARROW}{more}"
    traces = "its trace" if len(groups) == 1 else "its traces"
    return [*told[:-1], f"{told[-1]}{more} No other arm ran on {traces}, so nothing is compared."]


def _described(group: Compared, slo: SLO | None) -> str:
    """The results of the only arm, as means over its replicates."""
    (arm,) = group.arms
    runs = replicates(arm)
    manifest, metrics = runs[0].manifest, (*LATENCY, *RATES, *SLO_METRICS)
    values = {metric.label: metric.write(mean_over_replicates(arm, metric, slo)) for metric in metrics}
    over = f", means over {len(runs)} replicates" if len(runs) > 1 else ""
    said = (
        f"{manifest.get('scheduler')} with {manifest.get('model')} on {manifest.get('device')} "
        f"({manifest.get('backend')}), {_came(runs)}{f' ({group.load})' if group.load else ''}{over}: "
        f"TTFT {values['mean TTFT']} in the mean and {values['P99 TTFT']} at P99, TPOT {values['mean TPOT']} and "
        f"{values['P99 TPOT']}, {values['requests/s']} and {values['output tokens/s']} served."
    )
    if slo is not None:
        told = [run.summary_under(slo)["slo"]["attainment_ci95"] for run in runs]
        interval = f" [{', '.join(fmt.share(end) for end in told[0])}]" if len(told) == 1 and told[0] else ""
        said += f" {values['SLO attainment']}{interval} of its requests kept the SLO: goodput {values['goodput']}."
    return said


def _came(runs: Sequence[Run]) -> str:
    """The number of requests and their rate, as means over the runs."""
    num = float(np.mean([run.summary["num_requests"] for run in runs]))
    rates = [rate for run in runs if (rate := run.summary["throughput"]["offered_per_s"]) is not None]
    at = f" at {fmt.number(float(np.mean(rates)), 'req/s')}" if rates else " at once" if num > 1 else ""
    return fmt.count(num, "request") + at
