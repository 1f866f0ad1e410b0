"""The commands that make a report's runs again: of a sweep its own, not one for each point."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

MAX_COMMANDS = 12  # that are spelt out


def sweep_commands(manifests: Sequence[Mapping[str, Any]], folders: Sequence[Path]) -> list[str]:
    """The commands of runs, in fewer: those that differ in the values of keys only and have all their combinations are
    one sweep, into the folder that they lie in. What cannot be said so stays as it is. folders: of the runs."""
    different = {
        str(one["command"]): (one.get("given") or {}, folder.parent)
        for one, folder in zip(manifests, folders, strict=True)
        if one.get("command")
    }
    groups: dict[tuple[object, ...], list[dict[str, str]]] = {}
    for command, (given, root) in different.items():
        is_plain = bool(given) and command == _command(given)
        groups.setdefault((root, *given) if is_plain else (command,), []).append(given if is_plain else {})
    return [
        said
        for (first, *_), points in groups.items()
        for said in (_together(points, first) if isinstance(first, Path) else [str(first)])
    ]


def _command(given: Mapping[str, str], *flags: str) -> str:
    return shlex.join(["testbed", "run", *flags, *(f"{key}={value}" for key, value in given.items())])


def _together(points: Sequence[dict[str, str]], root: Path) -> list[str]:
    """One command for all points, if they are every combination of their values. root: the folder that has them."""
    values = {key: list(dict.fromkeys(point[key] for point in points)) for key in points[0]}
    is_whole = prod(map(len, values.values())) == len(points) > 1
    is_plain = all(
        len(of_key) == 1 or not any(set(",[{") & set(value) for value in of_key) for of_key in values.values()
    )
    if not (is_whole and is_plain):
        return [_command(point) for point in points]
    swept = {key: ",".join(of_key) for key, of_key in values.items()}
    return [_command(swept | {"hydra.sweep.dir": _shown(root)}, "-m")]


def _shown(folder: Path) -> str:
    """From where the report is made, if it lies below."""
    here, there = Path.cwd(), folder.absolute()
    return str(there.relative_to(here) if there.is_relative_to(here) else there)
