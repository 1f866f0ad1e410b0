"""Fits at most two scalars to the first half of each load; they are evaluated on the second half.

host: device.step_overhead_ns. kernels: device.kernel_factor, a factor on the times of kernels. link:
device.interconnect_factor, the same for collectives. frontend: backend.frontend_ns, before a request is in the engine.
With cost=calibrated, host and kernels are factors on the calibrated times: cost.host_factor and cost.device_factor.

The fit does not use the second half. Only the first half's requests are simulated. Of these, only requests are scored
that had ended in the measured run before the half's last one arrived, so the second half cannot have slowed them down.
In an overload hardly any request has ended by then. In this case the whole trace is simulated and all of the first half
is scored: the second half's arrivals and lengths are used as load, but its measured times are not.

In a study they are fitted to the first half of each run's stages, for each run separately, as each stage has its own
rate; the later stages evaluate them. Only the first stages are simulated for the fit. A stage has almost ended before
the next one begins, so the fit uses nothing of the later stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from analysis.load import Run
from analysis.progress import progress
from analysis.reading.frames import numbers
from experiments.configuration.config import RunConfig
from experiments.fidelity.loads import Load
from experiments.fidelity.simulating import composed, replaced, simulate, variant
from experiments.fidelity.study import OURS, RECORDED, Parts, StudyRun, means, trace_of
from sim.cost.config import CalibratedConfig
from testbed.errors import ConfigError
from testbed.foreign_text import unknown
from testbed.traces.schema import Trace

KEYS = {
    "host": "device.step_overhead_ns", "kernels": "device.kernel_factor", "link": "device.interconnect_factor",
    "frontend": "backend.frontend_ns",
}  # fmt: skip
KEYS_OF_CALIBRATED = {"host": "cost.host_factor", "kernels": "cost.device_factor"}
NAMES = tuple(KEYS)
MAX_NAMES = 2
_NS = (1e3, 1e8)  # searched: from 1 us to 100 ms
_SOME_NS = 1e6  # start of the search for a smaller given value, as around 0 nothing changes
_FACTOR = (1 / 64, 64.0)
_NEAR = (1.0, 0.95, 0.965, 0.98, 0.99, 1.01, 1.02, 1.035, 1.05)  # tried around a minimum: the loss is not smooth

Scalars = dict[str, float]  # key of the configuration -> its value: ns, or a factor
Loss = Callable[[Scalars], float]
MIN_REQUESTS = 4  # of a half
MIN_APART = 0.25  # share of a half; if fewer had ended in time, the second half is needed as load
_METRICS = ("tpot", "e2e")
MAX_TRIED = 120  # simulations in the search for two scalars


class Found(NamedTuple):
    """The result of a fit. losses: on the fitted part, before and after the fit."""

    given: Scalars
    fitted: Scalars
    losses: tuple[float, float]
    notes: tuple[str, ...]


def parse_names(text: str | None) -> tuple[str, ...]:
    """The scalars named by --fit. Raises ConfigError for unknown, repeated or too many names."""
    names = () if text is None else tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in NAMES:
            raise ConfigError(unknown(f"--fit has {name!r}", name, NAMES))
    if len(set(names)) < len(names):
        raise ConfigError(f"--fit is {text!r}; name each of {', '.join(NAMES)} once")
    if len(names) > MAX_NAMES:
        raise ConfigError(f"--fit is {text!r}; at most {MAX_NAMES}: a simulator with many free numbers fits anything")
    return names


def check_config(names: Sequence[str], config: RunConfig, who: str) -> None:
    """Raises ConfigError if the scalars cannot be fitted to a run of this configuration."""
    if "link" in names and config.tensor_parallel_size == 1:
        raise ConfigError(f"--fit link: {who} ran on one device, which has no collectives; leave link out")


def name_of(key: str) -> str:
    """The scalar of this key, as --fit names it."""
    return next(name for keys in (KEYS, KEYS_OF_CALIBRATED) for name, own in keys.items() if own == key)


def is_time(key: str) -> bool:
    """Whether the scalar of this key is a whole number of ns; others are factors."""
    return key.endswith("_ns")


def settings_of(values: Scalars) -> dict[str, float]:
    return {key: round(value) if is_time(key) else value for key, value in values.items()}


def overrides_of(values: Scalars) -> list[str]:
    return [f"{key}={value}" for key, value in settings_of(values).items()]


def given_by(config: RunConfig, name: str) -> tuple[str, float]:
    """The key of a scalar under the configuration's cost model, and its value there."""
    own = KEYS_OF_CALIBRATED if isinstance(config.cost, CalibratedConfig) else {}
    key = own.get(name, KEYS[name])
    group, _, field = key.partition(".")
    return key, float(getattr(getattr(config, group), field))


def _metrics(names: Sequence[str]) -> tuple[str, ...]:
    """The fitted metrics; TTFT is among them for `frontend`, which has an effect on almost nothing else."""
    return (*_METRICS, "ttft") if "frontend" in names else _METRICS


def minimize(loss: Loss, names: Sequence[str], config: RunConfig) -> Found:
    """The scalars with the smallest loss; the search starts at those of the configuration. Raises ConfigError with a
    message of one line, also if a scalar has no effect."""
    with progress("fit", "trial") as bar:

        def counted(values: Scalars) -> float:
            bar.update()
            return loss(values)

        return _minimize(counted, names, config)


def _minimize(loss: Loss, names: Sequence[str], config: RunConfig) -> Found:
    given = dict(given_by(config, name) for name in names)
    base = loss(given)
    for name, changed in zip(names, given, strict=True):
        low, high = _edges(changed)
        other = max(given[changed] * 4, 4 * low) if given[changed] * 4 < high else given[changed] / 4
        if loss({key: other if key == changed else value for key, value in given.items()}) == base:
            others = [f"cost={cost}" for cost in ("calibrated", "roofline", "tables")][name not in KEYS_OF_CALIBRATED :]
            raise ConfigError(
                f"--fit {name}: cost={config.raw['cost'].get('name')} does not depend on it; choose "
                f"{', '.join(others[:-1])} or {others[-1]}"
            )
    fitted, notes = _search(loss, given)
    losses = base, loss(fitted)
    if losses[1] > losses[0]:  # the search missed the given values
        fitted, losses = dict(given), (losses[0], losses[0])
    return Found(given, fitted, losses, (*notes, *_at_edge(given, fitted)))


def _search(loss: Loss, given: Scalars) -> tuple[Scalars, list[str]]:
    """Searches over logarithms: bounded (golden section and parabolas) for one scalar, Nelder-Mead for two. Returns the
    scalars and notes on the search."""
    from scipy import optimize  # slow to import

    def values(logs: Sequence[float]) -> Scalars:
        return {key: math.exp(float(log)) for key, log in zip(given, logs, strict=True)}

    bounds = [(math.log(low), math.log(high)) for low, high in map(_edges, given)]
    if len(given) == 1:
        one = optimize.minimize_scalar(
            lambda log: loss(values([log])), bounds=bounds[0], method="bounded", options={"xatol": 1e-3, "maxiter": 60}
        )
        return min((values([one.x + math.log(near)]) for near in _NEAR), key=loss), []
    logs = [math.log(max(value, _SOME_NS if is_time(key) else 1e-9)) for key, value in given.items()]
    start = [min(max(log, low), high) for log, (low, high) in zip(logs, bounds, strict=True)]
    minimum: Any = optimize.minimize  # the type stubs lack initial_simplex
    num_tried = 0
    for step in (0.7, -0.3, 0.3):  # again from where it came to rest: the loss is not smooth, and rests on slopes, too
        options: Any = {
            "xatol": 2e-3, "fatol": 1e-7, "maxfev": MAX_TRIED - num_tried,
            "initial_simplex": [start, [start[0] + step, start[1]], [start[0], start[1] + step]],
        }  # fmt: skip
        both = minimum(
            lambda logs: loss(values(logs)), np.array(start), method="Nelder-Mead", bounds=bounds, options=options
        )
        start, num_tried = both.x.tolist(), num_tried + both.nfev
        if num_tried >= MAX_TRIED:
            break
    if both.success:
        return values(start), []
    ended = f"the search for {' and '.join(given)} ended after {num_tried} simulations, before it came to rest"
    return values(start), [f"{ended}: what fits best may lie further on"]


def _edges(key: str) -> tuple[float, float]:
    return _NS if is_time(key) else _FACTOR


def _at_edge(given: Scalars, fitted: Scalars) -> list[str]:
    """Notes on scalars at the edge of the search range, except for given values and times near 0."""
    said = []
    for key, value in fitted.items():
        low, high = _edges(key)
        is_inside = value < high / 1.05 and (value > low * 1.05 or is_time(key))
        if not is_inside and value != given[key]:
            unit = " ns" if is_time(key) else ""
            said.append(
                f"{key} came to the edge of what is searched ({low:g} to {high:g}{unit}): something else is off"
            )
    return said


# --- the loads ---


class Fit(NamedTuple):
    """metrics: those that were fitted, such as `tpot_s.mean`."""

    found: Found
    metrics: tuple[str, ...]
    num_scored: dict[str, int]  # load -> scored requests
    not_apart: tuple[str, ...]  # loads for which the second half was simulated as load
    num_simulations: int


class _Half(NamedTuple):
    load: Load
    trace: Trace  # the first half, or the whole trace if not is_apart
    is_apart: bool
    scored: tuple[str, ...]
    measured: dict[str, float]  # means of the scored requests


def halves(trace: Trace) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The request ids of the first and of the second half, by arrival."""
    ids = [row.request_id for row in trace.rows]
    return tuple(ids[: len(ids) // 2]), tuple(ids[len(ids) // 2 :])


def fit(loads: Sequence[Load], names: Sequence[str], overrides: Sequence[str], folder: Path, command: str) -> Fit:
    """Minimises the squared log errors of mean TPOT and mean E2E (with `frontend` also mean TTFT), summed over loads.
    Raises ConfigError with a message of one line."""
    configs = [load.config(overrides) for load in loads]
    _check(names, loads, configs)
    metrics = [f"{name}_s" for name in _metrics(names)]
    parts = [_first_half(load, metrics) for load in loads]
    number = count()

    def loss(values: Scalars) -> float:
        total = 0.0
        for part, config in zip(parts, configs, strict=True):
            scaled = config.with_values(settings_of(values))
            sim = simulate(scaled, part.trace, folder / str(next(number)), command)
            means = _means(sim, part.scored, metrics)
            total += sum(math.log(means[name] / mean) ** 2 for name, mean in part.measured.items() if name in means)
        return total

    found = minimize(loss, names, configs[0])
    return Fit(
        found, tuple(f"{name}.mean" for name in metrics), {part.load.name: len(part.scored) for part in parts},
        tuple(part.load.name for part in parts if not part.is_apart), next(number),
    )  # fmt: skip


def _check(names: Sequence[str], loads: Sequence[Load], configs: Sequence[RunConfig]) -> None:
    for load, config in zip(loads, configs, strict=True):
        check_config(names, config, load.name)
    for name in names:
        if len(values := {given_by(config, name) for config in configs}) > 1:
            keys = " and ".join(sorted({key for key, _ in values}))
            raise ConfigError(f"--fit {name}: the loads have different {keys}; fit those of one at a time")


def _first_half(load: Load, metrics: Sequence[str]) -> _Half:
    ids, _ = halves(load.trace)
    if len(ids) < MIN_REQUESTS:
        raise ConfigError(
            f"--fit: {load.name} has {len(load.trace)} requests; it takes {2 * MIN_REQUESTS}, as half of them are "
            "kept to judge: measure a longer run"
        )
    rows = load.trace.rows[: len(ids)]
    frame = load.measured.requests.set_index("request_id").loc[list(ids)]
    ended = numbers(frame, "finish_ns") <= rows[-1].arrival_ns
    is_apart = bool(ended.sum() >= max(MIN_REQUESTS, MIN_APART * len(ids)))
    scored = tuple(np.array(ids)[ended].tolist()) if is_apart else ids
    means = _means(load.measured, scored, metrics)
    if not means:
        raise ConfigError(
            f"--fit: {load.name} has no TPOT and no E2E above 0 among the {len(scored)} requests that would be scored; "
            "measure what the client received"
        )
    return _Half(load, replace(load.trace, rows=rows) if is_apart else load.trace, is_apart, scored, means)


def _means(run: Run, ids: Sequence[str], metrics: Sequence[str]) -> dict[str, float]:
    frame = run.requests.set_index("request_id").loc[list(ids)]
    found = {name: numbers(frame, name) for name in metrics}
    return {name: float(np.nanmean(values)) for name, values in found.items() if (values > 0).any()}


# --- a study's stages ---


class Fitted(NamedTuple):
    """The fits of a study. who: the predictor's name in the tables of the later stages. found: run name -> fit."""

    who: str
    found: dict[str, Found]


def fit_study(
    runs: Sequence[StudyRun], names: Sequence[str], overrides: Sequence[str], variants: Sequence[str], command: str
) -> tuple[list[StudyRun], list[Fitted]]:
    """The runs with the fitted simulator added to the predictors of their later stages, under the overrides and under
    each of `variants`. Runs of one stage get none. Raises ConfigError with a message of one line."""
    work = [(words, run) for words in ("", *variants) for run in runs if len(run.stages) > 1]
    if not work:
        raise ConfigError("--fit: no run of the study has two stages, one to fit to and one to judge; leave it out")
    predicted: dict[str, dict[str, Parts]] = {run.name: {} for run in runs}
    fits: dict[str, Fitted] = {}
    with TemporaryDirectory(prefix="testbed-") as scratch:
        for words, run in work:
            who = ", ".join(filter(None, (OURS, words, f"{'+'.join(names)} fitted")))
            more = [*RECORDED, *overrides, *(variant(words) if words else [])]
            found = _fit(run, names, more, Path(scratch), command)
            fits.setdefault(who, Fitted(who, {})).found[run.name] = found
            config = composed(run.settings, replaced(more, overrides_of(found.fitted)))
            sim = _simulated(run, config, Path(scratch), command)
            predicted[run.name][who] = {part: sim[part] for part in run.parts[1 + _num_fitted(run) :]}
    return [replace(run, predicted_ms={**run.predicted_ms, **predicted[run.name]}) for run in runs], list(fits.values())


def _num_fitted(run: StudyRun) -> int:
    """The number of first stages, to which the scalars are fitted."""
    return len(run.stages) // 2


def _fit(run: StudyRun, names: Sequence[str], overrides: Sequence[str], scratch: Path, command: str) -> Found:
    first = replace(run, stages=run.stages[: _num_fitted(run)])
    config = composed(run.settings, overrides)
    mine = [name for name in names if name != "link" or config.tensor_parallel_size > 1]
    check_config(mine or names, config, run.name)
    metrics = [f"{name}_mean" for name in _metrics(names)]

    def loss(values: Scalars) -> float:
        sim = _simulated(first, config.with_values(settings_of(values)), scratch, command)
        pairs = [(sim[part], run.measured_ms[part]) for part in first.parts[1:]]
        return sum(
            math.log(ours[name] / real[name]) ** 2
            for ours, real in pairs
            for name in metrics
            if name in ours and real.get(name)
        )

    return minimize(loss, mine, config)


def _simulated(run: StudyRun, config: RunConfig, scratch: Path, command: str) -> Parts:
    return means(simulate(config, trace_of(run, config.seed), scratch / "run", command), run)
