"""Loads simulated and compared: signed errors beside the engine's own spread, residuals of steps, the ranking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from analysis.comparison.arms import grouped
from analysis.comparison.fidelity import (
    error_table,
    match_requests,
    part_errors,
    ranking_agreement,
    real_noise,
    request_errors,
)
from analysis.comparison.step_fidelity import StepErrors, step_errors
from analysis.load import Run
from analysis.reading.frames import json_safe
from analysis.reports.fidelity_findings import probe_of, unlike_clocks
from experiments.configuration.config import RunConfig
from experiments.configuration.names import device_of_run
from experiments.fidelity.fitting import Fit, fit, halves, overrides_of
from experiments.fidelity.loads import Load
from experiments.fidelity.simulating import described, replaced, simulate
from sim.cost.calibration_file import load_calibration


@dataclass(frozen=True)
class Compared:
    """One load. again: its repeats. errors: of the mean over it and them; requests, matched, steps and second are its
    own. noise: of each metric, how far repeats are apart; second: errors of the second half, as given and fitted, with
    --fit."""

    load: Load
    again: tuple[Load, ...]
    sim: Run
    used: str
    errors: pd.DataFrame
    requests: pd.DataFrame  # errors of single requests
    matched: pd.DataFrame
    noise: dict[str, float]
    steps: StepErrors | None
    notes: tuple[str, ...]
    pair: tuple[Run, ...]  # the simulation and what it is compared with: the measured run and its repeats
    second: tuple[pd.DataFrame, pd.DataFrame] | None = None


@dataclass(frozen=True)
class Comparison:
    """All loads; rankings: of each trace that ran under several policies."""

    loads: tuple[Compared, ...]
    rankings: tuple[tuple[str, pd.DataFrame], ...]
    fit: Fit | None


def compare(
    loads: Sequence[Load], overrides: Sequence[str], names: Sequence[str], folder: Path, scratch: Path, command: str
) -> Comparison:
    """Simulates every load, and fits `names` first. folder: of the simulated runs. Raises TestbedError in one line."""
    # runs of one trace and policy: the first one's trace is simulated and compared with the mean of all
    groups = list(grouped(loads, lambda load: (load.key, load.policy)).values())
    firsts = [group[0] for group in groups]
    for load in firsts:
        load.config(overrides)  # what is wrong is said before anything runs
    fitted = fit(firsts, names, overrides, scratch, command) if names else None
    compared = []
    for group in tqdm(groups, desc="fidelity", unit="run", disable=None, leave=False):
        one = _compare(group, overrides, folder, command)
        if fitted is not None:
            one = replace(one, second=_second_half(one, fitted, overrides, folder, command))
        compared.append(one)
    return Comparison(tuple(compared), tuple(_rankings(compared)), fitted)


def _compare(group: Sequence[Load], overrides: Sequence[str], folder: Path, command: str) -> Compared:
    load = group[0]
    config = load.config(overrides)
    sim = simulate(config, load.trace, folder / load.name / "simulated", command)
    matched = match_requests(sim, load.measured)
    pair = tuple(_named(run, load.key) for run in (sim, *(one.measured for one in group)))
    notes = (*_of_device(load, config), *_of_prices(group, config))
    return Compared(
        load, tuple(group[1:]), sim, described(config), error_table(*pair), request_errors(matched), matched,
        real_noise([pair[1:]]), step_errors(sim, load.measured), notes, pair,
    )  # fmt: skip


def _of_device(load: Load, config: RunConfig) -> tuple[str, ...]:
    """A note where the run's device is another than the one that is simulated, by its name, or has no data sheet."""
    said, device = load.measured.manifest.get("device"), config.device
    known = None if said is None else device_of_run(str(said))
    is_own = device.kind == "cpu" or device.path is not None  # of which no driver says a name that we know
    if said is not None and known != device.name and (known is not None or not is_own):
        return (f"measured on {said!r}, and simulated as device={device.name}: say which it is with device=…",)
    if device.kind == "cpu" and config.raw["cost"].get("name") == "roofline":
        return ("no data sheet knows a CPU's prices: `testbed calibrate` measures them (cost=calibrated cost.path=…)",)
    return ()


def _of_prices(group: Sequence[Load], config: RunConfig) -> tuple[str, ...]:
    """A note where prices were fitted on another device, or to another number of its threads; and where times that are
    compared are of different clocks (backend.pace=probe_scaled)."""
    clocks = {probe_of(one.measured.manifest) for one in group}
    notes: tuple[str, ...] = ()
    if config.raw["cost"].get("name") == "calibrated":
        fitted = load_calibration(Path(config.raw["cost"]["path"])).manifest
        clocks.add(fitted.probe_ns)
        manifest, fitted_on = group[0].measured.manifest, fitted.device_description
        measured_on = manifest.get("device")
        if manifest.get("backend") != "sim" and fitted_on and measured_on not in (None, fitted_on):
            notes = (f"measured on {measured_on!r}, and priced by what was fitted on {fitted_on!r}",)
    return *notes, *unlike_clocks(clocks)


def _second_half(
    one: Compared, fitted: Fit, overrides: Sequence[str], folder: Path, command: str
) -> tuple[pd.DataFrame, pd.DataFrame]:
    ids = halves(one.load.trace)[1]
    values = overrides_of(fitted.found.fitted)
    config = one.load.config(replaced(overrides, values))
    sim = simulate(config, one.load.trace, folder / one.load.name / "fitted", command)
    return part_errors(one.sim, one.load.measured, ids), part_errors(sim, one.load.measured, ids)


def _named(run: Run, key: str) -> Run:
    """The run under its load's key, so that repeats pair although a client's clock sent them microseconds apart."""
    return replace(run, manifest={**run.manifest, "trace": {**run.manifest["trace"], "fingerprint": key}})


def _rankings(compared: Sequence[Compared]) -> list[tuple[str, pd.DataFrame]]:
    found = []
    for members in grouped(compared, lambda one: one.load.key).values():
        if len(members) > 1:
            pairs = {_policy_name(one, members): one.pair for one in members}
            noise: dict[str, float] = {}
            for one in members:
                noise |= {path: max(value, noise.get(path, 0.0)) for path, value in one.noise.items()}
            found.append((", ".join(pairs), ranking_agreement(pairs, noise=noise)))
    return found


def _policy_name(one: Compared, members: Sequence[Compared]) -> str:
    names = [str(other.load.measured.manifest.get("scheduler")) for other in members]
    mine = str(one.load.measured.manifest.get("scheduler"))
    return mine if names.count(mine) == 1 else one.load.name


def as_json(found: Comparison) -> dict[str, Any]:
    """All of it, for fidelity.json."""
    loads = [
        {
            "name": one.load.name, "source": one.load.source, "used": one.used, "notes": [*one.load.notes, *one.notes],
            "num_requests": len(one.matched), "repeats": [again.name for again in one.again], "errors": one.errors,
            "requests": one.requests, "noise": one.noise, "steps": one.steps,
            "second_half": one.second and dict(zip(("as_given", "fitted"), one.second, strict=True)),
        }
        for one in found.loads
    ]  # fmt: skip
    rankings = [{"policies": names, "metrics": frame} for names, frame in found.rankings]
    fitted = None if found.fit is None else found.fit._asdict()
    if fitted is not None:
        fitted |= fitted.pop("found")._asdict()
    safe: dict[str, Any] = json_safe({"kind": "loads", "loads": loads, "rankings": rankings, "fit": fitted})
    return safe
