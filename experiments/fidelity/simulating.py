"""Simulates the trace of a measured run; the configuration comes from the run's settings and the user's overrides."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from analysis.load import Run, load_run
from experiments.configuration.compose import compose_config, to_overrides
from experiments.configuration.config import GROUPS, RunConfig
from experiments.configuration.grammar import literal, parsed
from experiments.configuration.overrides import is_value, refuse_repeated
from experiments.runs.origin import UNKNOWN, Origin
from experiments.runs.run import INTERRUPTED, execute
from experiments.wiring.costs import fit_file
from sim.cost.config import CalibratedConfig, RooflineConfig
from sim.cost.drawing import filters
from testbed.errors import ConfigError, TestbedError
from testbed.traces.schema import Trace

_SHOWN = (
    "device.tensor_parallel_size", "cache.num_gpu_blocks", "cache.block_size", "scheduler.max_num_seqs",
    "scheduler.max_num_batched_tokens", "backend.frontend_ns", "backend.frontend_ns_per_token",
)  # fmt: skip
_CAPTURING = ("roofline", "tables")  # cost models that model captured (CUDA graph) steps


def variant(words: str) -> list[str]:
    """The overrides of one --beside. Raises ConfigError if they are not valid."""
    try:
        overrides = shlex.split(words)
    except ValueError as error:
        raise ConfigError(f"--beside {words!r}: {error}; quote it as --beside 'cost=tables seed=1'") from None
    if not overrides:
        raise ConfigError(f"--beside {words!r} has no override; expected one or more, as --beside cost=tables")
    check_overrides(overrides)
    refuse_repeated(overrides)
    return by_key(overrides)


def by_key(overrides: Sequence[str]) -> list[str]:
    """The overrides, one for each key: `cache={block_size: 32}` as `cache.block_size=32`."""
    found: list[str] = []
    for item in overrides:
        group = item.partition("=")[0]
        value = parsed(item).value() if group in GROUPS and is_value(item) else None
        found += to_overrides({group: value}) if isinstance(value, dict) else [item]
    return found


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises ConfigError for overrides that cannot be applied to a measured run."""
    for item in overrides:
        key, equals, _ = item.partition("=")
        if not equals or key.startswith(("-", "+", "~")):
            raise ConfigError(f"{item!r}: give measured runs (files, folders) and plain key=value pairs")
        group = key.partition(".")[0]
        if group == "trace" or key in ("backend", "backend.name"):
            raise ConfigError(f"{item!r}: the measured run is the trace, and the simulator runs it; leave it out")
        if group == "hydra" and key != "hydra.searchpath":
            raise ConfigError(f"{item!r}: runs are kept where --out says; leave it out")


def laid_over(settings: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Both as one list of overrides. The user's value wins for a key that both have; options of groups come first. The
    run's settings of the cost model are dropped if the user chooses one that does not read them, and those of the model
    if the user gives its files."""
    given = {key: value for key, _, value in (item.partition("=") for item in overrides)}
    if "model.path" in given:
        settings = [item for item in settings if not item.startswith("model.")]
    if given.get("cost", "roofline") not in _CAPTURING:
        settings = [item for item in settings if not item.startswith("cost.")]
    return sorted(replaced(settings, overrides), key=lambda item: item.partition("=")[0] not in GROUPS)


def replaced(overrides: Sequence[str], newer: Sequence[str]) -> list[str]:
    """The overrides, with newer values instead of those of the same keys."""
    keys = {item.partition("=")[0] for item in newer}
    return [*(item for item in overrides if item.partition("=")[0] not in keys), *newer]


def composed(settings: Sequence[str], overrides: Sequence[str]) -> RunConfig:
    """The configuration from a measured run's settings and the user's overrides."""
    return compose_config(["backend=sim", *laid_over(settings, overrides)])


def simulate(config: RunConfig, trace: Trace, folder: Path, command: str, measured: Run | None = None) -> Run:
    """Simulates the trace, of `measured` if that is kept beside it; `folder` gets the run, otherwise without a summary.
    Raises TestbedError with one line if the run does not complete, and KeyboardInterrupt."""
    origin = UNKNOWN if measured is None else Origin(measured_trace=measured.manifest["measured_trace"])
    config = replace(config, overwrite=True)
    result = execute(config, folder, command=command, origin=origin, trace=trace, has_summary=measured is not None)
    if result.exit_status == INTERRUPTED:
        raise KeyboardInterrupt
    if result.status != "complete" or result.exit_status:
        raise TestbedError(result.manifest.get("failure") or result.message)  # the folder is removed
    return load_run(result.folder)


def described(config: RunConfig) -> str:
    raw = config.raw
    model = config.model.name if config.model.path is None else f"model.path={config.model.path}"
    words = [model, f"device={config.device.name}", f"cost={config.cost_name}", f"scheduler={config.scheduler.name}"]
    for key in _SHOWN:
        group, name = key.split(".")
        value = getattr(config.device, name, raw[group].get(name))
        words.append(f"{key}={literal(value)}")
    if isinstance(config.cost, RooflineConfig):
        words.append(f"device.step_overhead_ns={config.device.step_overhead_ns}")
    elif isinstance(config.cost, CalibratedConfig) and (file := fit_file(config)) is not None:
        words.append(f"fit={file.name}")
        words += [f"cost.{name}={value:g}" for name, value in config.cost.factors.items() if value != 1.0]
        if config.cost.repeated_saving is not None:
            words.append(f"cost.repeated_saving={config.cost.repeated_saving:g}")
    words.append(f"seed={config.seed}")
    drawn = ((item.name, getattr(config.sampling, item.name), item.default) for item in fields(config.sampling))
    words += [f"sampling.{name}={value}" for name, value, default in drawn if value != default]
    if "filtering" in raw["cost"] and filters(config.sampling):
        words.append(f"cost.filtering={raw['cost']['filtering']}")
    return " ".join(words)
