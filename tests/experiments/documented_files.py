"""Whether a page's table of keys, `| key | value |`, has those of a file that a command wrote, and no others.

A list of objects is walked into as one. In a cell the name before a colon stands before each after it, `<run>` is any
key, and a key without others below it may hold anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def check_keys(page: str, heading: str, value: Any, besides: tuple[str, ...] = ()) -> None:
    """besides: documented keys, with all below them, that this file lacks."""
    documented = [tuple(name.split(".")) for name in keys_of(page, heading)]
    assert documented, heading
    written = set(_walk(value, (), documented))
    unknown = [path for path in written if not any(_begins(one, path) for one in documented)]
    assert not unknown, f"not on the page: {unknown}"
    for one in documented:
        is_lacking = any(_begins(one, tuple(other.split("."))) for other in besides)
        is_written = any(len(one) == len(path) and _begins(one, path) for path in written)
        assert is_written != is_lacking, f"of the page: {'.'.join(one)}"


def keys_of(page: str, heading: str) -> Iterator[str]:
    """The keys in the first column of the first table below a heading of docs/."""
    _, found, below = (DOCS / page).read_text().partition(f"\n{heading}\n")
    assert found, heading
    for cell in re.findall(r"^\| (`.*?) \|", below.partition("\n#")[0], re.MULTILINE):
        before, colon, after = cell.partition("`: ")
        for name in re.findall(r"`(.+?)`", after if colon else cell):
            yield f"{before[1:]}.{name}" if colon else name


def _walk(value: Any, path: tuple[str, ...], documented: list[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    items = value if isinstance(value, list) else [value]
    has_more = any(len(one) > len(path) and _begins(one, path) for one in documented)
    if not (has_more and items and all(isinstance(item, dict) for item in items)):
        yield path
        return
    for item in items:
        for key, below in item.items():
            yield from _walk(below, (*path, *key.split(".")), documented)


def _begins(documented: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Whether the documented key, or what it is below, is the path."""
    patterns = [re.sub(r"<\w+>", ".+", part) for part in documented]
    return len(path) <= len(patterns) and all(map(re.fullmatch, patterns, path))
