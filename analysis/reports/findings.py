"""Sentences on how a report's numbers came about: failed checks, the method of intervals, limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from analysis import format as fmt
from analysis.comparison.arms import Arm, num_replicates
from analysis.comparison.compare import Comparison
from analysis.load import Run
from analysis.measures.checks import failures
from analysis.measures.slo import SLO


def failed_checks(links: Mapping[str, str], runs: Sequence[Run]) -> Iterable[str]:
    """A sentence on each check that the records of a run fail; all other results depend on these. links: by path."""
    said = (f"{links[str(run.path)]}: {text}" for run in runs for text in failures(run.summary["checks"]))
    return dict.fromkeys(said)


def interval_method(rows: Sequence[Comparison], num_replicates: int, single: list[str]) -> str:
    """A text on how the intervals were computed, and to what they generalise. single: the arms with one replicate, if
    others have several."""
    methods = {row.estimate.method.split(" of ")[0] for row in rows if row.estimate is not None}
    if num_replicates >= 2 or single:
        over = f"{num_replicates} replicates" if num_replicates >= 2 else "an arm's replicates"
        one = f" Of {fmt.names(single)} there is one replicate: {_ONE_TRACE}" if single else ""
        return (
            f"Changes are relative: means of log-ratios over {over}, paired on the same "
            "trace, with 95 % Student intervals; of shares, and where a value is 0, they are differences. A change "
            "counts when its p-value, corrected over arms or factors (Holm) and metrics (Benjamini and Hochberg) at "
            "one load, is below 0.05 (so does how much a factor's effect depends on the others, and, by Holm, its "
            "effect in single cells); arms that took the same decisions at every step are one comparison; the "
            "intervals are those of single comparisons. So an arm that is equal to the baseline is claimed to differ, "
            "in any metric, with a chance below 5 %, and of the claims on an arm that differs 5 % at most are "
            "expected to be false; over many loads a few false claims are to be expected. d is Cohen's d_z, with "
            f"Hedges' correction: the mean paired difference over its standard deviation.{one}"
        )
    if "circular blocks" in methods:
        return f"There is one replicate. Changes are relative; {_ONE_TRACE}"
    return "There is one replicate and too few requests for an interval: the changes are observations, not estimates."


_ONE_TRACE = (
    "their 95 % intervals are of a circular-block bootstrap over the requests of that one trace: they cover the "
    "variation within it, not that between traces or seeds, and are not corrected for the number of comparisons. Rates "
    "of a single run, and tails beyond which fewer than five requests lie, have no interval."
)


def limits(compared: Iterable[Sequence[Arm]], arms: Sequence[Arm], slo: SLO | None) -> Iterator[str]:
    """Sentences on limits of the numbers, in addition to the trust indicators and the cautions. compared: the arms of
    each load."""
    least = min(map(num_replicates, compared), default=0)
    if 1 < least < 5:
        yield (
            f"There are only {least} replicates: intervals over so few are wide and lean on normality. What happens in "
            f"one trace of ten, such as an overload, is in none of them with a chance of {fmt.percent(0.9**least)}; "
            "neither an interval nor a statement of no difference holds it then."
        )
    unfinished = sum(run.summary["num_unfinished"] for arm in arms for run in arm.runs)
    if unfinished:
        yield (
            f"{fmt.number(unfinished)} requests were unfinished when their run ended. They are censored, not dropped: "
            "quantiles are Kaplan–Meier's, a mean over them cannot be known, and each has failed its SLO."
        )
    unsent = sum(run.summary["num_unsent"] or 0 for arm in arms for run in arm.runs)
    if unsent:
        yield (
            f"{fmt.number(unsent)} requests of the traces were never sent: their session's earlier turn was ignored or "
            "aborted, or their run was cut off."
        )
    if slo is None:
        yield "No SLO was given, so there is no goodput."
    elif "lateness_s" in slo.limited:
        runs = [run for arm in arms for run in arm.runs]
        if num := sum(run.summary["deadlines"] is None for run in runs):
            yield (
                f"{fmt.number(num)} of {fmt.number(len(runs))} runs recorded no deadline: "
                "the limit on lateness binds no request of theirs."
            )
