"""Names: of devices in our library and as sources call them, and of models; what the library says of each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.resources import files

from testbed.errors import ConfigError
from testbed.foreign_text import unknown
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec

THEIR_DEVICES = {  # AIConfigurator's names of ours
    "a100": "a100_sxm",
    "b200": "b200_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx_pro_6000_server",
}
OUR_DEVICES = {theirs: ours for ours, theirs in THEIR_DEVICES.items()}


def library(group: str) -> list[str]:
    """The names in a group of the library: `device`, `model`."""
    folder = files("experiments.conf") / group
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def plain(name: str) -> str:
    """A name without what is written differently everywhere: RTXPRO6000 and rtx_pro_6000 are one."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def library_device(name: str, given: str | None) -> str:
    """The library's name of the device that a source calls `name`, or `given`. Raises ConfigError if it has none."""
    known = library("device")
    if given is not None:
        if given not in known:
            raise ConfigError(unknown(f"--device is {given!r}", given, known))
        return given
    return _one_of(name, known, "device")


def library_model(name: str, given: str | None) -> str:
    """The library's name of the model that a source calls `name` (org/name), or `given`. Raises ConfigError."""
    known = library("model")
    if given is not None:
        if given not in known:
            raise ConfigError(unknown(f"--model is {given!r}", given, known))
        return given
    short = re.sub(r"^meta-|-hf$|-instruct$|-base$", "", name.rpartition("/")[2].lower())
    return _one_of(short, known, "model", name)


def _one_of(name: str, known: Iterable[str], what: str, called: str | None = None) -> str:
    for choice in known:
        if plain(choice) == plain(name):
            return choice
    problem = f"the library has no {what} {called or name!r}; say which it is with --{what}"
    raise ConfigError(unknown(problem, name, list(known)))


def device_spec(name: str) -> DeviceSpec | None:
    """The data sheet of a device of the library; None of another."""
    from experiments.compose import compose_config

    return compose_config([f"device={name}"]).device if name in library("device") else None


def model_spec(name: str) -> ModelSpec:
    """A model of the library."""
    from experiments.compose import compose_config

    return compose_config([f"model={name}"]).model
