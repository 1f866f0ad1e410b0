"""Collections of cycles around a run."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from experiments.collector import fewer_collections

FIRST = """
import gc
from experiments.collector import fewer_collections

collections = []
gc.disable()
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
with fewer_collections(is_simulation=IS_SIMULATION):
    print(len(collections), gc.get_freeze_count() > 0)
"""


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("is_simulation", [False, True])
def test_what_an_earlier_run_left_is_collected_before_the_next(is_simulation: bool) -> None:
    before = gc.get_threshold()
    with fewer_collections(is_simulation=is_simulation):
        left = weakref.ref(_Cycle())
    with fewer_collections(is_simulation=is_simulation):
        assert left() is None
        assert gc.get_threshold() != before
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(("is_simulation", "said"), [(True, "0 True"), (False, "2 True")])
def test_a_first_simulation_collects_nothing_and_any_other_run_does(is_simulation: bool, said: str) -> None:
    program = FIRST.replace("IS_SIMULATION", str(is_simulation))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said
