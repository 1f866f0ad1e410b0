"""The commands that make a report's runs again: of a sweep its own, not one for each point."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from analysis.comparison.arms import grouped

MAX_COMMANDS = 12  # that are spelt out
Point = dict[str, str]  # key -> value, as a command gives them
Design = dict[str, list[str]]  # key -> its values; the points are all combinations of them
_QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\\.""")  # a character too, behind a backslash
_BRACKETED = re.compile(r"[\[{][^\[\]{}]*[\]}]")  # the innermost
_WORD = re.compile(r"[\w/\-+.$%*@?|: ]+", re.ASCII)


def sweep_commands(manifests: Sequence[Mapping[str, Any]], folders: Sequence[Path]) -> list[str]:
    """The commands of runs, in fewer: those in one folder that give the same keys are one sweep into it, or a few where
    some combinations of their values are missing. What cannot be said so stays as it is. folders: of the runs."""
    different = {
        str(one["command"]): folder.parent for one, folder in zip(manifests, folders, strict=True) if one.get("command")
    }
    groups: dict[tuple[object, ...], dict[str, Point]] = {}
    for command, root in different.items():
        point = _given(command)
        groups.setdefault((root, *point) if point else (command,), {})[command] = point
    return [
        said
        for (root, *_), points in groups.items()
        for said in (points if len(points) == 1 else _sweeps([*points.values()], Path(str(root))))
    ]


def _given(command: str) -> Point:
    """What a `testbed run` gives a run, each key once; nothing of another command, or of one that names its folder."""
    try:
        words = shlex.split(command)
    except ValueError:
        return {}
    point = dict(word.split("=", 1) for word in words[2:] if "=" in word)
    is_plain = words[:2] == ["testbed", "run"] and len(point) == len(words) - 2
    names_place = "from" in point or any(key.startswith("hydra") and key != "hydra.searchpath" for key in point)
    return point if is_plain and not names_place else {}


def _sweeps(points: Sequence[Point], root: Path) -> list[str]:
    into = f"hydra.sweep.dir={_shown(root)}"
    return [
        shlex.join(["testbed", "run", "-m", *(f"{key}={','.join(values)}" for key, values in design.items()), into])
        for design in _designs(points)
    ]


def _designs(points: Sequence[Point]) -> list[Design]:
    """Designs that have every point once, few of them: parted where they have not all combinations, by the key whose
    values have the fewest sets of partners."""
    values = {key: list(dict.fromkeys(point[key] for point in points)) for key in points[0]}
    several = {key: of_key for key, of_key in values.items() if len(of_key) > 1}
    apart = next((key for key, of_key in several.items() if not _can_sweep(key, of_key)), None)
    if apart is not None:
        parts = [[point for point in points if point[apart] == value] for value in values[apart]]
    elif prod(map(len, several.values())) == len(points):
        return [values]
    else:
        partings = [_parted(points, key) for key in several]
        parts = min((parting for parting in partings if len(parting) > 1), key=len)
    return [design for part in parts for design in _designs(part)]


def _parted(points: Sequence[Point], key: str) -> list[list[Point]]:
    """The points by values of the key that go with the same values of all others."""

    def partners(mine: Sequence[Point]) -> frozenset[tuple[str, ...]]:
        return frozenset(tuple(value for name, value in point.items() if name != key) for point in mine)

    by_value = grouped(points, lambda point: point[key]).values()
    return [[point for mine in alike for point in mine] for alike in grouped(by_value, partners).values()]


def _can_sweep(key: str, values: Sequence[str]) -> bool:
    """Not what a run is judged by: `testbed run -m` refuses several values of it."""
    return key.partition(".")[0] not in ("slo", "report") and all(map(_is_joinable, values))


def _is_joinable(value: str) -> bool:
    """Whether Hydra reads a value of a command as one where others stand beside it, with commas between them: what
    quotes do not cover, or brackets, is a plain word then."""
    text = _QUOTED.sub("_", value)
    while text != (text := _BRACKETED.sub("_", text)):
        pass
    return _WORD.fullmatch(text) is not None


def _shown(folder: Path) -> str:
    """From where the report is made, if it lies below."""
    here, there = Path.cwd(), folder.absolute()
    return str(there.relative_to(here) if there.is_relative_to(here) else there)
