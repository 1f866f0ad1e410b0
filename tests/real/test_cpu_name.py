"""A processor has a name on every system."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from real import cpu_name as names


@pytest.fixture(autouse=True)
def forgotten():
    names.cpu_name.cache_clear()
    yield
    names.cpu_name.cache_clear()


@pytest.mark.parametrize(
    ("told", "expected"),
    [("model name\t: AMD EPYC 9\nmodel name\t: another\n", "AMD EPYC 9"), ("CPU part\t: 0xd4f\n", platform.machine())],
)
def test_linux_tells_it_unless_the_processor_is_an_arm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str, expected: str
) -> None:
    (tmp_path / "cpuinfo").write_text(told)
    monkeypatch.setattr(names, "CPUINFO", tmp_path / "cpuinfo")
    assert names.cpu_name() == expected


def test_what_may_not_be_read_tells_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: object, **__: object) -> str:
        raise PermissionError

    (tmp_path / "cpuinfo").touch()
    monkeypatch.setattr(names, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(Path, "read_text", refused)
    assert names.cpu_name() == platform.machine()


@pytest.mark.parametrize(
    ("sysctl", "expected"),
    [("echo Apple M3 Pro", "Apple M3 Pro"), ("exit 1", platform.machine()), (None, platform.machine())],
)
def test_macos_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sysctl: str | None, expected: str) -> None:
    if sysctl is not None:
        (tmp_path / "sysctl").write_text(f"#!/bin/sh\n{sysctl}\n")
        (tmp_path / "sysctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(names, "CPUINFO", tmp_path / "none")
    assert names.cpu_name() == expected
