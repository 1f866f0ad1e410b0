"""Policies made of others, which they list in an attribute `parts`: who is bound and told, and whose attributes count.

The parts are set when the policy is made; they are looked up once, when the scheduler is built.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def with_parts(policies: Iterable[Any]) -> list[Any]:
    """Returns the policies, each before its parts. An attribute `parts` that is no tuple or list is another thing."""
    found = []
    for policy in policies:
        parts = getattr(policy, "parts", ())
        found += [policy, *(with_parts(parts) if isinstance(parts, tuple | list) else ())]
    return found


def declared(policy: Any, name: str, default: Any) -> Any:
    """Returns an optional attribute of a policy: its own, or that of the first part which has it."""
    return next((getattr(one, name) for one in with_parts([policy]) if hasattr(one, name)), default)
