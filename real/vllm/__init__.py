"""The testbed inside vLLM: classes for its `scheduler_cls`. Importing this package loads neither vLLM nor torch.

    TESTBED_OBSERVE=log.jsonl vllm serve MODEL --scheduler-cls real.vllm.ObservedScheduler

ObservedScheduler, ObservedAsyncScheduler: vLLM's own schedulers, with a log of their decisions. TestbedScheduler: this
testbed's scheduler decides. Its class is in the package that configures the testbed, and is found through an entry
point of pyproject.toml.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from testbed.errors import ConfigError

GROUP = "testbed.vllm"
OLDEST: Final = (0, 28)
NEWEST: Final = (0, 33)
SPAN: Final = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"  # supported versions of vLLM


def __getattr__(name: str) -> Any:
    """Loads a class when vLLM asks for it, as none of them can be imported without vLLM."""
    if name in ("ObservedScheduler", "ObservedAsyncScheduler"):
        from real.vllm import observer

        return getattr(observer, name)
    for entry in entry_points(group=GROUP, name=name):
        import vllm

        check_version(vllm.__version__)  # first, as in another version its imports may fail
        return _loaded(entry)
    if name == "TestbedScheduler":
        raise _not_installed(name, "and no installed package has them")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _loaded(entry: EntryPoint) -> Any:
    """Loads an entry point. Raises ConfigError if the installed entry points are older than this code."""
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        if error.name is None or not f"{entry.module}.".startswith(f"{error.name}."):
            raise  # another package is missing, which the error names
        raise _not_installed(entry.name, f"and {entry.value}, which they name, is not there") from error


def _not_installed(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{__name__}.{name} is found through this package's entry points, {why}: pip install this repository (again) "
        "in vLLM's environment"
    )


def is_known(version: str) -> bool:
    """Whether a version of vLLM is supported."""
    parts = version.split(".")
    try:
        found = int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return False
    return OLDEST <= found <= NEWEST


def check_version(version: str) -> None:
    """Raises ConfigError if a version of vLLM is not supported."""
    if not is_known(version):
        raise ConfigError(
            f"vLLM {version} is installed, and this testbed's scheduler fits into {SPAN}: install one of these"
        )
