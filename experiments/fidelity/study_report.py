"""A study's runs simulated, and set beside what was measured and what others predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from analysis.load import Run
from analysis.reading.frames import numbers
from experiments.fidelity.simulating import composed, described, simulate, variant
from experiments.fidelity.study import METRICS, OURS, WHOLE, Parts, StudyRun, trace_of
from experiments.wiring.costs import build_cost

RECORDED = ["record.steps=false", "record.token_times=false"]  # what the means need
MERGED = 0.05  # of the gaps: where so many more are missing, ITL is not between tokens


class Simulated(NamedTuple):
    """A run of the study and what was simulated of it."""

    run: StudyRun
    used: str  # the configuration, in one line
    ours_ms: Parts


class Score(NamedTuple):
    """Mean absolute percentage errors of one predictor over its runs. ours: this simulator's over the same runs."""

    who: str
    num_runs: int
    errors: dict[str, float]
    ours: dict[str, float]


def check_study(runs: Sequence[StudyRun], overrides: Sequence[str], variants: Sequence[str]) -> None:
    """Raises TestbedError for a configuration that cannot be priced, before anything is simulated."""
    for more in ([], *map(variant, variants)):
        for run in runs:
            build_cost(composed(run.settings, [*overrides, *more]))


def simulate_study(runs: Sequence[StudyRun], overrides: Sequence[str], command: str) -> list[Simulated]:
    """Each run simulated."""
    configs = [composed(run.settings, [*RECORDED, *overrides]) for run in runs]
    found = []
    with TemporaryDirectory(prefix="testbed-") as scratch:
        for number, (run, config) in enumerate(tqdm(list(zip(runs, configs, strict=True)), "simulate", disable=None)):
            simulated = simulate(config, trace_of(run), Path(scratch, str(number)), command)
            found.append(Simulated(run, described(config), means(simulated, run)))
    return found


def beside(runs: Sequence[StudyRun], overrides: Sequence[str], variants: Sequence[str], command: str) -> list[StudyRun]:
    """The runs with what this simulator says of them under more overrides, as if they were other predictors'."""
    found = list(runs)
    for words in reversed(variants):
        simulated = simulate_study(runs, [*overrides, *variant(words)], command)
        found = [
            replace(run, predicted_ms={f"{OURS}, {words}": one.ours_ms, **run.predicted_ms})
            for run, one in zip(found, simulated, strict=True)
        ]
    return found


def means(simulated: Run, run: StudyRun) -> Parts:
    """The study's metrics of a simulated run, ms, by stage of arrival. ITL: of all gaps together, so as TPOT, as all
    outputs are of one length; of one token there is neither."""
    frame = simulated.requests
    stage = frame["request_id"].str.partition("-")[0].to_numpy()
    arrival, finish = numbers(frame, "arrival_ns"), numbers(frame, "finish_ns")
    ttft, tpot, e2e = numbers(frame, "ttft_s"), numbers(frame, "tpot_s"), (finish - arrival) / 1e9
    found: Parts = {}
    for part in run.parts:
        mine = np.ones(len(frame), dtype=bool) if part == WHOLE else stage == part
        found[part] = {}
        if run.num_output_tokens > 1:
            found[part] = dict.fromkeys(("tpot_mean", "itl_mean"), 1e3 * float(tpot[mine].mean()))
        for name, values in (("ttft", ttft[mine]), ("e2e", e2e[mine])):
            found[part][f"{name}_mean"] = 1e3 * float(values.mean())
            for level in (90, 99):
                found[part][f"{name}_p{level}"] = 1e3 * float(np.quantile(values, level / 100))
    return found


def scores(found: Sequence[Simulated], part: str) -> list[Score]:
    """Each predictor's errors in one part of the runs, this simulator first."""
    runs = [one for one in found if part in one.run.parts]
    others = list(dict.fromkeys(who for one in runs for who in one.run.predicted_ms))
    rows = []
    for who in (OURS, *others):
        known = [one for one in runs if who == OURS or part in one.run.predicted_ms.get(who, {})]
        theirs = [one.ours_ms if who == OURS else one.run.predicted_ms[who] for one in known]
        if known:
            measured = [one.run.measured_ms[part] for one in known]
            errors = _mape([parts[part] for parts in theirs], measured)
            rows.append(Score(who, len(known), errors, _mape([one.ours_ms[part] for one in known], measured)))
    return rows


def _mape(predicted: Sequence[dict[str, float]], measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """Per metric that every run has: the mean of |predicted - measured| / measured, a share."""
    found = {}
    for name in METRICS:
        pairs = [(mine.get(name), real.get(name)) for mine, real in zip(predicted, measured, strict=True)]
        known = [abs(mine - real) / real for mine, real in pairs if mine is not None and real]
        if pairs and len(known) == len(pairs):
            found[name] = sum(known) / len(known)
    return found


def merged(found: Sequence[Simulated]) -> list[str]:
    """Runs whose measured ITL cannot be between tokens, a line each."""
    lines = []
    for one in found:
        gaps, tokens = one.run.num_gaps(WHOLE), one.run.num_output_tokens
        if gaps is not None and abs(gaps / (tokens - 1) - 1) > MERGED:
            lines.append(
                f"{one.run.name}: measured (E2E - TTFT) / ITL is {gaps:.0f} gaps, and {tokens} tokens have "
                f"{tokens - 1}: tokens came in chunks or outputs were of another length; TPOT here is "
                "(E2E - TTFT) / (tokens - 1)"
            )
    return lines


def as_json(found: Sequence[Simulated]) -> dict[str, Any]:
    """All of it, for fidelity.json."""
    parts = list(dict.fromkeys(part for one in found for part in one.run.parts))
    return {
        "kind": "study",
        "runs": [
            {"name": one.run.name, "used": one.used, "measured_ms": one.run.measured_ms, "simulated_ms": one.ours_ms,
             "predicted_ms": one.run.predicted_ms}
            for one in found
        ],
        "mape": {part: [score._asdict() for score in scores(found, part)] for part in parts},
        "notes": merged(found),
    }  # fmt: skip
