"""Python's cycle collector during a run: what lives as long as the run is not looked at again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = 50_000  # new objects before a collection; the default, 700 to 2,000, is a few steps of a batch


@contextmanager
def fewer_collections(*, is_simulation: bool = False) -> Iterator[None]:
    """Within: what there is now is left out of collections, which come seldom. Afterwards all is as it was.

    It begins with a collection, as the loading of a model or an earlier engine leaves cycles that hold much memory. Not
    so is_simulation: it leaves none but its configuration, and each point of a sweep would look through all modules.
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
