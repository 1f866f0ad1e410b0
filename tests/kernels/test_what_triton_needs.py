"""What Triton builds its launchers with is looked for where Triton looks, and what is missing is named."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from real.kernels import why_no_launchers


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One that has nothing but the headers."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    why_no_launchers.cache_clear()
    yield tmp_path
    why_no_launchers.cache_clear()


def add_program(folder: Path, name: str) -> None:
    (folder / name).touch(mode=0o755)


@pytest.mark.parametrize(
    ("programs", "named", "problem"),
    [
        (["gcc"], None, None),
        (["clang"], None, None),
        (["mycc"], "mycc", None),
        ([], None, "there is none; install gcc or clang"),
        (["cc"], None, "there is none"),  # which Triton does not try
        (["gcc"], "mycc", "CC=mycc is not found"),  # which Triton takes all the same
    ],
)
def test_a_compiler(machine, monkeypatch, programs, named, problem):
    for name in programs:
        add_program(machine, name)
    if named is not None:
        monkeypatch.setenv("CC", named)
    reason = why_no_launchers()
    assert reason is None if problem is None else problem in reason


def test_the_headers_of_this_python(machine):
    add_program(machine, "gcc")
    (machine / "Python.h").unlink()
    assert why_no_launchers() == (
        f"Triton needs Python.h to build its launchers, and {machine} lacks it; install python3-dev"
    )
