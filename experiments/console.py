"""What commands read and print: words of a command line that mean the same to several, tables as aligned text (which
is Markdown too), streams that take whatever is said. Imports nothing that takes time."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from testbed.errors import ConfigError, RunFolderError
from testbed.foreign_text import nearest


class UsageError(ConfigError):
    """A command line that its command does not take."""

    exit_status = 2


class Parser(argparse.ArgumentParser):
    """As argparse's, whose every complaint is one line. Raises UsageError."""

    def error(self, message: str) -> NoReturn:
        flag = next((word for word in message.split() if word.startswith("-")), "").partition("=")[0]
        hint = nearest(flag, self._option_string_actions) if message.startswith("unrecognized") else ""
        raise UsageError(f"{message}; {hint}`{self.prog} --help` lists what there is")


def folder_named(text: str) -> Path:
    """A folder. Raises ConfigError for none: it would be the working directory."""
    return Path(words(text))


def refuse_existing(path: Path | None, overwrite: bool, what: str = "--out") -> None:
    """Raises RunFolderError for what is there already and may not be replaced. what: another of which to choose."""
    if path is not None and path.exists() and not overwrite:
        raise RunFolderError(f"{path} exists; choose another {what} or pass --overwrite")


def words(text: str) -> str:
    """What may not be empty. Raises ConfigError."""
    if not text.strip():
        raise ConfigError("a name on the command line is empty; give one, as runs/a, or leave the option out")
    return text


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """A Markdown table whose columns are aligned. numbers: as all but the first are, at the right."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    is_right = [numbers and index > 0 for index in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        columns = zip(cells, widths, is_right, strict=True)
        return f"| {' | '.join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in columns)} |"

    rule = "|".join("-" * (width + 1) + (":" if right else "-") for width, right in zip(widths, is_right, strict=True))
    return "\n".join([line(headers), f"|{rule}|", *map(line, rows)])


def percent(share: float | None, *, signed: bool = True) -> str:
    """A share of 1 in percent: with one decimal below 100, without from there on; a dash where it is not known."""
    if share is None or share != share:
        return "–"
    value = 100.0 * share
    digits = 0 if abs(value) >= 99.95 else 1
    text = f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"
    return "0.0" if float(text) == 0 else text


def milliseconds(seconds: float | None) -> str:
    """Seconds in ms, four significant digits."""
    if seconds is None or seconds != seconds:
        return "–"
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def take_any_character() -> None:
    """A character that the terminal's encoding lacks is shown as its escape, and stops nothing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def go_on_unheard() -> None:
    """After a BrokenPipeError: what is still said to standard output is dropped."""
    if sys.stdout is not None:  # as where it was closed from the start
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
