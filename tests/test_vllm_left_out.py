"""tests/vllm where it cannot run: all is skipped, with the reason, and pytest ends well however it is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = ["tests/vllm/test_decides.py", "tests/vllm/test_reset.py"]
STUBS = {  # of vLLM, and of Triton, for the newer model runner: enough to be asked
    "none": [],
    "vLLM that takes no backend": [
        ("vllm/__init__.py", ""), ("vllm/triton_utils.py", "HAS_TRITON = False"), ("triton/__init__.py", ""),
        ("triton/backends.py", "backends = {}"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("asked", [["tests/vllm"], FILES], ids=["folder", "files"])
@pytest.mark.parametrize(
    ("stubs", "is_newer", "why"),
    [
        ("none", False, "vLLM is not in this environment: make test-vllm"),
        ("none", True, "vLLM is not in this environment: make test-vllm"),
        ("vLLM that takes no backend", True, "this vLLM takes no other backend of Triton for a CPU's"),
    ],
)
def test_all_is_skipped_with_the_reason(tmp_path: Path, asked: list[str], stubs: str, is_newer: bool, why: str) -> None:
    """A copy of the folder by itself: its modules are not imported."""
    shutil.copytree(ROOT / "tests" / "vllm", tmp_path / "tests" / "vllm")
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers = vllm\naddopts = -q --strict-markers -p no:cacheprovider\n"
    )
    for name, text in STUBS[stubs]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    if not STUBS[stubs] and find_spec("vllm") is not None:
        pytest.skip("vLLM is here")
    variables = os.environ | {"VLLM_USE_V2_MODEL_RUNNER": str(int(is_newer)), "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-rs", *asked]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    num = len(list((tmp_path / "tests" / "vllm").glob("test_*.py"))) if asked != FILES else len(FILES)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"SKIPPED [{num}]" in done.stdout
    assert why in done.stdout
