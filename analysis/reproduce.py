"""The commands that make a report's runs again: of a sweep its own, not one for each point."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

MAX_COMMANDS = 12  # that are spelt out


def sweep_commands(manifests: Sequence[Mapping[str, Any]]) -> list[str]:
    """The commands of runs, in fewer: those that differ in the values of keys only and have all their combinations are
    one sweep. What cannot be said so stays as it is."""
    different = {str(one["command"]): one.get("given") or {} for one in manifests if one.get("command")}
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for command, given in different.items():
        is_plain = bool(given) and command == _command(given)
        groups.setdefault(tuple(given) if is_plain else (command,), []).append(given if is_plain else {})
    return [said for keys, points in groups.items() for said in (_together(points) if points[0] else keys)]


def _command(given: Mapping[str, str], *flags: str) -> str:
    return shlex.join(["testbed", "run", *flags, *(f"{key}={value}" for key, value in given.items())])


def _together(points: Sequence[dict[str, str]]) -> list[str]:
    """One command for all points, if they are every combination of their values."""
    values = {key: list(dict.fromkeys(point[key] for point in points)) for key in points[0]}
    is_whole = prod(map(len, values.values())) == len(points) > 1
    is_plain = all(
        len(of_key) == 1 or not any(set(",[{") & set(value) for value in of_key) for of_key in values.values()
    )
    if not (is_whole and is_plain):
        return [_command(point) for point in points]
    return [_command({key: ",".join(of_key) for key, of_key in values.items()}, "-m")]
