"""Ahead-of-time compilation, which needs no GPU: every kernel compiles, and the main shapes spill no register."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec

import pytest

from tests.kernels.compile import main

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

SHARED_BYTES = {"sm_80": 99 * 1024, "sm_90": 227 * 1024}  # of a program; 8.6, 8.9 and 12.0 are given what 8.0 is given
MAIN = (
    r"bf16 head 128 group (8 sm_80|4 sm_90)$|^(heads|move|largest|least|race|pick) |bf16 experts|plain weight"
    r"|between GEMMs"
)
# FP8 as bits (e4m3 on sm_80) and as the GPU reads it, windows, ALiBi, a head size that is no power of two, the largest,
# experts, weights
RARE = (
    r"^decode split bf16 head 64 group 4 e|^store bf16 head 64 group 4 e|^plan .*window|^prefill .*alibi"
    r"|^decode bf16 head 80 group 1 sm|^(decode|prefill) bf16 head 256 group 1 sm"
    r"|^(gate_up|down) .*e4m3 (parts )?experts|FP8 weight"
)


def test_all_kinds_compile_and_the_main_shapes_without_spills(tmp_path):
    command = [sys.executable, "-m", "tests.kernels.compile", "--filter", f"{MAIN}|{RARE}"]
    own = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    own["TRITON_CACHE_DIR"] = str(tmp_path)  # an empty cache: what is compiled is this source
    own["TRITON_DISABLE_LINE_INFO"] = "1"  # a tenth of the time, and no register
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines, num_main = done.stdout.splitlines()[1:], Counter()
    for line in lines:
        name, target, registers, local_bytes, shared_bytes, num_warps = line.rsplit(maxsplit=5)
        assert int(shared_bytes) <= SHARED_BYTES[target], f"{line} does not fit a multiprocessor"
        if re.search(MAIN, f"{name} {target}"):
            num_main[target] += 1
            assert int(registers) <= 255, line
            assert int(local_bytes) == 0, f"{line} spills registers"
            assert int(registers) * 32 * int(num_warps) <= 65536, f"{line} has too many warps for its registers"
    assert num_main == {"sm_80": 13 + 11 + 15 + 3, "sm_90": 13 + 11 + 15 + 3 + 4}  # plain weights only on Hopper
    assert len(lines) == num_main.total() + 2 * (2 + 2 + 2 + 2 + 1 + 2 + 12 + 9)


def test_with_the_interpreter_nothing_is_compiled(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main([]) == 2
    assert capsys.readouterr().err == "error: TRITON_INTERPRET is set, with which nothing is compiled; unset it\n"
