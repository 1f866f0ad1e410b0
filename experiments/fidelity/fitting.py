"""At most two scalars of the device fitted to the first half of each load; the second half judges them.

The halves are apart: only the first half's requests are simulated, and only those of them are scored that had ended in
the measured run before the last of the half came, which nothing of the second half can have slowed down. In an overload
hardly any has; then the whole trace is simulated and all of the first half is scored: of the second half the arrivals
and lengths are load, and what was measured there is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from analysis.load import Run
from analysis.reading.frames import numbers
from experiments.configuration.config import RunConfig
from experiments.fidelity.loads import Load
from experiments.fidelity.scalars import KEYS, Found, Scalars, check_config, minimize, overrides_of
from experiments.fidelity.simulating import replaced, simulate
from testbed.errors import ConfigError
from testbed.traces.schema import Trace

MIN_REQUESTS = 4  # of a half
MIN_APART = 0.25  # share of a half: with fewer that had ended in time, the other half is needed as load
_LATENCIES = ("tpot_s", "e2e_s")


class Fit(NamedTuple):
    """What was fitted, and to what."""

    found: Found
    num_scored: dict[str, int]  # of each load
    not_apart: tuple[str, ...]  # loads of which the second half was load
    num_simulations: int


class _Half(NamedTuple):
    load: Load
    trace: Trace  # its first half; or the whole one, if is_apart is not
    is_apart: bool
    scored: tuple[str, ...]
    measured: dict[str, float]  # means of the scored requests


def halves(trace: Trace) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Request ids of the first and of the second half, by arrival."""
    ids = [row.request_id for row in trace.rows]
    return tuple(ids[: len(ids) // 2]), tuple(ids[len(ids) // 2 :])


def fit(loads: Sequence[Load], names: Sequence[str], overrides: Sequence[str], folder: Path, command: str) -> Fit:
    """Minimises the squared log errors of mean TPOT and mean E2E, summed over loads. Raises ConfigError in one line."""
    configs = [load.config(overrides) for load in loads]
    _check(names, loads, configs)
    parts = [_first_half(load) for load in loads]
    number = count()

    def loss(values: Scalars) -> float:
        total = 0.0
        for part in parts:
            scaled = part.load.config(replaced(overrides, overrides_of(values)))
            sim = simulate(scaled, part.trace, folder / str(next(number)), command)
            means = _means(sim, part.scored)
            total += sum(math.log(means[name] / mean) ** 2 for name, mean in part.measured.items() if name in means)
        return total

    found = minimize(loss, names, configs[0])
    return Fit(
        found, {part.load.name: len(part.scored) for part in parts},
        tuple(part.load.name for part in parts if not part.is_apart), next(number),
    )  # fmt: skip


def _check(names: Sequence[str], loads: Sequence[Load], configs: Sequence[RunConfig]) -> None:
    for load, config in zip(loads, configs, strict=True):
        check_config(names, config, load.name)
    for name in names:
        if len({getattr(config.device, KEYS[name]) for config in configs}) > 1:
            raise ConfigError(f"--fit {name}: the loads are of different devices; fit those of one device at a time")


def _first_half(load: Load) -> _Half:
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
    means = _means(load.measured, scored)
    if not means:
        raise ConfigError(
            f"--fit: {load.name} has no TPOT and no E2E above 0 among the {len(scored)} requests that would be scored; "
            "measure what the client received"
        )
    return _Half(load, replace(load.trace, rows=rows) if is_apart else load.trace, is_apart, scored, means)


def _means(run: Run, ids: Sequence[str]) -> dict[str, float]:
    frame = run.requests.set_index("request_id").loc[list(ids)]
    found = {name: numbers(frame, name) for name in _LATENCIES}
    return {name: float(np.nanmean(values)) for name, values in found.items() if (values > 0).any()}
