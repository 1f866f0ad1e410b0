"""Words of messages that do not depend on what they are about."""

from __future__ import annotations


def count(num: int, noun: str) -> str:
    """Returns a count with its noun, in the plural unless it is 1: "1 request", "1,234 requests"."""
    return f"{num:,} {noun}{'s' * (num != 1)}"
