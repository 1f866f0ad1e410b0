"""Which vLLM this testbed fits into."""

from __future__ import annotations

from typing import Final

from testbed.errors import ConfigError

OLDEST: Final = (0, 28)
NEWEST: Final = (0, 33)


def check_version(version: str) -> None:
    """Raises ConfigError for a vLLM that this was not written for."""
    parts = version.split(".")
    try:
        found = int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        found = (0, 0)
    if not OLDEST <= found <= NEWEST:
        span = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
        raise ConfigError(
            f"vLLM {version} is installed, and this testbed's scheduler fits into {span}: install one of these"
        )
