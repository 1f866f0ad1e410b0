"""The environment of a run: versions of code and packages, and the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from xxhash import xxh64

from real.cpu_name import cpu_name

PACKAGES = (
    "torch", "triton", "flash-attn", "transformers", "simpy", "pandas", "pyarrow", "numpy", "matplotlib", "xxhash",
    "hydra-core",
)  # fmt: skip
ROOT = Path(__file__).parents[2]
_MAKE_RUNS = ("testbed", "sim", "real", "experiments")  # not analysis, which only reads runs
_GIT = ("git", "-C", str(ROOT), "describe", "--always", "--dirty")
_GPU = "name,memory.total"


def ask_early() -> None:
    """Starts git and nvidia-smi in the background; the functions below wait for their output."""
    if (ROOT / ".git").exists():
        _started(*_GIT)
    _started(*_of_driver(_GPU))


@cache
def describe_versions() -> dict[str, str]:
    """Returns {package: version} of the installed packages; ours includes the commit if it runs from a checkout."""
    found = {"python": platform.python_version(), "llm-serving-testbed": _own_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def versions_in_vllm(version: str) -> dict[str, Any]:
    """Returns the manifest's entry for a run in vLLM. version: vLLM's, which is not looked up: its distribution has
    several names."""
    return {"versions": {**describe_versions(), "vllm": version}}


def _own_version() -> str:
    try:
        own = version("llm-serving-testbed")
    except PackageNotFoundError:
        own = "not installed"
    commit = _answer(*_GIT) if (ROOT / ".git").exists() else None
    return own if commit is None else f"{own}+{commit}"


@cache
def source_hash() -> str:
    """Returns the hash of all source that makes a run: a version is the same for different local changes."""
    digest = xxh64()
    plugins = ROOT / "experiments" / "plugins"  # only in a checkout: an installation has them elsewhere
    found = (file for room in _MAKE_RUNS for kind in ("*.py", "*.[ch]") for file in (ROOT / room).rglob(kind))
    for file in sorted(file for file in found if plugins not in file.parents):
        digest.update(f"{file.relative_to(ROOT).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()


@cache
def describe_machine() -> dict[str, Any]:
    """Returns {platform, cpu, num_cores, gpu}. The GPU is read from the driver (nvidia-smi), without torch."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"platform": platform.platform(), "cpu": cpu_name(), "num_cores": num_cores, "gpu": _ask_driver(_GPU)}


def describe_driver() -> str:
    """Returns the version of the GPU's driver, or an empty text if there is none."""
    return _ask_driver("driver_version") or ""


def _of_driver(query: str) -> tuple[str, ...]:
    return ("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")


def _ask_driver(query: str) -> str | None:
    said = _answer(*_of_driver(query))
    return "; ".join(said.splitlines()) or None if said is not None else None


@cache
def _started(*command: str) -> subprocess.Popen[str] | None:
    """Starts a command, once; None if there is no such program. Without git's variables, which in a hook name another
    repository."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    except OSError:
        return None


@cache
def _answer(*command: str) -> str | None:
    """Returns the output of a command; None if it does not exist, fails, or takes longer than 10 s."""
    process = _started(*command)
    if process is None:
        return None
    try:
        said, _ = process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        return None
    return said.strip() if process.returncode == 0 else None
