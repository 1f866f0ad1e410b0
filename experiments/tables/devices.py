"""Look-up of devices and models of the library."""

from __future__ import annotations

from functools import lru_cache

from experiments.configuration.compose import compose_config
from experiments.configuration.options import options
from testbed.errors import ConfigError
from testbed.foreign_text import unknown
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec


def chosen(group: str, given: str) -> str:
    """The value of --device or --model. Raises ConfigError if the library does not have it."""
    known = options(group)
    if given not in known:
        raise ConfigError(unknown(f"--{group} is {given!r}", given, known))
    return given


def found(group: str, entry: str | None, called: str) -> str:
    """The library's entry for the source's name `called`. Raises ConfigError if there is none (`entry` is None)."""
    if entry is None:
        problem = f"the library has no {group} {called!r}; say which it is with --{group}"
        raise ConfigError(unknown(problem, called, options(group)))
    return entry


@lru_cache(maxsize=64)
def device_spec(name: str) -> DeviceSpec | None:
    """The data sheet of a device of the library; None if the library does not have it. Cached, as every run of a sweep
    asks."""
    return compose_config([f"device={name}"]).device if name in options("device") else None


def model_spec(name: str) -> ModelSpec:
    return compose_config([f"model={name}"]).model
