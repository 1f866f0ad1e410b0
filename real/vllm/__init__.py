"""The testbed inside vLLM: classes for its `scheduler_cls`. Importing this loads neither vLLM nor torch.

    TESTBED_OBSERVE=log.jsonl vllm serve MODEL --scheduler-cls real.vllm.ObservedScheduler

ObservedScheduler, ObservedAsyncScheduler: vLLM's own schedulers, with a log of what they decide. TestbedScheduler: this
testbed's scheduler decides. It is configured where all of the testbed is, and registered from there (the entry points
of pyproject.toml).
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from testbed.errors import ConfigError

GROUP = "testbed.vllm"
OLDEST: Final = (0, 28)
NEWEST: Final = (0, 33)
SPAN: Final = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"  # vLLM: where this testbed fits into


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


def is_known(version: str) -> bool:
    """Whether it is of those that this was written for."""
    parts = version.split(".")
    try:
        found = int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return False
    return OLDEST <= found <= NEWEST


def check_version(version: str) -> None:
    """Raises ConfigError for a vLLM that this was not written for."""
    if not is_known(version):
        raise ConfigError(
            f"vLLM {version} is installed, and this testbed's scheduler fits into {SPAN}: install one of these"
        )
