"""Progress of what takes a while, with and without a terminal."""

import sys

import pytest

from analysis import progress as module
from analysis.progress import progress, progressing


def test_without_a_terminal_a_line_comes_every_so_often(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(module, "LINE_S", 1e-9)
    assert list(progressing("abc", "fit", "trial")) == ["a", "b", "c"]
    with progress("capacity", "point") as bar:
        bar.update(2)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in said] == ["fit: 1/3", "fit: 2/3", "fit: 3/3", "capacity: 2 points"]
    assert " left, " in said[0]
    assert "trial/s" in said[0]


def test_what_is_over_before_the_first_line_says_nothing(capsys) -> None:
    assert list(progressing(iter("abc"), "fit", "trial")) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("report", "figure", 4) as bar:
        assert not isinstance(bar.fp, module._Lines)
        assert bar.total == 4
