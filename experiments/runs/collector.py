"""Python's cyclic garbage collector during a run: objects that live as long as the run are not scanned repeatedly."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = 50_000  # new objects before a collection; a batch makes the default, 700 to 2,000, in a few steps
_WHOLE_EVERY = 50  # simulations; `gc.freeze` resets what Python counts, so that a whole collection never comes due
_FEW = 10_000  # objects that Python 3.12 freezes by itself, 375, are fewer; those of a caller are more
_simulations = itertools.count(1)


@contextmanager
def fewer_collections(*, is_simulation: bool = False) -> Iterator[None]:
    """Context with rare collections that skip all objects that exist at its start, or those that the caller froze;
    restores the settings afterwards.

    Collects first, because loading a model or an earlier engine leaves cycles that hold much memory. is_simulation:
    only every so often; there is little to free, and each point of a sweep would scan all modules.
    """
    before, is_callers = gc.get_threshold(), caller_froze()
    if not is_simulation or next(_simulations) % _WHOLE_EVERY == 0:
        gc.collect()
    if not is_callers:
        gc.freeze()
    gc.set_threshold(THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not is_callers:
            gc.unfreeze()


def caller_froze() -> bool:
    """Whether objects are frozen that others froze. It counts them, one by one."""
    return gc.get_freeze_count() > _FEW
