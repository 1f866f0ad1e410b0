"""Files that appear complete, or not at all: after a failed write an older one is as it was."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO, cast


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """Yields the path of a new file, which takes the place of `out` at the end; its folder exists. If that fails, `out`
    is as it was, and an OSError of the new file names `out`."""
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        yield part
        if out.is_file():
            shutil.copymode(out, part)
        os.replace(part, out)
    except OSError as error:
        if error.filename in (None, str(part)):
            error.filename = str(out)
        raise
    finally:
        with suppress(OSError):
            part.unlink()


@contextmanager
def written(out: Path) -> Iterator[TextIO]:
    """Opens a text file that appears complete at the end, or not at all; compressed if its name ends in .gz. Of several
    processes that write it at once, the last one's stays."""
    out.parent.mkdir(parents=True, exist_ok=True)
    opener = gzip.open if out.suffix == ".gz" else open
    with whole(out) as part, opener(part, "wt", encoding="utf-8") as file:
        yield cast(TextIO, file)
