"""The testbed inside vLLM: classes for its `scheduler_cls`. Imported by vLLM; imports nothing of the engine here.

    TESTBED_OBSERVE=log.jsonl vllm serve MODEL --scheduler-cls real.vllm.ObservedScheduler

ObservedScheduler, ObservedAsyncScheduler: vLLM's own schedulers, with a log of what they decide.
"""

from __future__ import annotations

from typing import Any

_OBSERVERS = ("ObservedScheduler", "ObservedAsyncScheduler")


def __getattr__(name: str) -> Any:
    """Loads a class when vLLM asks for it: without vLLM nothing here can be."""
    if name in _OBSERVERS:
        from real.vllm import observer

        return getattr(observer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
