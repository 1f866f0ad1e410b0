"""The commands that make a report's runs again: of a sweep its own, not one for each point."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from math import prod

MAX_COMMANDS = 12  # that are spelt out


def sweep_commands(commands: Sequence[str]) -> list[str]:
    """The commands of runs, in fewer: those that differ in the values of keys only and have all their combinations are
    one sweep. What cannot be said so stays as it is."""
    different = list(dict.fromkeys(command for command in commands if command))
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for command in different:
        values = _values(command)
        groups.setdefault(tuple(values) if values else (command,), []).append(values)
    found: list[str] = []
    for keys, points in groups.items():
        found += [keys[0]] if not points[0] else _together(points)
    return found


def _values(command: str) -> dict[str, str]:
    """key -> value of `testbed run key=value …`; empty: it is no such command."""
    try:
        words = shlex.split(command)
    except ValueError:
        return {}
    if words[:2] != ["testbed", "run"] or not all("=" in word and not word.startswith("-") for word in words[2:]):
        return {}
    return dict(word.split("=", 1) for word in words[2:])


def _together(points: Sequence[dict[str, str]]) -> list[str]:
    """One command for all points, if they are every combination of their values."""
    values = {key: list(dict.fromkeys(point[key] for point in points)) for key in points[0]}
    is_whole = prod(map(len, values.values())) == len(points)
    is_plain = all(
        len(of_key) == 1 or not any(set(",[{") & set(value) for value in of_key) for of_key in values.values()
    )
    if len(points) == 1 or not (is_whole and is_plain):
        return [shlex.join(["testbed", "run", *(f"{key}={value}" for key, value in point.items())]) for point in points]
    return [shlex.join(["testbed", "run", "-m", *(f"{key}={','.join(of_key)}" for key, of_key in values.items())])]
