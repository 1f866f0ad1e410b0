"""What a simulated run does not need, it does not import: half of a short run's time was pandas. Where what it needs is
not there, one line says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_where_files_cannot_be_locked_one_line_says_so() -> None:
    """As on Windows. Whoever imports it can catch the error."""
    code = """
import sys
sys.modules["fcntl"] = None
import testbed, analysis, experiments.cli
try:
    from experiments import simulate
except ImportError as error:
    print(error)
sys.exit(experiments.cli.main(["list"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    said = "the testbed needs Linux or macOS; on Windows, use WSL\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, said, f"error: {said}")
