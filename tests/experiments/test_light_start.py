"""What a simulated run does not need, it does not import: half of a short run's time was pandas. Where what it needs is
not there, one line says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experiments import tables_on_the_spot as spot
from tests.experiments.kit import SHORT, TINY

CODE = """
import sys
from experiments.cli import main
assert main(sys.argv[1:]) == 0
print(*(name for name in ("pandas", "matplotlib", "scipy", "torch", "pyarrow.compute") if name in sys.modules))
"""


def loads(folder: Path, *options: str) -> str:
    """Returns which of the heavy libraries a run loads."""
    arguments = ["run", *TINY, *SHORT, *options, f"hydra.run.dir={folder / 'run'}"]
    paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_simulated_run_imports_nothing_heavy(tmp_path: Path) -> None:
    assert loads(tmp_path) == ""


def test_prices_by_tables_are_read_without_pandas(tmp_path: Path) -> None:
    spot.aiconfigurator(tmp_path)
    assert loads(tmp_path, "cost=tables", "device=h200") == "pyarrow.compute"


@pytest.mark.parametrize("imported", ["experiments.cli", "experiments"])
def test_where_files_cannot_be_locked_one_line_says_so(imported: str) -> None:
    """As on Windows."""
    code = f"import sys; sys.modules['fcntl'] = None; import testbed, analysis; import {imported}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == "error: the testbed needs Linux or macOS; on Windows, use WSL\n"
