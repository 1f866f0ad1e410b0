"""Experiments: command line, configuration and wiring. The only package that knows both backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from testbed import compiled

compiled.decide()  # before any module of this package that may be compiled

if TYPE_CHECKING:
    from experiments.api import replay, simulate
    from experiments.capacity import find_capacity
    from experiments.text import LLM

_PLACES = {  # imported on first access: pandas and the engine are not loaded for commands that do not need them
    "LLM": "experiments.text",
    "find_capacity": "experiments.capacity",
    "replay": "experiments.api",
    "simulate": "experiments.api",
}
__all__ = ["LLM", "find_capacity", "replay", "simulate"]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        from importlib import import_module  # not at the top: compiled.decide() must run first

        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'experiments' has no attribute {name!r}")
