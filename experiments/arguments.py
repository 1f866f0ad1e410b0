"""Words of a command line that mean the same to several commands. Imports nothing that takes time."""

from __future__ import annotations

from pathlib import Path

from testbed.errors import ConfigError


def folder_named(text: str) -> Path:
    """A folder. Raises ConfigError for none: it would be the working directory."""
    if not text.strip():
        raise ConfigError("a folder's name is empty; name one, as runs/a")
    return Path(text)
