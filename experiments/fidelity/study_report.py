"""Simulates the runs of a study, fits scalars to their first stages, compares them with measurements and with other
predictors, and formats the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from analysis.load import Run
from analysis.progress import progressing
from experiments.configuration.config import RunConfig
from experiments.console import percent, table
from experiments.fidelity.fitting import (
    Found,
    Part,
    check_config,
    fitted_metrics,
    is_time,
    minimize,
    name_of,
    overrides_of,
)
from experiments.fidelity.simulating import composed, described, replaced, simulate, variant
from experiments.fidelity.study import METRICS, OURS, RECORDED, WHOLE, Parts, StudyRun, means, trace_of
from experiments.wiring.costs import build_cost
from testbed.errors import ConfigError, TestbedError
from testbed.foreign_text import shown

MERGED = 0.05  # if the number of gaps deviates by more than this share, ITL is not between tokens


Arms = dict[str, list[str]]  # name in the tables -> overrides: of this simulator as given first, then of each --beside


class Fitted(NamedTuple):
    """The fits of an arm. who: their name in the tables of the later stages. By run: the fit, and what it predicts of
    the later stages."""

    who: str
    found: dict[str, Found]
    predicted_ms: dict[str, Parts]


class Simulated(NamedTuple):
    run: StudyRun
    used: str  # the configuration, in one line
    ours_ms: Parts

    @property
    def predicted_ms(self) -> dict[str, Parts]:
        """By predictor, this simulator first."""
        return {OURS: self.ours_ms, **self.run.predicted_ms}

    def errors(self, who: str, part: str) -> dict[str, float]:
        """A predictor's signed errors, shares of the measured values; of the metrics that both sides have."""
        measured, predicted = self.run.measured_ms[part], self.predicted_ms[who][part]
        known = [name for name in METRICS if name in predicted and measured.get(name)]
        return {name: (predicted[name] - measured[name]) / measured[name] for name in known}


class Score(NamedTuple):
    """Mean absolute percentage errors of one predictor over its runs. ours: this simulator's over the same runs."""

    who: str
    num_runs: int
    errors: dict[str, float]
    ours: dict[str, float]


def arms_of(runs: Sequence[StudyRun], overrides: Sequence[str], variants: Sequence[str]) -> Arms:
    """This simulator, and itself under each --beside. Builds every cost model before anything is simulated; raises
    TestbedError if one cannot be built."""
    plain = [*RECORDED, *overrides]
    arms = {OURS: plain} | {f"{OURS}, {words}": [*plain, *variant(words)] for words in variants}
    for given in arms.values():
        for run in runs:
            try:
                build_cost(composed(run.settings, given))
            except TestbedError as error:
                raise _placed(error, run) from None
    return arms


def _placed(error: TestbedError, run: StudyRun) -> TestbedError:
    """The error with the run's place, if its own settings make the same one without the overrides."""
    try:
        build_cost(composed(run.settings, []))
    except TestbedError as own:
        return type(own)(f"{run.place}: {own}") if str(own) == str(error) else error
    return error


def simulate_study(runs: Sequence[StudyRun], arms: Arms, fits: Sequence[Fitted], command: str) -> list[Simulated]:
    """Simulates each run under each arm. The results of the first are ours; those of the others, and of fits, are added
    to the predictors of the run."""
    found = []
    with TemporaryDirectory(prefix="testbed-") as scratch:
        for run in progressing(list(runs), "simulate", "run"):
            configs = {who: composed(run.settings, given) for who, given in arms.items()}
            parts = {who: _simulated(run, config, Path(scratch, "run"), command) for who, config in configs.items()}
            ours = parts.pop(OURS)
            fitted = {one.who: one.predicted_ms[run.name] for one in fits if run.name in one.predicted_ms}
            known = replace(run, predicted_ms=parts | run.predicted_ms | fitted)
            found.append(Simulated(known, described(configs[OURS]), ours))
    return found


def _simulated(run: StudyRun, config: RunConfig, folder: Path, command: str) -> Parts:
    return means(simulate(config, trace_of(run, config.seed), folder, command), run)


def fit_study(runs: Sequence[StudyRun], arms: Arms, names: Sequence[str], command: str) -> list[Fitted]:
    """Fits the scalars `names` to the first half of each run's stages, for each arm and each run separately, as each
    stage has its own rate; the later stages judge them. A stage has almost ended before the next one begins, so the fit
    uses nothing of the later ones. Runs of one stage get none. Raises ConfigError with a message of one line."""
    several = [run for run in runs if len(run.stages) > 1]
    if not several:
        raise ConfigError("--fit: no run of the study has two stages, one to fit to and one to judge; leave it out")
    fits = []
    with TemporaryDirectory(prefix="testbed-") as scratch:
        folder = Path(scratch, "run")
        for who, given in arms.items():
            fits.append(fitted := Fitted(f"{who}, {'+'.join(names)} fitted", {}, {}))
            for run in several:
                num_first = len(run.stages) // 2
                first = replace(run, stages=run.stages[:num_first])
                found = _fit(first, names, composed(run.settings, given), folder, command)
                config = composed(run.settings, replaced(given, overrides_of(found.fitted)))
                parts = _simulated(run, config, folder, command)
                fitted.found[run.name] = found
                fitted.predicted_ms[run.name] = {part: parts[part] for part in run.parts[1 + num_first :]}
    return fits


def _fit(first: StudyRun, names: Sequence[str], config: RunConfig, folder: Path, command: str) -> Found:
    """first: a run with only the stages that are fitted to."""
    mine = [name for name in names if name != "link" or config.tensor_parallel_size > 1]
    check_config(mine or names, config, first.name)
    known = [(part, f"{name}_mean") for part in first.parts[1:] for name in fitted_metrics(names)]
    measured = {
        (part, name): first.measured_ms[part][name] for part, name in known if first.measured_ms[part].get(name)
    }

    def means_of(sim: Run) -> dict[tuple[str, str], float]:
        parts = means(sim, first)
        return {(part, name): parts[part][name] for part, name in measured if name in parts[part]}

    return minimize([Part(config, trace_of(first, config.seed), measured, means_of)], mine, folder, command)


def scores(found: Sequence[Simulated], part: str) -> list[Score]:
    """The errors of each predictor in one part (all, stage0, ...) of the runs, this simulator first."""
    rows = []
    for who in dict.fromkeys(who for one in found for who in one.predicted_ms):
        known = [one for one in found if part in one.run.parts and part in one.predicted_ms.get(who, {})]
        if known:
            errors, ours = ([one.errors(name, part) for one in known] for name in (who, OURS))
            rows.append(Score(who, len(known), _mean_sizes(errors), _mean_sizes(ours)))
    return rows


def _mean_sizes(errors: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean absolute error of each metric that every run has."""
    names = [name for name in METRICS if all(name in one for one in errors)]
    return {name: sum(abs(one[name]) for one in errors) / len(errors) for name in names}


def notes_on(found: Sequence[Simulated]) -> list[str]:
    """One line for each run whose measured ITL cannot be between tokens, and one that names fields not read."""
    lines = []
    for one in found:
        gaps, tokens = one.run.num_gaps, one.run.num_output_tokens
        if gaps is not None and abs(gaps / (tokens - 1) - 1) > MERGED:
            lines.append(
                f"{one.run.name}: measured (E2E - TTFT) / ITL is {gaps:.0f} gaps, and {tokens} tokens have "
                f"{tokens - 1}: tokens came in chunks or outputs were of another length; TPOT here is "
                "(E2E - TTFT) / (tokens - 1)"
            )
    unread = dict.fromkeys(name for one in found for name in one.run.unread)
    return lines + ([f"not read, of some run or all: {', '.join(map(shown, unread))}"] if unread else [])


def as_json(found: Sequence[Simulated], fits: Sequence[Fitted]) -> dict[str, Any]:
    parts = list(dict.fromkeys(part for one in found for part in one.run.parts))
    return {
        "kind": "study",
        "runs": [
            {"name": one.run.name, "used": one.used, "measured_ms": one.run.measured_ms, "simulated_ms": one.ours_ms,
             "predicted_ms": one.run.predicted_ms}
            for one in found
        ],
        "mape": {part: [score._asdict() for score in scores(found, part)] for part in parts},
        "notes": notes_on(found),
        "fits": [{"who": one.who, "runs": {name: run._asdict() for name, run in one.found.items()}} for one in fits],
    }  # fmt: skip


# --- formatting ---


def study_lines(found: Sequence[Simulated], fits: Sequence[Fitted]) -> list[str]:
    """Configurations, signed errors of each run, the errors of all predictors, and the fitted scalars."""
    lines = ["## Configurations", ""]
    lines += [f"- {one.run.name} ({one.run.engine}): {one.used}" for one in found]
    lines += ["", "## Signed errors, %, (simulated - measured) / measured", "", _signed(found), ""]
    lines += _summed_up(found, fits)
    notes = notes_on(found)
    notes += [f"{name}: {note}" for one in fits for name, fitted in one.found.items() for note in fitted.notes]
    return lines + (["## Notes", "", *(f"- {note}" for note in notes)] if notes else [])


def _summed_up(found: Sequence[Simulated], fits: Sequence[Fitted]) -> list[str]:
    lines = []
    for part in dict.fromkeys(part for one in found for part in one.run.parts):
        rows, where = scores(found, part), "whole runs" if part == WHOLE else part
        lines += [f"## Mean absolute percentage errors, {where}", "", _mape_table(rows), "", *lowest_lines(rows), ""]
    return lines + (["## Fitted to the first half of each run's stages", "", _fitted(fits), ""] if fits else [])


def page_lines(found: Sequence[Simulated], fits: Sequence[Fitted]) -> list[str]:
    """A short version of `study_lines`: signed errors of whole runs, the errors of all predictors, fitted scalars."""
    lines = ["## Signed errors of whole runs, %", "", _signed(found, stages=False), "", *_summed_up(found, fits)]
    return [f"{line.removeprefix('## ')}:" if line.startswith("## ") else line for line in lines]


def _fitted(fits: Sequence[Fitted]) -> str:
    rows = []
    for who, name, found in ((one.who, name, found) for one in fits for name, found in one.found.items()):
        for scalar in found.fitted:
            values = (found.given[scalar], found.fitted[scalar])
            said = [f"{value / 1e3:,.0f} us" if is_time(scalar) else f"{value:.3g}" for value in values]
            rows.append([f"{who}: {name}", *(f"{name_of(scalar)} {text}" for text in said)])
    return table(["run", "as given", "fitted"], rows)


def _signed(found: Sequence[Simulated], *, stages: bool = True) -> str:
    rows = []
    for one in found:
        for part in one.run.parts if stages else (WHOLE,):
            name, errors = f"{one.run.name} {part}" if stages else one.run.name, one.errors(OURS, part)
            rows.append([name, *(percent(errors.get(key)) for key in METRICS)])
    return table(["run", *METRICS.values()], rows)


def _mape_table(rows: Sequence[Score]) -> str:
    """If a predictor lacks runs, this simulator's error over the same runs is given in brackets."""
    most = max(row.num_runs for row in rows)
    cells = []
    for row in rows:
        line = [row.who, str(row.num_runs)]
        for key in METRICS:
            text = percent(row.errors.get(key), signed=False)
            if row.num_runs < most and key in row.errors:
                text += f" [{percent(row.ours.get(key), signed=False)}]"
            line.append(text)
        cells.append(line)
    return table(["predictor", "runs", *METRICS.values()], cells)


def lowest_lines(rows: Sequence[Score]) -> list[str]:
    """For each column the predictor with the lowest error of those that predict every run; then the columns in which
    others are better than this simulator on the runs that they predict.

    Rows of --beside do not count: they are this simulator under overrides that may be chosen with the result known.
    """
    rows = [row for row in rows if not row.who.startswith(f"{OURS}, ")]
    most = max(row.num_runs for row in rows)
    said = []
    for key in METRICS:
        known = [row for row in rows if row.num_runs == most and key in row.errors]
        if known:
            best = min(known, key=lambda row: row.errors[key])
            said.append(f"{METRICS[key]} {best.who} ({percent(best.errors[key], signed=False)})")
    if len(rows) == 1:
        return []
    lines = [f"Lowest, of those that predict all {most} runs: {', '.join(said)}."]
    for row in rows:
        both = row.errors.keys() & row.ours.keys()
        better = [name for key, name in METRICS.items() if key in both and row.errors[key] < row.ours[key]]
        if row.who != OURS and row.num_runs < most and better:
            lines.append(f"Lower than {OURS} on its own {row.num_runs} runs: {row.who} ({', '.join(better)}).")
    return [" ".join(lines)]
