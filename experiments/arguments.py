"""Words of a command line that mean the same to several commands. Imports nothing that takes time."""

from __future__ import annotations

from pathlib import Path

from testbed.errors import ConfigError


def folder_named(text: str) -> Path:
    """A folder. Raises ConfigError for none: it would be the working directory."""
    return Path(words(text))


def words(text: str) -> str:
    """What may not be empty. Raises ConfigError."""
    if not text.strip():
        raise ConfigError("a name on the command line is empty; give one, as runs/a, or leave the option out")
    return text
