"""Simulates loads and compares them: signed errors next to the engine's spread, errors of steps, the ranking of
policies. Also formats the result as lines of Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import format as fmt
from analysis.comparison import fidelity
from analysis.comparison.arms import grouped, num_repeats
from analysis.comparison.fidelity import StepErrors, step_errors
from analysis.comparison.wording import winner_text
from analysis.load import Run
from analysis.measures.statistics import ENOUGH
from analysis.progress import progressing
from analysis.reading.frames import json_safe
from analysis.reports.fidelity_findings import alike_said, pace_said, probe_of, unlike_clocks
from experiments.configuration.config import RunConfig
from experiments.configuration.names import device_of_run
from experiments.configuration.options import options
from experiments.configuration.saved import unlike_the_engine
from experiments.console import milliseconds, percent, table
from experiments.fidelity.fitting import Fit, fit, halves, is_time, overrides_of
from experiments.fidelity.loads import Load
from experiments.fidelity.simulating import described, replaced, simulate
from experiments.runs.ending import without_numbers
from experiments.wiring.costs import calibration_of
from sim.cost.config import CalibratedConfig
from testbed.errors import ConfigError
from testbed.records.schema import GOOD_FIT

_WORDS = {
    "ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E", "mean": "mean", "p50": "P50", "p90": "P90",
    "p99": "P99", "requests_per_s": "requests/s", "output_tokens_per_s": "output tokens/s",
}  # fmt: skip
_THOUSAND = (250, 4000)  # how many times as long as simulated, if seconds were milliseconds


@dataclass(frozen=True)
class ComparedLoad:
    """One compared load. again: its repeats. errors: against the mean of the load and its repeats; requests, matched,
    steps and second are of the load only. noise: metric -> spread of the repeats. second: errors of the second half, as
    given and fitted; only with --fit."""

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
class FidelityResult:
    """All compared loads. rankings: for each trace that ran under several policies (names, table, notes)."""

    loads: tuple[ComparedLoad, ...]
    rankings: tuple[tuple[list[str], pd.DataFrame, list[str]], ...]
    fit: Fit | None


def compare(
    loads: Sequence[Load], overrides: Sequence[str], names: Sequence[str], folder: Path, scratch: Path, command: str
) -> FidelityResult:
    """Fits the scalars `names`, if any, and simulates every load. folder: for the simulated runs; those with fitted
    scalars go to a folder `fitted` beside it. Raises TestbedError with a message of one line."""
    # of runs of one trace and policy, the first one's trace is simulated and compared with the mean of all
    groups = list(grouped(loads, lambda load: (load.key, load.policy)).values())
    firsts = [group[0] for group in groups]
    for load in firsts:
        try:
            load.config(overrides)  # raises errors before anything runs
        except ConfigError as error:
            raise ConfigError(f"{load.name}: {error}" if len(firsts) > 1 else str(error)) from None
    fitted = fit(firsts, names, overrides, scratch, command) if names else None
    compared = []
    for group in progressing(groups, "fidelity", "run"):
        one = _compare(group, overrides, folder, command)
        if fitted is not None:
            one = replace(one, second=_second_half(one, fitted, overrides, folder, command))
        compared.append(one)
    return FidelityResult(tuple(compared), tuple(_rankings(compared)), fitted)


def _compare(group: Sequence[Load], overrides: Sequence[str], folder: Path, command: str) -> ComparedLoad:
    load = group[0]
    config = load.config(overrides)
    sim = simulate(config, load.trace, folder / load.place / "simulated", command, load.measured)
    matched = fidelity.match_requests(sim, load.measured)
    pair = tuple(_named(run, load.key) for run in (sim, *(one.measured for one in group)))
    steps = step_errors(sim, load.measured)
    manifest, notes = load.measured.manifest, (*_of_device(load, config), *_of_prices(group, config))
    if load.saved is not None and (said := unlike_the_engine(load.saved, config)):
        notes += (said,)
    if manifest.get("backend") != "sim":
        is_fitted = isinstance(config.cost, CalibratedConfig) and not notes
        notes += pace_said(steps, is_fitted=is_fitted, is_scaled=probe_of(manifest) is not None)
    errors = fidelity.error_table(*pair)
    notes += (*_of_units(load, errors), *without_numbers(config, sim.summary))
    of_repeats = [(one.name, note) for one in group[1:] for note in one.notes if note not in load.notes]
    of_several = grouped(of_repeats, lambda told: told[1]).items()
    notes += tuple(f"{fmt.listing([name for name, _ in those])}: {note}" for note, those in of_several)
    return ComparedLoad(
        load, tuple(group[1:]), sim, described(config), errors, fidelity.request_errors(matched),
        matched, fidelity.real_noise([pair[1:]]), steps, notes, pair,
    )  # fmt: skip


def _of_device(load: Load, config: RunConfig) -> tuple[str, ...]:
    """A note if the device of the run is not the simulated one, judged by name, or if it has no data sheet."""
    said, device = load.measured.manifest.get("device"), config.device
    known = None if said is None else device_of_run(str(said))
    is_own = device.kind == "cpu" or device.name not in options("device")  # drivers report no name that we know
    if said is not None and known != device.name and (known is not None or not is_own):
        return (f"measured on {said!r}, and simulated as device={device.name}: say which it is with device=…",)
    if device.kind == "cpu" and config.raw["cost"].get("name") == "roofline":
        return ("no data sheet knows a CPU's prices: `testbed calibrate` measures them (cost=calibrated cost.path=…)",)
    return ()


def _of_units(load: Load, errors: pd.DataFrame) -> tuple[str, ...]:
    """A note if the latencies of a file are all about 1,000 times as long as simulated ones, or as short."""
    known = errors.set_index("metric").loc[[f"{name}.p50" for name in fidelity.LATENCY_METRICS]].dropna()
    ratios = known["real"] / known["sim"]
    if load.saved is not None or ratios.empty:
        return ()
    if (1 / ratios).between(*_THOUSAND).all():
        return (
            "all latencies are about 1,000 times as short as simulated: if the file's times are in s, name them so",
        )
    if not ratios.between(*_THOUSAND).all():
        return ()
    return (
        "all latencies are about 1,000 times as long as simulated: if the file's times are in ms, divide them by 1,000",
    )


def _of_prices(group: Sequence[Load], config: RunConfig) -> tuple[str, ...]:
    """Notes: step times that were fitted badly, on another device, or to another number of threads; compared times that
    are not scaled in the same way (backend.pace=probe_scaled)."""
    clocks = {probe_of(one.measured.manifest) for one in group}
    notes: tuple[str, ...] = ()
    if isinstance(config.cost, CalibratedConfig):
        calibration = calibration_of(config, config.cost)
        fitted, own = calibration.manifest, calibration.quality["all"]
        if own.median > GOOD_FIT:
            notes += (
                f"the fit is {own.median:.1%} off in the median on steps that were left out of it, P90 {own.p90:.1%}",
            )
        clocks.add(fitted.probe_ns)
        manifest, fitted_on = group[0].measured.manifest, fitted.device_description
        measured_on = manifest.get("device")
        if manifest.get("backend") != "sim" and fitted_on and measured_on not in (None, fitted_on):
            notes += (f"measured on {measured_on!r}, and priced by what was fitted on {fitted_on!r}",)
    return *notes, *unlike_clocks(clocks)


def _second_half(
    one: ComparedLoad, fitted: Fit, overrides: Sequence[str], folder: Path, command: str
) -> tuple[pd.DataFrame, pd.DataFrame]:
    ids = halves(one.load.trace)[1]
    values = overrides_of(fitted.found.fitted)
    config = one.load.config(replaced(overrides, values))
    place = folder.with_name("fitted") / one.load.place / "fitted"
    sim = simulate(config, one.load.trace, place, command, one.load.measured)
    return fidelity.part_errors(one.sim, one.load.measured, ids), fidelity.part_errors(sim, one.load.measured, ids)


def _named(run: Run, key: str) -> Run:
    """The run with its load's key as fingerprint, so that repeats match although their send times differ slightly."""
    return replace(run, manifest={**run.manifest, "trace": {**run.manifest["trace"], "sent_fingerprint": key}})


def _rankings(compared: Sequence[ComparedLoad]) -> list[tuple[list[str], pd.DataFrame, list[str]]]:
    found = []
    for members in grouped(compared, lambda one: one.load.key).values():
        if len(members) > 1:
            pairs = {_policy_name(one, members): one.pair for one in members}
            reals = fidelity.equal_runs(pairs)
            ranking = fidelity.ranking_agreement(pairs, noise=fidelity.noise_limits(reals))
            noise = _noise_known(num_repeats(reals)) if ranking["num_policies"].max() > 1 else []
            found.append((list(pairs), ranking, [*alike_said(pairs), *noise]))
    return found


def _noise_known(num: int) -> list[str]:
    """A note on what counts as told apart, if the engine's spread is known from too few repeats for it, or not."""
    if not num:
        return [
            "each policy ran once, so how far the engine differs from itself is not known; what is more than 2 % apart "
            "counts as told apart"
        ]
    few = f"the engine's spread is known from {fmt.count(num, 'repeat')} only, so it is widened for what counts as told"
    return [f"{few} apart (docs/fidelity.md)"] if num < ENOUGH else []


def _policy_name(one: ComparedLoad, members: Sequence[ComparedLoad]) -> str:
    names = [str(other.load.measured.manifest.get("scheduler")) for other in members]
    mine = str(one.load.measured.manifest.get("scheduler"))
    return mine if names.count(mine) == 1 else one.load.name


def as_json(found: FidelityResult) -> dict[str, Any]:
    loads = [
        {
            "name": one.load.name, "folder": one.load.place, "source": one.load.source, "used": one.used,
            "notes": [*one.load.notes, *one.notes],
            "num_requests": len(one.matched), "repeats": [again.name for again in one.again], "errors": one.errors,
            "requests": one.requests, "noise": one.noise, "steps": one.steps,
            "second_half": one.second and dict(zip(("as_given", "fitted"), one.second, strict=True)),
        }
        for one in found.loads
    ]  # fmt: skip
    rankings = [{"policies": names, "metrics": frame, "notes": notes} for names, frame, notes in found.rankings]
    fitted = None if found.fit is None else found.fit._asdict()
    if fitted is not None:
        fitted |= fitted.pop("found")._asdict()
    safe: dict[str, Any] = json_safe({"kind": "loads", "loads": loads, "rankings": rankings, "fit": fitted})
    return safe


# --- formatting ---


def metric_name(path: str) -> str:
    """The name of a metric in tables: "TTFT P99" for `ttft_s.p99`."""
    return " ".join(_WORDS[part] for part in path.split(".") if part != "throughput")


def comparison_lines(found: FidelityResult) -> list[str]:
    lines: list[str] = []
    for one in found.loads:
        lines += [*_load(one), ""]
    if found.fit is not None:
        lines += [*_fitted(found.fit), "", *_second_halves(found.loads, found.fit.metrics), ""]
        for one in found.loads:
            lines += [*_second_half_lines(one), ""]
    for names, frame, notes in found.rankings:
        lines += ["## Ranking", "", *(f"- {name}" for name in names), "", *(f"note: {note}" for note in notes), ""]
        lines += [_ranking(frame), ""] if frame["num_policies"].max() > 1 else []
    return lines[:-1]


def _load(one: ComparedLoad) -> list[str]:
    lines = [
        f"## {one.load.name}",
        "",
        f"{one.load.source}, {fmt.count(len(one.matched), 'request')} matched one to one; {one.used}",
    ]
    if one.again:
        names = ", ".join(again.name for again in (one.load, *one.again))
        lines.append(f"measured: the mean of {names}; spread: the largest over the smallest, minus 1")
    lines += [f"note: {note}" for note in (*one.load.notes, *one.notes)]
    headers = ["metric", "measured", "simulated", "error %", *(["spread %"] if one.again else [])]
    rows = []
    for row in one.errors.to_dict("records"):
        path = str(row["metric"])
        cells = [_value(path, row["real"]), _value(path, row["sim"]), percent(row["error"])]
        spread = [percent(one.noise.get(path), signed=False)] if one.again else []
        unit = "" if path.startswith("throughput") else ", ms"
        rows.append([metric_name(path) + unit, *cells, *spread])
    whose = f", of {one.load.name}" if one.again else ""
    lines += ["", table(headers, rows), "", f"Single requests{whose}:", "", _requests(one.requests)]
    if one.steps is not None:
        lines += [
            "", f"Steps of the same shape, {one.steps.num_compared} of {one.steps.num_steps} measured ones; times are "
            "medians of their shapes', the error is the median of each shape's own:", "",
            _steps(one.steps.by_region, "region"), "", _steps(one.steps.by_decodes, "decode steps of up to"),
        ]  # fmt: skip
    return lines


def _value(path: str, value: float) -> str:
    if path.startswith("throughput"):
        return "–" if value != value else f"{value:.4g}"
    return milliseconds(value)


def _requests(frame: pd.DataFrame) -> str:
    rows = [
        [_WORDS[str(row["metric"])], str(row["num"]), percent(row["median_error"]),
         percent(row["abs_error_p90"], signed=False), percent(row["abs_error_p99"], signed=False)]
        for row in frame.to_dict("records")
    ]  # fmt: skip
    return table(["latency", "requests", "median error %", "P90 of absolute error %", "P99"], rows)


def _steps(frame: pd.DataFrame, what: str) -> str:
    rows = []
    for row in frame.to_dict("records"):
        group = row["group"] if isinstance(row["group"], str) else f"{row['group']:g}"
        times = milliseconds(row["measured_s"]), milliseconds(row["sim_s"])
        rows.append([group, str(row["num_steps"]), *times, percent(row["error"])])
    return table([what, "steps", "measured, ms", "simulated, ms", "median error %"], rows)


def _fitted(fit: Fit) -> list[str]:
    found = fit.found
    scored = ", ".join(
        f"{num} of {name} ({'all' if name in fit.not_apart else 'that ended before the last one came'})"
        for name, num in fit.num_scored.items()
    )
    metrics = "mean TPOT, E2E and TTFT" if "ttft_s.mean" in fit.metrics else "mean TPOT and E2E"
    lines = [
        "## Fitted", "",
        f"On the first half of each run's requests by arrival, scored: {scored}. Squared log errors of {metrics}: "
        f"{found.losses[0]:.3g} as given, {found.losses[1]:.3g} fitted, in {found.num_simulations} simulations.", "",
    ]  # fmt: skip
    if fit.not_apart:
        lines[-1:] = [
            f"note: too few of {', '.join(fit.not_apart)} had ended by then, so all of the half is scored; the second "
            "half's arrivals and lengths are load, and what was measured there is not looked at", "",
        ]  # fmt: skip
    rows = []
    for key, value in found.fitted.items():
        texts = [f"{number:.0f}" if is_time(key) else f"{number:.3f}" for number in (found.given[key], value)]
        rows.append([key, *texts])
    return [*lines, table(["scalar", "as given", "fitted"], rows), *(f"\nnote: {note}" for note in found.notes)]


def _second_halves(loads: Sequence[ComparedLoad], fitted_to: Sequence[str]) -> list[str]:
    """The errors of all second halves in sum, and whether the fit is better there in the metrics that it was for."""
    halves = [one.second for one in loads if one.second is not None]
    errors = [pd.concat(frames).set_index("metric")["error"].abs() for frames in zip(*halves, strict=True)]
    means = [values.groupby(level="metric").mean().dropna() for values in errors]  # as given, fitted
    shown = [path for path in _SUMMED if path in means[0] and path in means[1]]
    rows = [[metric_name(path), *(percent(mean[path], signed=False) for mean in means)] for path in shown]
    worse = [metric_name(path) for path in shown if path in fitted_to and means[1][path] >= means[0][path]]
    said = [f"\nnote: the fit is no better on the halves that it has not seen: {', '.join(worse)}"] if worse else []
    return [table(["mean of absolute errors, second halves", "as given, %", "fitted, %"], rows), *said]


_SUMMED = ("ttft_s.mean", "tpot_s.mean", "e2e_s.mean", "ttft_s.p99", "tpot_s.p99", "e2e_s.p99")


def _second_half_lines(one: ComparedLoad) -> list[str]:
    assert one.second is not None
    given, fitted = one.second
    rows = [
        [metric_name(str(a["metric"])) + ", ms", milliseconds(a["real"]), percent(a["error"]), percent(b["error"])]
        for a, b in zip(given.to_dict("records"), fitted.to_dict("records"), strict=True)
    ]
    headers = ["metric", "measured", "as given, error %", "fitted, error %"]
    return [f"### {one.load.name}: second half, which nothing was fitted to", "", table(headers, rows)]


def _ranking(frame: pd.DataFrame) -> str:
    rows = []
    for row in frame.to_dict("records"):
        tau, num_apart = row["kendall_tau"], row["num_told_apart"]
        is_tie = tau is None or tau != tau  # all equal on one side
        same = "–" if not row["winner_is_clear"] else "yes" if row["same_winner"] else "no"
        rows.append([
            metric_name(str(row["metric"])), "a tie" if is_tie else f"{tau:+.2f}" if num_apart else "–",
            winner_text(row["real_winner"]), winner_text(row["sim_winner"]), same,
            f"{row['num_same_order']} of {num_apart}" if num_apart else "none told apart",
        ])  # fmt: skip
    headers = ["metric", "Kendall's tau", "measured best", "simulated best", "same", "pairs in order, of those apart"]
    return table(headers, rows)
