"""Overrides that choose the library's model and device of a measured run, by the names that its file has."""

from __future__ import annotations

from collections.abc import Callable

from experiments.configuration.names import device_named, model_named
from testbed.errors import ConfigError

_NAMED: dict[str, Callable[[str], str | None]] = {"model": model_named, "device": device_named}
_ELSE = {"model": ", or model.path=<its config.json>", "device": ""}


def choice(group: str, said: str | None, place: str, given: list[str]) -> list[str]:
    """The override of `model` or `device`; none where the user has chosen. said: None if the file does not say.

    Raises ConfigError if nobody chose one that the library has.
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
