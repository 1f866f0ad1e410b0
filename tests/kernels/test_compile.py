"""Ahead-of-time compilation, which needs no GPU: every kernel compiles, and the main shapes spill no register."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

SHARED_BYTES = {"80": 99 * 1024, "90": 227 * 1024}  # of a program; what sm_80 is given, 8.6, 8.9 and 12.0 are given too


def compile_by(arguments: list[str], cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.kernels.compile", *arguments]
    own = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    own |= {"TRITON_CACHE_DIR": str(cache), **env}  # an empty cache: what is compiled is this source
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize(("target", "group"), [("80", 8), ("90", 4)])
def test_main_shapes_compile_without_spills(target, group, tmp_path):
    wanted = rf"bf16 head 128 group {group}$|^(heads|move|largest|least|race|pick) |bf16 experts"
    done = compile_by(["--targets", target, "--filter", wanted], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()[1:]
    assert len(lines) == 13 + 11 + 4
    for line in lines:
        name, of_target, registers, local_bytes, shared_bytes, num_warps = line.rsplit(maxsplit=5)
        assert of_target == f"sm_{target}"
        assert int(registers) <= 255, name
        assert int(local_bytes) == 0, f"{name} spills registers"
        assert int(registers) * 32 * int(num_warps) <= 65536, f"{name} has too many warps for its registers"
        assert int(shared_bytes) <= SHARED_BYTES[target], f"{name} does not fit a multiprocessor"


def test_what_is_rare_compiles_too(tmp_path):
    """FP8 as bits (e4m3 on sm_80) and as the GPU reads it, windows, ALiBi, a head size that is no power of two, the
    largest, experts."""
    wanted = (
        r"^decode split bf16 head 64 group 4 e|^store bf16 head 64 group 4 e|^plan .*window|^prefill .*alibi"
        r"|^decode bf16 head 80 group 1$|^(decode|prefill) bf16 head 256 group 1$|e4m3 experts"
    )
    done = compile_by(["--filter", wanted], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()[1:]
    assert len(lines) == 2 * (2 + 2 + 2 + 2 + 1 + 2 + 4)
    for line in lines:
        _, target, _, _, shared_bytes, _ = line.rsplit(maxsplit=5)
        assert int(shared_bytes) <= SHARED_BYTES[target.removeprefix("sm_")], line


def test_with_the_interpreter_nothing_is_compiled(tmp_path):
    done = compile_by([], tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert done.stderr == "error: TRITON_INTERPRET is set, with which nothing is compiled; unset it\n"
