"""The scalars that may be fitted, at most two, and the search for them.

host: device.step_overhead_ns. kernels: device.kernel_factor, how many times as long kernels take; link:
device.interconnect_factor, the same of collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.configuration.config import RunConfig
from testbed.errors import ConfigError
from testbed.foreign_text import unknown

KEYS = {"host": "step_overhead_ns", "kernels": "kernel_factor", "link": "interconnect_factor"}  # of the device
NAMES = tuple(KEYS)
MAX_NAMES = 2
_HOST_NS = (1e3, 5e7)  # searched: from 1 us to 50 ms
_FACTOR = (1 / 64, 64.0)
_NEAR = (1.0, 0.95, 0.965, 0.98, 0.99, 1.01, 1.02, 1.035, 1.05)  # looked at around a minimum: steps fall otherwise

Scalars = dict[str, float]  # of each name its key's value: ns, or a factor
Loss = Callable[[Scalars], float]


class Found(NamedTuple):
    """losses: before and after, of what they were fitted to."""

    given: Scalars
    fitted: Scalars
    losses: tuple[float, float]
    notes: tuple[str, ...]


def parse_names(text: str | None) -> tuple[str, ...]:
    """The names of --fit. Raises ConfigError."""
    names = tuple(name.strip() for name in text.split(",")) if text else ()
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
    if config.device.path is not None:
        raise ConfigError(
            f"--fit: device.path={config.device.path} has the last word on the device; give its values as overrides"
        )


def overrides_of(values: Scalars) -> list[str]:
    """The values as overrides."""
    return [f"device.{KEYS[name]}={round(value) if name == 'host' else value}" for name, value in values.items()]


def minimize(loss: Loss, names: Sequence[str], config: RunConfig) -> Found:
    """The scalars at which the loss is least, from those of the configuration on. Raises ConfigError in one line."""
    given = {name: float(getattr(config.device, KEYS[name])) for name in names}
    _check_effect(loss, given, config)
    fitted = _search(loss, given)
    losses = loss(given), loss(fitted)
    if losses[1] > losses[0]:  # the search stopped beside what was given
        fitted, losses = dict(given), (losses[0], losses[0])
    return Found(given, fitted, losses, tuple(_at_edge(fitted)))


def _check_effect(loss: Loss, given: Scalars, config: RunConfig) -> None:
    """Raises ConfigError where a scalar changes nothing."""
    base = loss(given)
    for changed in given:
        if loss({name: value * 4 + 1 if name == changed else value for name, value in given.items()}) == base:
            raise ConfigError(
                f"--fit {changed}: cost={config.raw['cost'].get('name')} does not depend on it; choose cost=roofline "
                "or cost=tables"
            )


def _search(loss: Loss, given: Scalars) -> Scalars:
    """Over logarithms: golden section with parabolas for one scalar, Nelder and Mead's simplex for two."""
    from scipy import optimize  # slow to import

    def values(logs: Sequence[float]) -> Scalars:
        return {name: math.exp(float(log)) for name, log in zip(given, logs, strict=True)}

    bounds = [(math.log(low), math.log(high)) for low, high in map(_edges, given)]
    if len(given) == 1:
        one = optimize.minimize_scalar(
            lambda log: loss(values([log])), bounds=bounds[0], method="bounded", options={"xatol": 1e-3, "maxiter": 60}
        )
        return min((values([one.x + math.log(near)]) for near in _NEAR), key=loss)
    logs = [math.log(max(value, 1e-9)) for value in given.values()]
    start = [min(max(log, low), high) for log, (low, high) in zip(logs, bounds, strict=True)]
    options: Any = {
        "xatol": 2e-3, "fatol": 1e-7, "maxfev": 120,
        "initial_simplex": [start, [start[0] + 0.7, start[1]], [start[0], start[1] + 0.7]],
    }  # fmt: skip
    minimum: Any = optimize.minimize  # its stubs know no initial simplex
    both = minimum(
        lambda logs: loss(values(logs)), np.array(start), method="Nelder-Mead", bounds=bounds, options=options
    )
    return values(both.x)


def _edges(name: str) -> tuple[float, float]:
    return _HOST_NS if name == "host" else _FACTOR


def _at_edge(fitted: Scalars) -> list[str]:
    said = []
    for name, value in fitted.items():
        low, high = _edges(name)
        if not low * 1.05 < value < high / 1.05:
            said.append(f"{name} came to the edge of what is searched ({low:g} to {high:g}): something else is off")
    return said
