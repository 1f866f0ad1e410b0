"""Set-up that every test shares: hypothesis prints what reproduces a failure, `gpu` tests need a GPU."""

from __future__ import annotations

import gc
import os
import signal
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings

from experiments.runs import collector

# torch reads it when it is imported: several workers share the cores, and small matrices gain nothing from threads
os.environ.setdefault("OMP_NUM_THREADS", "1")

# a script's background job ignores Ctrl-C, and with it all that it starts
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("testbed", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("testbed")


@cache
def _has_cuda() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and a CUDA build of torch"))


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of reports are drawn, but not again for phones, and their files stay empty: most of a report's time is
    Matplotlib's."""
    from analysis.plots import style  # not at the top: it imports Matplotlib, which few tests need
    from analysis.reports.parts import Sections

    def save(drawn: object, stem: str | os.PathLike[str]) -> tuple[Path, Path]:
        files = Path(f"{stem}.png"), Path(f"{stem}.svg")
        files[0].parent.mkdir(parents=True, exist_ok=True)
        for file in files:
            file.touch()
        return files

    plot = Sections.plot
    monkeypatch.setattr(style, "save", save)
    monkeypatch.setattr(
        Sections, "plot", lambda self, draw, *said: plot(self, lambda is_narrow=False: is_narrow or draw(), *said)
    )


_tests = count(1)
_unfreeze, _caller_froze = gc.unfreeze, collector.caller_froze
gc.unfreeze = lambda: None  # at the end of each run; the next would begin with a collection of all
# what is frozen below is no caller's, and takes long to count: runs freeze what a test has made before them
collector.caller_froze = lambda: False


@pytest.fixture
def unfreezes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs treat frozen objects as they do outside of tests."""
    monkeypatch.setattr(gc, "unfreeze", _unfreeze)
    monkeypatch.setattr(collector, "caller_froze", _caller_froze)


def pytest_runtest_setup() -> None:
    """What there is before a test is left out of collections within it: each run of an engine begins with one, which
    would look through all that a worker has imported. Now and then all is looked through."""
    if next(_tests) % 500 == 0:
        _unfreeze()
        gc.collect()
    gc.freeze()
