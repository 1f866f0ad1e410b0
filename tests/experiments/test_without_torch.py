"""The simulator runs where there is no torch, and says what the real engine lacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.experiments.kit import SHORT, TINY, manifest_of

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "triton", "safetensors", "flash_attn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from experiments.cli import main
sys.exit(main(sys.argv[1:]))
"""


def blocked(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKER, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_simulator_runs(tmp_path: Path) -> None:
    done = blocked("run", *TINY, *SHORT, f"hydra.run.dir={tmp_path / 'run'}")
    assert (done.returncode, done.stderr) == (0, "")
    assert manifest_of(tmp_path / "run")["status"] == "complete"


def test_the_engine_says_what_it_needs(tmp_path: Path) -> None:
    done = blocked("run", *TINY, *SHORT, "backend=real", f"hydra.run.dir={tmp_path / 'run'}")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: backend=real needs the package 'torch'")
    assert "pip install" in done.stderr


def test_a_calibration_says_so_before_anything_else(tmp_path: Path) -> None:
    done = blocked("calibrate", *TINY, "--out", str(tmp_path / "fit"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: testbed calibrate needs the package 'torch'")
