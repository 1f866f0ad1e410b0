"""Runs the tests of tests/kernels/interpreted in a process of their own with TRITON_INTERPRET=1."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent / "interpreted"


def version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version(name).split(".")[:2])


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_in_the_interpreter():
    if version("triton") < (3, 7) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton before 3.7 breaks with numpy 2.4 and later")
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-rp", "-p", "no:cacheprovider", str(FOLDER)]
    env = own | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    for file in FOLDER.glob("test_*.py"):
        assert f"{file.name}::" in done.stdout.partition("PASSED ")[2], f"nothing of {file} passed"
