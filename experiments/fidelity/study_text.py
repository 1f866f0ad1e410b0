"""What a simulated study says, as lines of Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.console.markdown import percent, table
from experiments.fidelity.study import OURS, WHOLE
from experiments.fidelity.study_fitting import Fitted
from experiments.fidelity.study_report import Score, Simulated, merged, scores

NAMES = {
    "e2e_mean": "E2E mean", "ttft_mean": "TTFT mean", "itl_mean": "ITL mean", "tpot_mean": "TPOT mean",
    "e2e_p90": "E2E P90", "e2e_p99": "E2E P99", "ttft_p90": "TTFT P90", "ttft_p99": "TTFT P99",
}  # fmt: skip


def study_lines(found: Sequence[Simulated], fits: Sequence[Fitted]) -> list[str]:
    """Configurations, signed errors of each run, the predictors beside each other, and what was fitted."""
    lines = ["## Configurations", ""]
    lines += [f"- {one.run.name} ({one.run.engine}): {one.used}" for one in found]
    lines += ["", "## Signed errors, %, (simulated - measured) / measured", "", _signed(found), ""]
    lines += _summed_up(found, fits)
    notes = [*merged(found), *_edges(fits)]
    return lines + (["## Notes", "", *(f"- {note}" for note in notes)] if notes else [])


def _summed_up(found: Sequence[Simulated], fits: Sequence[Fitted]) -> list[str]:
    """The predictors' errors over the runs, and what was fitted."""
    lines = []
    for part in dict.fromkeys(part for one in found for part in one.run.parts):
        rows, where = scores(found, part), "whole runs" if part == WHOLE else part
        lines += [f"## Mean absolute percentage errors, {where}", "", _mape(rows), "", *lowest_lines(rows), ""]
    return lines + (["## Fitted to the first half of each run's stages", "", _fitted(fits), ""] if fits else [])


def page_lines(found: Sequence[Simulated], fits: Sequence[Fitted]) -> list[str]:
    """The same, short: errors of whole runs, the predictors beside each other."""
    lines = ["## Signed errors of whole runs, %", "", _signed(found, stages=False), "", *_summed_up(found, fits)]
    return [f"{line.removeprefix('## ')}:" if line.startswith("## ") else line for line in lines]


def _fitted(fits: Sequence[Fitted]) -> str:
    rows = [
        [f"{one.who}: {name}", *(f"{scalar} {_value(scalar, value[scalar])}" for value in (found.given, found.fitted))]
        for one in fits
        for name, found in one.found.items()
        for scalar in found.fitted
    ]
    return table(["run", "as given", "fitted"], rows)


def _value(name: str, value: float) -> str:
    return f"{value / 1e3:,.0f} us" if name == "host" else f"{value:.3g}"


def _edges(fits: Sequence[Fitted]) -> list[str]:
    return [f"{name}: {note}" for one in fits for name, found in one.found.items() for note in found.notes]


def _signed(found: Sequence[Simulated], *, stages: bool = True) -> str:
    rows = []
    for one in found:
        for part in one.run.parts if stages else (WHOLE,):
            measured, ours = one.run.measured_ms[part], one.ours_ms[part]
            errors = [
                (ours[key] - measured[key]) / measured[key] if key in ours and measured.get(key) else None
                for key in NAMES
            ]
            rows.append([f"{one.run.name} {part}" if stages else one.run.name, *(percent(error) for error in errors)])
    return table(["run", *NAMES.values()], rows)


def _mape(rows: Sequence[Score]) -> str:
    """Where a predictor has not all runs, this simulator's error over its runs stands in brackets."""
    most = max(row.num_runs for row in rows)
    cells = []
    for row in rows:
        line = [row.who, str(row.num_runs)]
        for key in NAMES:
            text = percent(row.errors.get(key), signed=False)
            if row.num_runs < most and key in row.errors:
                text += f" [{percent(row.ours.get(key), signed=False)}]"
            line.append(text)
        cells.append(line)
    return table(["predictor", "runs", *NAMES.values()], cells)


def lowest_lines(rows: Sequence[Score]) -> list[str]:
    """Of each column, who is lowest of those that predict every run; then where others beat us on their own runs.

    Rows of --beside are none of them: they are this simulator under other overrides, chosen with the result in sight.
    """
    rows = [row for row in rows if not row.who.startswith(f"{OURS}, ")]
    most = max(row.num_runs for row in rows)
    said = []
    for key in NAMES:
        known = [row for row in rows if row.num_runs == most and key in row.errors]
        if known:
            best = min(known, key=lambda row: row.errors[key])
            said.append(f"{NAMES[key]} {best.who} ({percent(best.errors[key], signed=False)})")
    lines = [f"Lowest, of those that predict all {most} runs: {', '.join(said)}."]
    for row in rows:
        both = row.errors.keys() & row.ours.keys()
        better = [name for key, name in NAMES.items() if key in both and row.errors[key] < row.ours[key]]
        if row.who != OURS and row.num_runs < most and better:
            lines.append(f"Lower than {OURS} on its own {row.num_runs} runs: {row.who} ({', '.join(better)}).")
    return [" ".join(lines)]
