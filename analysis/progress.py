"""Progress of what takes a while: a bar on a terminal, else lines on standard error, LINE_S seconds or more apart."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Final, TypeVar

from tqdm import tqdm

LINE_S: Final = 30.0
T = TypeVar("T")


class _Lines:
    """Standard error as tqdm's file: what it draws over one line comes as lines, and without those that clear."""

    def write(self, text: str) -> None:
        if said := text.strip():
            print(said, file=sys.stderr, flush=True)

    def flush(self) -> None:
        pass


def progress(desc: str, unit: str, total: int | None = None) -> tqdm[Any]:
    """Returns a bar of `total` units (None: not known), to be updated and closed."""
    if sys.stderr.isatty():
        return tqdm(desc=desc, unit=unit, total=total, leave=False, delay=0.5)
    left = f"{{n_fmt}} {unit}s" if total is None else "{n_fmt}/{total_fmt}, {remaining} left"
    return tqdm(
        desc=desc, unit=unit, total=total, leave=False, file=_Lines(), position=0, delay=LINE_S,
        mininterval=LINE_S, miniters=1,  # 1: tqdm's own thread does not draw in between
        bar_format=f"{{desc}}: {left}, {{elapsed}} so far, {{rate_fmt}}",
    )  # fmt: skip


def progressing(items: Iterable[T], desc: str, unit: str, total: int | None = None) -> Iterator[T]:
    """Yields the items, and shows how many of them are done."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress(desc, unit, total) as bar:
        for item in items:
            yield item
            bar.update()
