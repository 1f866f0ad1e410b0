"""Finds the entry of the model or device library for a name used by a driver, a tool or Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Callable

from experiments.configuration.options import options
from testbed.errors import ConfigError
from testbed.foreign_text import is_device

_ALIASES = {  # Hugging Face's names, without words that do not affect the shape
    "mistralnemo": "mistral_nemo_12b", "metallama3.18b": "llama3.1_8b", "metallama3.170b": "llama3.1_70b",
    "metallama3.1405b": "llama3.1_405b", "metallama38b": "llama3_8b", "metallama370b": "llama3_70b",
}  # fmt: skip
_NO_SHAPE = re.compile(r"(?i)(?<![a-z0-9])(instruct|hf|chat|base|it|2407|2409|2501)(?![a-z0-9])")


def device_named(*said: str) -> str | None:
    """Returns the library's device for the first of these names that has one: a library name (`h100`), a driver's
    description (`NVIDIA H100 80GB HBM3`), or a name that differs in spaces, underscores and case (`RTXPRO6000`)."""
    entries = options("device")
    for name in said:
        found = name if name in entries else _of_driver(name, entries) or _alike(name, entries)
        if found is not None:
            return found
    return None


def device_of_run(description: str) -> str | None:
    """Returns the library's device for the device description in a run's manifest; None if it is not known."""
    is_cpu = description == "cpu" or re.search(r", \d+ threads?$", description)
    return "cpu" if is_cpu else device_named(description)


def model_named(name: str) -> str | None:
    """Returns the library's model for its own or Hugging Face's name (`meta-llama/Llama-3.1-8B-Instruct`), or None."""
    entries = options("model")
    if name in entries:
        return name
    words = _NO_SHAPE.sub("", name.rsplit("/", 1)[-1])
    return _ALIASES.get(_plain(words)) or _alike(words, entries)


def _of_driver(description: str, entries: list[str]) -> str | None:
    """Returns the entry whose words are in a driver's description, the most specific one: rtx_pro_6000_server before
    rtx_pro_6000."""
    found = [entry for entry in entries if entry != "cpu" and is_device(entry, description)]
    return max(found, key=len, default=None)


def _alike(name: str, entries: list[str]) -> str | None:
    """Returns the only entry with the same letters, digits and dots; if there is none, without dots. Dots come first
    because opt-1.3b is not opt-13b."""
    for dot in (".", ""):
        found = [entry for entry in entries if _plain(entry, dot) == _plain(name, dot)]
        if len(found) == 1:
            return found[0]
    return None


def _plain(name: str, dot: str = ".") -> str:
    return re.sub(rf"[^a-z0-9{dot}]", "", name.lower())


_NAMED: dict[str, Callable[[str], str | None]] = {"model": model_named, "device": device_named}
_ELSE = {"model": ", or model.path=<its config.json>", "device": ""}


def choice(group: str, said: str | None, place: str, given: list[str]) -> list[str]:
    """Returns the override that sets `model` or `device`; empty if the user has chosen. said: the file's name for it.

    Raises ConfigError if the user has not chosen and the library has no such entry.
    """
    if any(item.startswith((f"{group}=", f"{group}.path=")) for item in given):
        return []
    entry = None if said is None else _NAMED[group](said)
    if entry is None:
        what = "not said by the file" if said is None else f"{said!r}, which the library does not have"
        raise ConfigError(
            f"{place}: the {group} is {what}; say which it is: {group}=<name> (`testbed list {group}`){_ELSE[group]}"
        )
    return [f"{group}={entry}"]
