"""Python's cycle collector during a run: what lives as long as the run is not looked at again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

THRESHOLD = 50_000  # new objects before a collection; the default, 700 to 2,000, is a few steps of a batch
_runs_before = count()  # in this process


@contextmanager
def fewer_collections(*, is_simulation: bool = False) -> Iterator[None]:
    """Within: what there is now is left out of collections, which come seldom. Afterwards all is as it was.

    It begins with a collection, as cycles that an earlier run or the loading of a model left may hold much memory. The
    first run of a process, if it is_simulation, has none of them.
    """
    before = gc.get_threshold()
    is_first = next(_runs_before) == 0
    if not (is_first and is_simulation):
        gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
