"""Which vLLM this testbed fits into."""

from __future__ import annotations

from typing import Final

from testbed.errors import ConfigError

OLDEST: Final = (0, 28)
NEWEST: Final = (0, 33)
SPAN: Final = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def is_known(version: str) -> bool:
    """Whether it is of those that this was written for."""
    parts = version.split(".")
    try:
        found = int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return False
    return OLDEST <= found <= NEWEST


def check_version(version: str) -> None:
    """Raises ConfigError for a vLLM that this was not written for."""
    if not is_known(version):
        raise ConfigError(
            f"vLLM {version} is installed, and this testbed's scheduler fits into {SPAN}: install one of these"
        )
