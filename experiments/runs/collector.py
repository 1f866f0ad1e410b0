"""Python's cyclic garbage collector during a run: objects that live as long as the run are not scanned repeatedly."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = 50_000  # new objects before a collection; a batch makes the default, 700 to 2,000, in a few steps


@contextmanager
def fewer_collections(*, is_simulation: bool = False) -> Iterator[None]:
    """Context with rare collections that skip all objects that exist at its start; restores the settings afterwards.

    Collects first, because loading a model or an earlier engine leaves cycles that hold much memory. is_simulation: no
    first collection; there is little to free, and each point of a sweep would scan all modules.
    """
    before = gc.get_threshold()
    if not is_simulation:
        gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
