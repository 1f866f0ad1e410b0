"""The testbed inside vLLM: classes for its `scheduler_cls`. Importing this loads neither vLLM nor torch.

    TESTBED_OBSERVE=log.jsonl vllm serve MODEL --scheduler-cls real.vllm.ObservedScheduler

ObservedScheduler, ObservedAsyncScheduler: vLLM's own schedulers, with a log of what they decide. TestbedScheduler: this
testbed's scheduler decides. It is configured where all of the testbed is, and registered from there (the entry points
of pyproject.toml).
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from real.vllm.versions import check_version

GROUP = "testbed.vllm"


def __getattr__(name: str) -> Any:
    """Loads a class when vLLM asks for it: without vLLM none of them can be."""
    if name in ("ObservedScheduler", "ObservedAsyncScheduler"):
        from real.vllm import observer

        return getattr(observer, name)
    for entry in entry_points(group=GROUP, name=name):
        import vllm

        check_version(vllm.__version__)  # first: in another one what it imports may be missing
        return entry.load()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
