"""What a former `testbed fidelity` left in the folder of its runs, found by what it wrote there, and removed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from experiments.configuration.saved import read_manifest
from experiments.fidelity.measured import MEASURED
from testbed.errors import ConfigError

_SIMULATED = ("simulated", "fitted")
_COMMAND = "testbed fidelity "


def refuse_inside(inputs: Sequence[Path], runs: Path) -> None:
    """Raises ConfigError where a measured run lies among the runs that --overwrite removes."""
    for path in inputs:
        if path.resolve().is_relative_to(runs.resolve()):
            raise ConfigError(f"{path} lies in {runs}, which --overwrite renews; choose another --out")


def remove_runs(runs: Path) -> None:
    """Removes `<runs>/<load>/{measured,simulated,fitted}` of former commands, and nothing that they did not write."""
    for load in sorted(path for path in runs.glob("*") if path.is_dir()):
        for folder in (load / "measured", *(load / name for name in _SIMULATED)):
            if not folder.is_symlink() and _is_ours(folder):
                shutil.rmtree(folder)
        if not load.is_symlink() and not any(load.iterdir()):
            load.rmdir()


def _is_ours(folder: Path) -> bool:
    done = folder / "done"
    if folder.name not in _SIMULATED:
        return done.is_file() and done.read_text(errors="replace") == MEASURED
    return str(read_manifest(folder).get("command", "")).startswith(_COMMAND)
