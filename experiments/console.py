"""Helpers that commands share for reading arguments and printing: argument types, aligned tables (also valid Markdown),
output streams that accept any character. Imports nothing that is slow to import."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from testbed.errors import ConfigError
from testbed.foreign_text import nearest, visible


class UsageError(ConfigError):
    """A command line that the command rejects."""

    exit_status = 2


class Parser(argparse.ArgumentParser):
    """An argparse parser that reports every error in one line, as a UsageError."""

    def error(self, message: str) -> NoReturn:
        if bad := re.fullmatch(r"argument (\S+): invalid (int|float) value: (.*)", message):
            kind = "a whole number" if bad[2] == "int" else "a number"
            raise UsageError(f"{bad[1]} is {bad[3]}; it must be {kind}")
        flag = next((word for word in message.split() if word.startswith("-")), "").partition("=")[0]
        hint = nearest(flag, self._option_string_actions) if message.startswith("unrecognized") else ""
        raise UsageError(f"{message}; {hint}`{self.prog} --help` lists what there is")


def folder_named(text: str) -> Path:
    """Returns the path of a folder. Raises ConfigError for an empty text, which Path reads as the working directory."""
    return Path(words(text))


def from_here(path: Path | str) -> str:
    """Returns a path as one would type it here: relative to the working directory if it lies below it."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here) if here in path.parents else path)


def words(text: str) -> str:
    """Returns `text`. Raises ConfigError if it is empty or blank."""
    if not text.strip():
        raise ConfigError("a name on the command line is empty; give one, as runs/a, or leave the option out")
    return text


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """Returns a Markdown table with aligned columns. numbers: right-align all columns except the first."""
    headers, *rows = ([*map(visible, row)] for row in (headers, *rows))
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    is_right = [numbers and index > 0 for index in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        columns = zip(cells, widths, is_right, strict=True)
        return f"| {' | '.join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in columns)} |"

    rule = "|".join("-" * (width + 1) + (":" if right else "-") for width, right in zip(widths, is_right, strict=True))
    return "\n".join([line(headers), f"|{rule}|", *map(line, rows)])


def as_markdown(lines: Sequence[str]) -> str:
    """Printed lines as Markdown: notes and trust, which it would run together, become items of a list."""
    return re.sub(r"(?m)^(?=note: |trust in )", "- ", "\n".join(lines))


def percent(share: float | None, *, signed: bool = True) -> str:
    """Formats a fraction in percent: one decimal below 100 %, none from 100 % on; a dash if it is None or NaN."""
    if share is None or share != share:
        return "–"
    value = 100.0 * share
    digits = 0 if abs(value) >= 99.95 else 1
    text = f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"
    return "0.0" if float(text) == 0 else text


def milliseconds(seconds: float | None) -> str:
    """Formats seconds in ms with four significant digits, without decimals from 1000 ms on; a dash for None or NaN."""
    if seconds is None or seconds != seconds:
        return "–"
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def take_any_character() -> None:
    """Lets standard output and error print characters that their encoding lacks as escapes instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def open_closed_streams() -> None:
    """Opens standard input, output and error to nowhere where they were closed when Python started (`>&-`): nothing
    can be printed to None, and the next opened file would be taken for them by libraries and other processes."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def go_on_unheard() -> None:
    """Discards further standard output; called after a BrokenPipeError."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
