"""Fits at most two scalars to the first half of each load; they are evaluated on the second half.

host: device.step_overhead_ns. kernels: device.kernel_factor, a factor on the times of kernels. link:
device.interconnect_factor, the same for collectives. frontend: backend.frontend_ns, before a request is in the engine.
With cost=calibrated, host and kernels are factors on the calibrated times: cost.host_factor and cost.device_factor.

The fit does not use the second half. Only the first half's requests are simulated. Of these, only requests are scored
that had ended in the measured run before the half's last one arrived, so the second half cannot have slowed them down.
In an overload hardly any request has ended by then. In this case the whole trace is simulated and all of the first half
is scored: the second half's arrivals and lengths are used as load, but its measured times are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from analysis.load import Run
from analysis.progress import progress
from analysis.reading.frames import numbers
from experiments.configuration.config import RunConfig
from experiments.fidelity.loads import Load
from experiments.fidelity.simulating import simulate
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


class Part(NamedTuple):
    """What a fit simulates and scores. measured: the fitted metrics. means: the same ones of a simulated run."""

    config: RunConfig
    trace: Trace
    measured: Mapping[Any, float]
    means: Callable[[Run], Mapping[Any, float]]


class Found(NamedTuple):
    """The result of a fit. losses: on the fitted parts, before and after the fit."""

    given: Scalars
    fitted: Scalars
    losses: tuple[float, float]
    notes: tuple[str, ...]
    num_simulations: int


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


def fitted_metrics(names: Sequence[str]) -> tuple[str, ...]:
    """The fitted metrics; TTFT is among them for `frontend`, which has an effect on almost nothing else."""
    return (*_METRICS, "ttft") if "frontend" in names else _METRICS


def minimize(parts: Sequence[Part], names: Sequence[str], folder: Path, command: str) -> Found:
    """The scalars with the smallest loss: the squared log errors, summed over the parts. The search starts at those of
    the first part's configuration. folder: for a simulated run at a time. Raises ConfigError with a message of one
    line, also if a scalar has no effect."""
    num_simulations = 0
    with progress("fit", "trial") as bar:

        def loss(values: Scalars) -> float:
            nonlocal num_simulations
            total = 0.0
            for part in parts:
                sim = simulate(part.config.with_values(settings_of(values)), part.trace, folder, command)
                means = part.means(sim)
                total += sum(math.log(means[name] / mean) ** 2 for name, mean in part.measured.items() if name in means)
            num_simulations += len(parts)
            bar.update()
            return total

        found = _minimize(loss, names, parts[0].config)
    return found._replace(num_simulations=num_simulations)


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
    return Found(given, fitted, losses, (*notes, *_at_edge(given, fitted)), 0)


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


def halves(trace: Trace) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The request ids of the first and of the second half, by arrival."""
    ids = [row.request_id for row in trace.rows]
    return tuple(ids[: len(ids) // 2]), tuple(ids[len(ids) // 2 :])


def fit(loads: Sequence[Load], names: Sequence[str], overrides: Sequence[str], folder: Path, command: str) -> Fit:
    """Minimises the squared log errors of mean TPOT and mean E2E (with `frontend` also mean TTFT), summed over loads.
    Raises ConfigError with a message of one line."""
    configs = [load.config(overrides) for load in loads]
    _check(names, loads, configs)
    metrics = [f"{name}_s" for name in fitted_metrics(names)]
    scored, parts = {}, []
    for load, config in zip(loads, configs, strict=True):
        part, scored[load.name] = _first_half(load, config, metrics)
        parts.append(part)
    return Fit(
        minimize(parts, names, folder, command), tuple(f"{name}.mean" for name in metrics),
        {name: len(ids) for name, ids in scored.items()},
        tuple(load.name for load, part in zip(loads, parts, strict=True) if part.trace is load.trace),
    )  # fmt: skip


def _check(names: Sequence[str], loads: Sequence[Load], configs: Sequence[RunConfig]) -> None:
    for load, config in zip(loads, configs, strict=True):
        check_config(names, config, load.name)
    for name in names:
        if len(values := {given_by(config, name) for config in configs}) > 1:
            keys = " and ".join(sorted({key for key, _ in values}))
            raise ConfigError(f"--fit {name}: the loads have different {keys}; fit those of one at a time")


def _first_half(load: Load, config: RunConfig, metrics: Sequence[str]) -> tuple[Part, tuple[str, ...]]:
    """The part to simulate, and the requests that are scored: the first half's trace and those of it that had ended
    before its last one came; or the whole trace and all of its first half, if too few had."""
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
    means = partial(_means, ids=scored, metrics=metrics)
    measured = means(load.measured)
    if not measured:
        raise ConfigError(
            f"--fit: {load.name} has no TPOT and no E2E above 0 among the {len(scored)} requests that would be scored; "
            "measure what the client received"
        )
    return Part(config, replace(load.trace, rows=rows) if is_apart else load.trace, measured, means), scored


def _means(run: Run, ids: Sequence[str], metrics: Sequence[str]) -> dict[str, float]:
    frame = run.requests.set_index("request_id").loc[list(ids)]
    found = {name: numbers(frame, name) for name in metrics}
    return {name: float(np.nanmean(values)) for name, values in found.items() if (values > 0).any()}
