"""Compares arms with the baseline: for each arm and metric the change, its interval, and the verdict it supports."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter

import numpy as np

from analysis import format as fmt
from analysis.comparison.arms import (
    Arm,
    Pairing,
    alike,
    grouped,
    num_repeats,
    paired_replicates,
    repeats,
    replicates,
    same_prices,
)
from analysis.comparison.sharing import common_share, correlation
from analysis.comparison.within import within_one_trace
from analysis.load import Run, flatten
from analysis.measures.slo import SLO
from analysis.measures.statistics import (
    ALIKE,
    Estimate,
    Verdict,
    differences,
    effect_size,
    false_discovery,
    holm,
    largest_spread,
    mean_of_all,
    mean_t,
    verdict,
    widened,
)
from analysis.measures.summary import summary_value
from analysis.reading.rows import FloatArray
from testbed.errors import ConfigError
from testbed.foreign_text import nearest, visible


@dataclass(frozen=True, slots=True)
class Metric:
    """A headline number: its path in a summary, whether more (+1), less (-1) or neither (0) is better, its format.
    of_run: computes it instead, for a metric of the user's own. is_chosen: it is one that the user named."""

    label: str
    path: str
    better: int
    write: Callable[[float | None], str]
    of_run: Callable[[Run], float | None] | None = None
    is_chosen: bool = field(default=False, compare=False)

    @property
    def is_share(self) -> bool:
        """Whether its change is given as a difference, in percentage points."""
        return self.write is fmt.share

    @property
    def limit(self) -> float:
        """The largest change that there can be: of a share 1, all of it."""
        return 1.0 if self.is_share else math.inf

    @property
    def part(self) -> tuple[str, str, str]:
        """The latency, the statistic and the class of its path ("" where there is none): of all requests it is
        "ttft_s.p99", and of a class "classes.ttft_s.p99.batch"."""
        name, _, rest = self.path.removeprefix(_OF_CLASS).partition(".")
        which, _, of_class = rest.partition(".")
        return name, which, of_class

    def of(self, run: Run, slo: SLO | None = None) -> float | None:
        """Its value for a run, under `slo` or the run's own SLO; None if the run does not reach it."""
        return summary_value(run.summary_under(slo), self.path) if self.of_run is None else self.of_run(run)

    def is_known_in(self, run: Run) -> bool:
        """Whether the run has requests of its class."""
        classes = run.summary["classes"]
        return classes is not None and self.part[2] in classes["num_requests"]


_OF_CLASS = "classes."
_MIN_FOR_EFFECT = 3  # replicates
_PER_S = partial(fmt.number, unit="req/s")
RATES = (
    Metric("requests/s", "throughput.requests_per_s", 1, _PER_S),
    Metric("output tokens/s", "throughput.output_tokens_per_s", 1, partial(fmt.number, unit="tok/s")),
)
SLO_METRICS = (
    Metric("SLO attainment", "slo.attainment", 1, fmt.share),
    Metric("goodput", "slo.goodput_per_s", 1, _PER_S),
)
DEADLINES = Metric("deadlines met", "deadlines.met", 1, fmt.share)
INSIDE = (  # with `FILLED` it would be a table that is too wide for a page
    Metric("offered", "throughput.offered_per_s", 0, _PER_S),
    Metric("requests sent", "num_requests", 0, fmt.number),
    Metric("finished", "num_finished", 0, fmt.number),
    Metric("prefix hit rate", "prefix_hit_rate", 0, fmt.share),
    Metric("preemptions", "preemptions.total", 0, fmt.number),
    Metric("recomputed tokens", "preemptions.recomputed_share", 0, fmt.share),
    Metric("time of recompute", "preemptions.recompute_s", 0, fmt.seconds),
    Metric("time of swaps", "preemptions.swap_s", 0, fmt.seconds),
)
FILLED = (
    Metric("KV fragmentation", "kv.fragmentation", 0, fmt.share),
    Metric("mean KV use", "kv.utilisation_mean", 0, fmt.share),
    Metric("peak KV use", "kv.utilisation_peak", 0, fmt.share),
    Metric("mean running", "mean_running", 0, fmt.mean_count),
    Metric("mean waiting", "mean_waiting", 0, fmt.mean_count),
    Metric("busy", "busy_share", 0, fmt.share),
)
FLEET = (Metric("busiest replica over mean", "replicas.imbalance.computed_tokens", 0, fmt.number),)
FAIRNESS = (
    Metric("service gap of tenants", "fairness.max_min_service_gap_tokens", 0, partial(fmt.number, unit="tokens")),
    Metric("Jain's index of normalised latency", "fairness.jain_normalised_latency", 0, fmt.number),
)
TIMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E", "itl_s": "ITL", "queueing_s": "queueing delay",
          "itl_max_s": "largest ITL", "normalised_latency_s": "normalised latency",
          "tpot_incl_first_s": "TPOT with the first token"}  # fmt: skip
_NAMED = {metric.path: metric for metric in (*RATES, *SLO_METRICS, DEADLINES, *INSIDE, *FILLED, *FLEET, *FAIRNESS)}


def metric_of(path: str) -> Metric:
    """The metric at a dotted path of a summary; a metric without a name of its own has its path as label."""
    name, _, which = path.rpartition(".")
    if name in TIMES:
        return Metric(f"{which.replace('p', 'P')} {TIMES[name]}", path, -1, fmt.seconds)
    return _NAMED.get(path, Metric(path, path, 0, fmt.number))


P99_ITL = metric_of("itl_s.p99")  # of single gaps: TPOT, a mean of them, hides stalls
_LATENCY = ("ttft_s.mean", "ttft_s.p99", "tpot_s.mean", "tpot_s.p99", "e2e_s.mean", "e2e_s.p99")
LATENCY = (*map(metric_of, _LATENCY), P99_ITL)
_OF_CLASSES = ("ttft_s.mean", "ttft_s.p99", "tpot_s.p99", "e2e_s.mean")


def of_classes(runs: Sequence[Run], *, with_slo: bool) -> dict[str, tuple[Metric, ...]]:
    """Class ("tenant batch", without characters that steer a terminal) -> its metrics, for each class that a run has;
    none if there are not several, or if some runs have tenants and others priorities. See `measures.classes`."""
    known = [classes for run in runs if (classes := run.summary["classes"])]
    names = dict.fromkeys(name for classes in known for name in classes["num_requests"])
    if len({classes["by"] for classes in known}) != 1:
        return {}
    metrics = [metric_of(path) for path in _OF_CLASSES]
    share, met = replace(SLO_METRICS[0], path="attainment"), replace(DEADLINES, path="deadlines_met")
    with_deadlines = {name for classes in known for name in classes["deadlines_met"] or ()}
    return {
        visible(f"{known[0]['by']} {name}"): tuple(
            replace(metric, path=f"{_OF_CLASS}{metric.path}.{name}")
            for metric in (*metrics, *([share] * with_slo), *([met] * (name in with_deadlines)))
        )
        for name in names
    }


def chosen_metrics(metrics: Sequence[Metric], runs: Sequence[Run]) -> list[Metric]:
    """The metrics, as chosen. Raises ConfigError for one that no run's summary has."""
    for metric in metrics:
        if metric.of_run is None and all(summary_value(run.summary, metric.path) is None for run in runs):
            keys = {key for run in runs for key in flatten(run.summary) if summary_value(run.summary, key) is not None}
            near = nearest(metric.path, keys)
            if not near and metric.path.rpartition(".")[2].isidentifier() and "." in metric.path:
                near = f"a function of yours is {{_target_: {visible(metric.path)}}}; "
            said = f"no run's summary has a number at {visible(metric.path)}; {near}"
            raise ConfigError(f"{said}docs/analysis.md#summaryjson lists all")
    return [replace(metric, is_chosen=True) for metric in metrics]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One arm and metric: the arm's mean over replicates, and its change from the baseline (None: not comparable)."""

    arm: str
    metric: Metric
    value: float | None
    estimate: Estimate | None  # of log-ratios; for shares, and if a value is 0 (no ratio), of differences
    verdict: Verdict
    p_corrected: float | None = None  # see `judge`
    effect: float | None = None  # d_z of the paired differences; needs at least three replicates
    base: float | None = None  # the baseline's mean over the replicates that both have
    noise: float | None = None  # of the engine, see `noise_limit`
    is_of_prices: bool = False  # both have other cost models, so the change tells nothing of a policy

    @property
    def log_ratio(self) -> float:
        """The log-ratio of the mean change; infinite if the value changes to or from 0."""
        if self.estimate is None or not (change := self.estimate.value):
            return 0.0
        if self.estimate.scale == "log_ratio":
            return change
        base = self.base or 0.0
        return math.log1p(change / base) if min(base, base + change) > 0 else math.copysign(math.inf, change)

    @property
    def size(self) -> float:
        """The size of the change: its log-ratio, or for a share its difference, without the sign."""
        if self.estimate is None:
            return 0.0
        return abs(self.estimate.value if self.metric.is_share else self.log_ratio)

    @property
    def gain(self) -> float:
        """The size, positive if the change is better and negative if it is worse; 0 if neither is better."""
        if self.estimate is None or self.is_of_prices:
            return 0.0
        return self.metric.better * math.copysign(self.size, self.estimate.value)

    @property
    def is_claim(self) -> bool:
        return self.verdict in ("higher", "lower") and self.estimate is not None

    @property
    def claim(self) -> str:
        """The claimed direction in a word: better or worse; where neither is better, longer or shorter for a time, and
        higher or lower for others. Empty if none is claimed."""
        if not self.is_claim:
            return ""
        if self.gain:
            return "better" if self.gain > 0 else "worse"
        if self.metric.write is not fmt.seconds:
            return self.verdict
        return "longer" if self.verdict == "higher" else "shorter"

    @property
    def is_alike(self) -> bool:
        """Whether the change is the same in all replicates, and these are too few for a claim."""
        return self.verdict == "unknown" and self.estimate is not None and self.estimate.method == ALIKE


def mean_over_replicates(arm: Arm, metric: Metric, slo: SLO | None = None) -> float | None:
    """Mean over the arm's replicates, each the mean of its repeats; None if any does not reach the metric."""
    return mean_of_all([_mean(repeats(arm, run), metric, slo) for run in replicates(arm)])


def _mean(runs: Sequence[Run], metric: Metric, slo: SLO | None) -> float | None:
    return mean_of_all([metric.of(run, slo) for run in runs])


def engine_noise(arms: Sequence[Arm], metric: Metric, slo: SLO | None = None) -> float | None:
    """The largest `spread` of measured repeats of an arm on one trace; None if there are no repeats."""
    return largest_spread([metric.of(run, slo) for run in runs] for runs in repeated(arms))


def repeated(arms: Sequence[Arm]) -> list[tuple[Run, ...]]:
    """The measured runs of an arm on one trace, for every arm and trace."""
    return [repeats(arm, run) for arm in arms for run in replicates(arm)]


def noise_limit(arms: Sequence[Arm], metric: Metric, slo: SLO | None = None) -> float | None:
    """The change up to which none is claimed: `engine_noise`, `widened` where there are few repeats."""
    noise = engine_noise(arms, metric, slo)
    return None if noise is None else widened(noise, num_repeats(repeated(arms)))


def compare(
    arms: Sequence[Arm], baseline: Arm, metrics: Sequence[Metric], margin: float = 0.02, slo: SLO | None = None
) -> list[Comparison]:
    """Compares every arm except the baseline, in every metric. `margin`: a relative change up to this counts as none.

    With several replicates: Student's interval on the mean log-ratio of paired replicates (on the mean difference for
    shares, and if a value is 0), wider if replicates have requests in common. p-values are corrected over arms and
    metrics (see `judge`); arms that are `alike` count once. With one replicate: circular blocks over its requests, for
    latencies only. Measured repeats on one trace are one replicate, and a change within the `noise_limit` is never
    claimed.
    """
    others = [arm for arm in arms if arm.name != baseline.name]
    first, rows = alike(others), []
    for metric in metrics:
        noise = noise_limit(arms, metric, slo)
        rows += [replace(_compared(arm, baseline, metric, slo), noise=noise) for arm in others]
    return judge(rows, margin, [first[row.arm] for row in rows])


def _compared(arm: Arm, baseline: Arm, metric: Metric, slo: SLO | None) -> Comparison:
    value, is_of_prices = mean_over_replicates(arm, metric, slo), not same_prices(arm, baseline)
    row = Comparison(arm.name, metric, value, None, "unknown", is_of_prices=is_of_prices)
    pairs = paired_replicates(baseline, arm)
    if (known := paired_values(pairs, metric, slo)) is None:
        return row
    diff, scale = differences(*known, are_shares=metric.is_share)
    within = within_one_trace(*pairs[0], *metric.part) if diff.size == 1 and diff.any() else None
    effect = effect_size(diff) if diff.size >= _MIN_FOR_EFFECT else None
    shared = correlation(common_share([ours[0] for ours, _ in pairs]))
    estimate = within or mean_t(diff, scale, correlation=shared, limit=metric.limit)
    return replace(row, estimate=estimate, effect=effect, base=float(known[0].mean()))


def judge(rows: Sequence[Comparison], margin: float, compared: Sequence[Hashable]) -> list[Comparison]:
    """The rows with verdicts, by p-values that are corrected twice: over the comparisons of a metric (Holm), then over
    the metrics of a comparison (`false_discovery`): two equal arms get any claim no more often than one in one metric.
    margin: relative to the baseline. compared: an identity for each row's comparison; rows with equal metric, identity
    and estimate count once."""
    tests = [(row.metric.label, what, row.estimate) for what, row in zip(compared, rows, strict=True)]
    adjusted = {test: test[2].p_value for test in tests if test[2] is not None and test[2].p_value is not None}
    for part, correct in ((itemgetter(0), holm), (itemgetter(1), false_discovery)):
        for those in grouped(adjusted, part).values():
            adjusted |= zip(those, correct([adjusted[test] for test in those]), strict=True)
    judged = []
    for test, row in zip(tests, rows, strict=True):
        p = adjusted.get(test)
        said: Verdict = "unknown"
        if row.estimate is not None:
            limit = np.log1p(margin) if row.estimate.scale == "log_ratio" else margin * (row.base or 0.0)
            said = verdict(row.estimate, float(limit), p)
            if _is_of_engine(said, row, margin):
                said = "inside the engine's noise"
        judged.append(replace(row, verdict=said, p_corrected=p))
    return judged


def _is_of_engine(said: Verdict, row: Comparison, margin: float) -> bool:
    """Whether the engine's noise covers the verdict: the change, or the margin of an equivalence, is within it."""
    least = {"higher": 0.0, "lower": 0.0, "undecided": 0.0, "equivalent": math.log1p(margin)}.get(said)
    if least is None or row.noise is None or row.estimate is None:
        return False
    return max(abs(row.log_ratio), least) <= math.log1p(row.noise)


def paired_values(pairs: Sequence[Pairing], metric: Metric, slo: SLO | None) -> tuple[FloatArray, FloatArray] | None:
    """(baseline's, arm's) values `[num_pairs]` each, means over repeats; None if one is missing or negative. Also None
    for latencies if the runs of a pair ignored different numbers of requests, as those served are not the same then."""
    is_uneven = any(len({ignored(run) for runs in pair for run in runs}) > 1 for pair in pairs)
    if is_uneven and metric.part[0] in TIMES:
        return None
    values = [[_mean(runs, metric, slo) for runs in pair] for pair in pairs]
    if not values or any(value is None or value < 0 for pair in values for value in pair):
        return None
    base, other = np.array(values, dtype=np.float64).T
    return base, other


def ignored(run: Run) -> int:
    """The number of requests that could never fit or be admitted."""
    return int(run.summary["finish_reasons"]["ignored"])
