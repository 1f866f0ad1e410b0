"""At most two scalars of the device fitted to the first half of a study's stages; the other stages judge them.

Of each run by itself, as stages have a rate of their own. Only the first stages are simulated for the fit: a run has
ended with a stage, nearly, before the next one begins, so nothing of what judges was looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tqdm import tqdm

from experiments.fidelity.fitting import Found, Scalars, check_config, minimize, overrides_of
from experiments.fidelity.simulating import composed, replaced, simulate, variant
from experiments.fidelity.study import OURS, Parts, StudyRun, trace_of
from experiments.fidelity.study_report import RECORDED, means
from testbed.errors import ConfigError

_METRICS = ("tpot_mean", "e2e_mean")


class Fitted(NamedTuple):
    """who: the predictor that it makes, in the tables of the stages that judge it. found: of each run."""

    who: str
    found: dict[str, Found]


def fit_study(
    runs: Sequence[StudyRun], names: Sequence[str], overrides: Sequence[str], variants: Sequence[str], command: str
) -> tuple[list[StudyRun], list[Fitted]]:
    """The runs with this simulator, fitted, among the predictors of their later stages: under the overrides, and
    under each of `variants` too. Runs of one stage have none. Raises ConfigError in one line."""
    work = [(words, run) for words in ("", *variants) for run in runs if len(run.stages) > 1]
    if not work:
        raise ConfigError("--fit: no run of the study has two stages, one to fit to and one to judge; leave it out")
    predicted: dict[str, dict[str, Parts]] = {run.name: {} for run in runs}
    fits: dict[str, Fitted] = {}
    with TemporaryDirectory(prefix="testbed-") as scratch:
        for words, run in tqdm(work, "fit", disable=None):
            who = ", ".join(filter(None, (OURS, words, f"{'+'.join(names)} fitted")))
            more = [*RECORDED, *overrides, *(variant(words) if words else [])]
            found = _fit(run, names, more, Path(scratch), command)
            fits.setdefault(who, Fitted(who, {})).found[run.name] = found
            sim = _simulated(run, replaced(more, overrides_of(found.fitted)), Path(scratch), command)
            predicted[run.name][who] = {part: sim[part] for part in run.parts[1 + _num_fitted(run) :]}
    return [replace(run, predicted_ms={**run.predicted_ms, **predicted[run.name]}) for run in runs], list(fits.values())


def fits_json(fits: Sequence[Fitted]) -> list[dict[str, Any]]:
    """For fidelity.json."""
    return [{"who": one.who, "runs": {name: run._asdict() for name, run in one.found.items()}} for one in fits]


def _num_fitted(run: StudyRun) -> int:
    """The first stages, which it is fitted to."""
    return len(run.stages) // 2


def _fit(run: StudyRun, names: Sequence[str], overrides: Sequence[str], scratch: Path, command: str) -> Found:
    first = replace(run, stages=run.stages[: _num_fitted(run)])
    config = composed(run.settings, overrides)
    mine = [name for name in names if name != "link" or config.tensor_parallel_size > 1]
    check_config(mine or names, config, run.name)

    def loss(values: Scalars) -> float:
        sim = _simulated(first, replaced(overrides, overrides_of(values)), scratch, command)
        pairs = [(sim[part], run.measured_ms[part]) for part in first.parts[1:]]
        return sum(
            math.log(ours[name] / real[name]) ** 2
            for ours, real in pairs
            for name in _METRICS
            if name in ours and real.get(name)
        )

    return minimize(loss, mine, config)


def _simulated(run: StudyRun, overrides: Sequence[str], scratch: Path, command: str) -> Parts:
    return means(simulate(composed(run.settings, overrides), trace_of(run), scratch / "run", command), run)
