"""Experiments: command line, configuration and wiring. The only package that knows both backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from testbed import compiled

compiled.decide()  # before any module of this package that may be compiled

if TYPE_CHECKING:
    from experiments.api import replay, simulate
    from experiments.capacity import find_capacity
    from experiments.text import LLM

__all__ = ["LLM", "find_capacity", "replay", "simulate"]


def __getattr__(name: str) -> Any:
    """`from experiments import simulate, LLM` without loading pandas or an engine for every command."""
    if name == "LLM":
        from experiments.text import LLM

        return LLM
    if name == "find_capacity":
        from experiments.capacity import find_capacity

        return find_capacity
    if name in __all__:
        from experiments import api

        return getattr(api, name)
    raise AttributeError(f"module 'experiments' has no attribute {name!r}")
