"""Experiments: command line, configuration and wiring. The only package that knows both backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from testbed import compiled

compiled.decide()  # before any module of this package that may be compiled

if TYPE_CHECKING:
    from experiments.api import cost_model, replay, simulate
    from experiments.capacity import find_capacity
    from experiments.text import LLM
    from real.text.sampling import SamplingParams

_PLACES = {  # imported on first access: pandas and the engine are not loaded for commands that do not need them
    "LLM": "experiments.text",
    "SamplingParams": "real.text.sampling",
    "cost_model": "experiments.api",
    "find_capacity": "experiments.capacity",
    "replay": "experiments.api",
    "simulate": "experiments.api",
}
__all__ = ["LLM", "SamplingParams", "cost_model", "find_capacity", "replay", "simulate"]


def _put_ours_first() -> None:
    """Puts our packages before a user's own folder. Raises ImportError if another module hides one of them."""
    import sys  # not at the top: compiled.decide() must run first
    from importlib.util import find_spec
    from pathlib import Path

    root = Path(__file__).parents[1]
    if str(root) not in sys.path:
        sys.path.append(str(root))  # the finder of an editable install comes last
    for name in ("analysis", "real", "sim"):
        spec = find_spec(name)
        if spec is not None and spec.origin and root.resolve() not in Path(spec.origin).resolve().parents:
            raise ImportError(f"{spec.origin} hides the testbed's package {name!r}; give that file another name")


def refuse_windows(error: type[Exception]) -> None:
    """Raises `error` where run folders cannot be locked."""
    from importlib.util import find_spec  # not at the top, as above

    if find_spec("fcntl") is None:
        raise error("the testbed needs Linux or macOS; on Windows, use WSL")


_put_ours_first()


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        from importlib import import_module  # not at the top: compiled.decide() must run first

        refuse_windows(ImportError)
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'experiments' has no attribute {name!r}")
