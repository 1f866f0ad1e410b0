"""What several files of tests here share."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from types import SimpleNamespace

import pytest

from analysis.plots import style
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


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of reports are drawn, and their files stay empty: most of a report's time is Matplotlib's rendering."""

    def save(drawn: object, stem: str | PathLike[str]) -> tuple[Path, Path]:
        files = Path(f"{stem}.png"), Path(f"{stem}.svg")
        files[0].parent.mkdir(parents=True, exist_ok=True)
        for file in files:
            file.touch()
        return files

    monkeypatch.setattr(style, "save", save)
