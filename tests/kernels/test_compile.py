"""Ahead-of-time compilation, which needs no GPU: every kernel compiles, and the main shapes spill no register."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def compile_by(arguments: list[str], cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "real.kernels.compile", *arguments]
    own = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    own |= {"TRITON_CACHE_DIR": str(cache), **env}  # an empty cache: what is compiled is this source
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize("target", ["80", "90"])
def test_main_shapes_compile_without_spills(target, tmp_path):
    wanted = r"bf16 head 128 group [48]$|^(store|reduce|copy)"
    done = compile_by(["--targets", target, "--filter", wanted], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()[1:]
    assert len(lines) == 2 * 6 + 10
    for line in lines:
        name, of_target, registers, local_bytes, _, _ = line.rsplit(maxsplit=5)
        assert of_target == f"sm_{target}"
        assert int(registers) <= 255, name
        assert int(local_bytes) == 0, f"{name} spills registers"


def test_what_is_rare_compiles_too(tmp_path):
    """FP8 as bits (e4m3 on sm_80) and as the GPU reads it, ALiBi, a head size that is no power of two."""
    wanted = r"^decode split bf16 head 64 group 4 e|^prefill .*alibi|^decode bf16 head 80 group 1$"
    done = compile_by(["--filter", wanted], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 1 + 2 * 5


def test_with_the_interpreter_nothing_is_compiled(tmp_path):
    done = compile_by([], tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert done.stderr == "error: TRITON_INTERPRET is set, with which nothing is compiled; unset it\n"
