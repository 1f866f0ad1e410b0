"""Files that appear complete, or not at all: after a failed write an older one is as it was."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO, cast


@contextmanager
def whole_file(out: Path) -> Iterator[Path]:
    """Yields the path of a new file with the extension of `out`, which takes its place at the end; its folder exists.
    If that fails, `out` is as it was, and an OSError of the new file names `out`. Of several processes that write it at
    once, the last one's stays. If `out` is a device or a pipe, as /dev/null, yields its own path."""
    if out.exists() and not (out.is_file() or out.is_dir()):
        yield out
        return
    number = 0
    try:
        while not _is_made(part := out.with_name(f".part{number}-{out.name}")):
            number += 1
        yield part
        if out.is_file():
            shutil.copymode(out, part)
        part.replace(out)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if isinstance(error, OSError) and (error.filename is None or str(error.filename) == str(part)):
            error.filename = str(out)
        raise


def _is_made(part: Path) -> bool:
    """Makes an empty file; returns False if there is one, which is another process's."""
    try:
        part.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@contextmanager
def written(out: Path) -> Iterator[TextIO]:
    """Opens a text file that appears complete at the end, or not at all; compressed if its name ends in .gz."""
    out.parent.mkdir(parents=True, exist_ok=True)
    opener = gzip.open if out.suffix == ".gz" else open
    with whole_file(out) as part, opener(part, "wt", encoding="utf-8") as file:
        yield cast(TextIO, file)
