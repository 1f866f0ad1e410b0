"""What several files of tests here share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.tables import aiconfigurator
from tests.experiments import tables_on_the_spot as spot


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of operator tables of two devices, found as an installed one is."""
    systems = spot.aiconfigurator(tmp_path)
    spot.aiconfigurator(tmp_path, "gb200")
    place = SimpleNamespace(submodule_search_locations=[str(systems.parent)])
    monkeypatch.setattr(aiconfigurator, "find_spec", lambda name: place)
    return systems
