"""Files that people get: pages and timelines."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast


@contextmanager
def written(out: Path) -> Iterator[TextIO]:
    """Opens a text file that appears complete at the end, or not at all; compressed if its name ends in .gz. Of several
    processes that write it at once, the last one's stays."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    opener = gzip.open if out.suffix == ".gz" else open
    try:
        with opener(part, "wt", encoding="utf-8") as file:
            yield cast(TextIO, file)
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)
