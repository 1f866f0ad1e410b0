"""Words of a command line that mean the same to several commands. Imports nothing that takes time."""

from __future__ import annotations

import argparse
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
