"""What reads standard output may be gone, or know fewer characters: nothing that a command does is lost by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.experiments.kit import SHORT, TINY


def said_to(reader: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`testbed <arguments> | <reader>`; the exit status is the command's own."""
    command = ["bash", "-c", f'"$@" | {reader}; exit ${{PIPESTATUS[0]}}', "-", sys.executable, "-m", "experiments"]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


def test_a_sweep_whose_reader_has_left_runs_all_its_points(tmp_path: Path) -> None:
    folder = tmp_path / ("sweep" * 40)  # long lines: they do not fit into a pipe's buffer
    said = said_to("head -1", "run", "-m", "seed=range(0,40)", *TINY, *SHORT, f"hydra.sweep.dir={folder}")
    assert said.stderr == ""
    assert said.returncode == 0
    assert len(list(folder.glob("*/done"))) == 40


def test_a_command_whose_reader_has_left_ends_in_silence() -> None:
    said = said_to("true", "list")
    assert (said.returncode, said.stderr) == (0, "")


def test_a_run_that_fails_says_so_to_a_script_whose_reader_has_left(tmp_path: Path) -> None:
    said = said_to("true", "run", *TINY, *SHORT, "scheduler.max_model_len=2", f"hydra.run.dir={tmp_path / 'run'}")
    assert said.returncode == 1
    assert said.stderr.startswith("error: ")
    assert "could never fit and ended as 'ignored'" in said.stderr


def test_a_terminal_that_lacks_a_character_loses_no_result(tmp_path: Path) -> None:
    search = ("capacity", *TINY, *SHORT, "slo.ttft_s=1", "--tolerance", "0.5", "--out", str(tmp_path / "é"))
    said = said_to("cat", *search, PYTHONIOENCODING="ascii")
    assert "TTFT \\u2264 1" in said.stdout, said.stderr
    assert "≤" in (tmp_path / "é" / "capacity.md").read_text(encoding="utf-8")
    assert "\\u2026" in said_to("cat", "list", PYTHONIOENCODING="ascii").stdout
