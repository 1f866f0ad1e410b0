"""The report's section on the real engine: the simulator's errors, and whether it ranks policies the same way."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd

from analysis import format as fmt
from analysis.comparison import fidelity
from analysis.comparison.arms import by_load, grouped, infer_arms
from analysis.comparison.pairs import engine_of
from analysis.load import relative
from analysis.plots import study_plots as plots
from analysis.reports import fidelity_findings, tables
from analysis.reports.parts import ReportInput, Sections


def fidelity_section(report: ReportInput, sections: Sections, noise: Mapping[str, float]) -> dict[str, Any]:
    """The content of the section: tables, plot, sentences, and what was not measured."""
    not_measured = [*fidelity_findings.not_measured(report.arms, report.pairs)]
    if not report.pairs:
        nothing: dict[str, Any] = {name: [] for name in ("tables", "plots", "said", "warnings", "pairs")}
        return nothing | {"not_measured": not_measured, "setup": None, "errors": {}, "rankings": {}}
    matched = {pair.label: fidelity.match_requests(pair.sim, pair.real) for pair in report.pairs}
    errors = {pair.label: fidelity.error_table(*pair.runs) for pair in report.pairs}
    engines = list(dict.fromkeys(engine_of(pair.real) for pair in report.pairs))
    rankings = _rankings(report) if len(engines) == 1 else {}
    rows = [row for group in sections.compared for row in group.rows]
    caption = "One point a request. On the line the simulator is exact; the dashed lines are ±10 %."
    draw = partial(plots.sim_versus_real, matched)
    start = sections.out.parent
    return {
        "not_measured": not_measured,
        "errors": errors,
        "rankings": rankings,
        "said": fidelity_findings.fidelity_findings(report.pairs, errors, rankings, report.margin, noise),
        "warnings": fidelity_findings.smaller_than_error(rows, errors),
        "tables": [
            *([tables.side_by_side(report.pairs, engines)] if len(engines) > 1 else []),
            *tables.error_tables(errors),
            tables.request_error_table({label: fidelity.request_errors(frame) for label, frame in matched.items()}),
            *(tables.ranking_table(ranking, load) for load, ranking in fidelity_findings.ranked(rankings).items()),
        ],
        "plots": [sections.plot(draw, "sim_versus_real", "Each request, simulated and real", caption)],
        "setup": tables.setup_table("Setup of the real runs", [run for pair in report.pairs for run in pair.reals]),
        "pairs": [(pair.label, *(relative(run.path, start) for run in pair.runs)) for pair in report.pairs],
    }


def _rankings(report: ReportInput) -> dict[str, pd.DataFrame]:
    """Load ("" if there is only one) -> how the simulator and the real engine rank the policies that ran at it."""
    by_trace = grouped(report.pairs, lambda pair: pair.real.fingerprint).values()
    several = [pairs for pairs in by_trace if len(pairs) > 1]
    equal = [runs for pairs in by_trace for runs in fidelity.equal_runs({pair.label: pair.runs for pair in pairs})]
    found, noise = {}, fidelity.noise_limits(equal)
    reals = [pairs[0].real for pairs in several]
    name_of, loads = tables.replicate_names(reals), by_load(infer_arms(reals), report.replicated)
    at = {run.path: load for load, arms in loads.items() for arm in arms for run in arm.runs}
    for real, pairs in zip(reals, several, strict=True):
        rate = f"{fmt.significant(real.summary['throughput']['offered_per_s'] or 0.0)} requests/s"
        load = f"{at[real.path] or rate}, {name_of(real)}" if len(several) > 1 else ""
        if load in found:  # runs of other traces that their settings do not tell apart
            load += f" (trace {real.fingerprint})"
        by_policy = {pair.label: pair.runs for pair in pairs}
        found[load] = fidelity.ranking_agreement(by_policy, noise=noise, margin=report.margin)
    return found
