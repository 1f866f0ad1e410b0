"""What a simulated run does not need, it does not import: half of a short run's time was pandas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.experiments.kit import SHORT, TINY

CODE = """
import sys
from experiments.cli import main
assert main(sys.argv[1:]) == 0
print(*(name for name in ("pandas", "matplotlib", "scipy", "torch", "pyarrow.compute") if name in sys.modules))
"""


def test_a_simulated_run_imports_nothing_heavy(tmp_path: Path) -> None:
    arguments = ["run", *TINY, *SHORT, f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "", done.stdout
