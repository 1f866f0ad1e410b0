"""Which entry of the model and device libraries a measured run's names mean."""

from __future__ import annotations

import re

from experiments.messages import options
from testbed.errors import ConfigError

_ALIASES = {  # words of a Hugging Face name, without what says nothing of the shape
    "mistralnemo": "mistral_nemo_12b", "metallama318b": "llama3.1_8b", "metallama3170b": "llama3.1_70b",
    "metallama31405b": "llama3.1_405b", "metallama38b": "llama3_8b", "metallama370b": "llama3_70b",
}  # fmt: skip
_NO_SHAPE = re.compile(r"(?i)(?<![a-z0-9])(instruct|hf|chat|base|it|2407|2409|2501)(?![a-z0-9])")


def model_of(name: str) -> str | None:
    """The library's entry of a model that goes by this Hugging Face name (`meta-llama/Llama-3.1-8B-Instruct`)."""
    words = _plain(_NO_SHAPE.sub("", name.rsplit("/", 1)[-1]))
    if words in _ALIASES:
        return _ALIASES[words]
    return next((entry for entry in options("model") if _plain(entry) == words), None)


def device_of(name: str) -> str | None:
    """The library's entry of a device by a driver's or a study's name for it (`NVIDIA H100 80GB HBM3`)."""
    words = _plain(name)
    found = [entry for entry in options("device") if _plain(entry) in words]
    return found[0] if len(found) == 1 else None


def need(group: str, entry: str | None, said: str, place: str, given: list[str]) -> list[str]:
    """The override that chooses `entry`; none where the user has chosen. Raises ConfigError if nobody did."""
    if any(item.startswith((f"{group}=", f"{group}.path=")) for item in given):
        return []
    if entry is None:
        raise ConfigError(
            f"{place}: the {group} is {said!r}, which the library does not have; say which it is: {group}=<name> "
            f"(`testbed list {group}`)" + (", or model.path=<its config.json>" if group == "model" else "")
        )
    return [f"{group}={entry}"]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
