"""Collections of cycles around a run."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from itertools import count

import pytest

from experiments.runs import collector
from experiments.runs.collector import fewer_collections

LEFT = """
import gc
from experiments import simulate

def run():
    simulate({"name": "synthetic", "num_requests": 20}, model="llama3.1_8b", device="h100")

run()
gc.collect()
gc.disable()
gc.set_debug(gc.DEBUG_SAVEALL)
run()
gc.collect()
print(sorted({name for one in gc.garbage if (name := type(one).__module__).partition(".")[0] == "testbed"}))
"""


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def collections_within(*, is_simulation: bool) -> int:
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        seen.append(info["generation"])

    gc.disable()
    gc.callbacks.append(note)
    try:
        with fewer_collections(is_simulation=is_simulation):
            assert gc.get_freeze_count() > 0
            return len(seen)
    finally:
        gc.callbacks.remove(note)
        gc.enable()


@pytest.mark.usefixtures("unfreezes")
def test_what_an_engine_left_is_collected_before_the_next_run() -> None:
    gc.unfreeze()
    before = gc.get_threshold()
    left = weakref.ref(_Cycle())
    with fewer_collections():
        assert left() is None
        assert gc.get_threshold() != before
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("unfreezes")
def test_after_many_simulations_what_they_left_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.unfreeze()
    monkeypatch.setattr(collector, "_simulations", count(1))
    left = weakref.ref(_Cycle())
    for _ in range(49):
        with fewer_collections(is_simulation=True):
            assert gc.get_freeze_count() > 0
    assert left() is not None
    with fewer_collections(is_simulation=True):
        assert left() is None


@pytest.mark.usefixtures("unfreezes")
def test_what_the_caller_froze_stays_frozen() -> None:
    gc.freeze()
    num = gc.get_freeze_count()
    with fewer_collections():
        assert gc.get_freeze_count() == num
    assert gc.get_freeze_count() == num


def test_a_simulation_begins_without_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_simulations", count(1))
    assert collections_within(is_simulation=True) == 0
    assert collections_within(is_simulation=False) == 2  # begins and ends


def test_a_simulation_leaves_no_cycles() -> None:
    """But those of OmegaConf's configuration: a collection before the next one would find nothing worth its time."""
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
