"""What several files of tests here share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.tables import aiconfigurator
from tests.experiments import kit
from tests.experiments import tables_on_the_spot as spot

ROOT = Path(__file__).parents[2]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> kit.Say:
    """`testbed <arguments>` in this process."""
    return partial(kit.say, capsys)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory, which is the present one. Modules in it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def home(request: pytest.FixtureRequest, here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of the user's, the present one, with `mine.py` in it: the MINE of the tests' file. It is found before
    the `mine.py` that the README has one write, which may lie in the repository."""
    (here / "mine.py").write_text(request.module.MINE)
    others = [entry for entry in sys.path if entry not in ("", str(here), str(ROOT))]
    monkeypatch.setattr(sys, "path", [*others, str(here), str(ROOT)])
    yield here
    sys.modules.pop("mine", None)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of operator tables of two devices, found as an installed one is."""
    systems = spot.aiconfigurator(tmp_path)
    spot.aiconfigurator(tmp_path, "gb200")
    place = SimpleNamespace(submodule_search_locations=[str(systems.parent)])
    monkeypatch.setattr(aiconfigurator, "find_spec", lambda name: place)
    return systems
