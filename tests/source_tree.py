"""The source files of the rooms and their syntax trees, which the tests about the source itself read."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("testbed", "sim", "real", "experiments", "analysis")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def relative(path: Path) -> str:
    """To the repository, as it is written in messages."""
    return path.relative_to(ROOT).as_posix()
