"""What `make` says of variables that it cannot use."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("given", ["GPU_ROUNDS=0", "GPU_SECONDS=1m"])
def test_make_gpu_refuses_a_number_before_its_first_part(given: str) -> None:
    command = ["make", "--no-print-directory", "-k", "-o", "setup", "gpu", given]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode != 0
    assert f"error: {given}; expected a whole number, 1 or more\n" in made.stderr
    assert made.stdout == ""
