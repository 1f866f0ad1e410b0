"""The testbed inside vLLM: classes for its `scheduler_cls`. Importing this loads neither vLLM nor torch.

    TESTBED_OBSERVE=log.jsonl vllm serve MODEL --scheduler-cls real.vllm.ObservedScheduler

ObservedScheduler, ObservedAsyncScheduler: vLLM's own schedulers, with a log of what they decide. TestbedScheduler: this
testbed's scheduler decides (it is configured where all of the testbed is, in experiments).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "ObservedScheduler": "real.vllm.observer",
    "ObservedAsyncScheduler": "real.vllm.observer",
    "TestbedScheduler": "experiments.inside_vllm",
}


def __getattr__(name: str) -> Any:
    """Loads a class when vLLM asks for it: without vLLM none of them can be."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
