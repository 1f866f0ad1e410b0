"""The testbed inside vLLM: classes for its `scheduler_cls`. Importing this loads neither vLLM nor torch.

    TESTBED_OBSERVE=log.jsonl vllm serve MODEL --scheduler-cls real.vllm.ObservedScheduler

ObservedScheduler, ObservedAsyncScheduler: vLLM's own schedulers, with a log of what they decide. TestbedScheduler: this
testbed's scheduler decides. It is configured where all of the testbed is, and registered from there (the entry points
of pyproject.toml).
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from real.vllm.versions import check_version
from testbed.errors import ConfigError

GROUP = "testbed.vllm"


def __getattr__(name: str) -> Any:
    """Loads a class when vLLM asks for it: without vLLM none of them can be."""
    if name in ("ObservedScheduler", "ObservedAsyncScheduler"):
        from real.vllm import observer

        return getattr(observer, name)
    for entry in entry_points(group=GROUP, name=name):
        import vllm

        check_version(vllm.__version__)  # first: in another one what it imports may be missing
        return _loaded(entry)
    if name == "TestbedScheduler":
        raise _not_installed(name, "and no installed package has them")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _loaded(entry: EntryPoint) -> Any:
    """Raises ConfigError where what was installed is older than this code."""
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        if error.name is None or not f"{entry.module}.".startswith(f"{error.name}."):
            raise  # of another package: it says which
        raise _not_installed(entry.name, f"and {entry.value}, which they name, is not there") from error


def _not_installed(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{__name__}.{name} is found through this package's entry points, {why}: pip install this repository (again) "
        "in vLLM's environment"
    )
