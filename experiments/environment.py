"""What made a run: versions of code and packages, the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "triton", "flash-attn", "transformers", "simpy", "pandas", "pyarrow", "numpy", "matplotlib", "xxhash",
    "hydra-core",
)  # fmt: skip


@cache
def describe_versions() -> dict[str, str]:
    """{package: version}; ours with the commit where it runs from a checkout. Absent packages are left out."""
    found = {"python": platform.python_version(), "llm-serving-testbed": _own_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _own_version() -> str:
    try:
        own = version("llm-serving-testbed")
    except PackageNotFoundError:
        own = "not installed"
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return own
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return own
    return f"{own}+{done.stdout.strip()}" if done.returncode == 0 else own


@cache
def describe_machine() -> dict[str, Any]:
    """{platform, cpu, num_cores, gpu}. The GPU is asked of the driver, without torch."""
    return {"platform": platform.platform(), "cpu": _cpu(), "num_cores": _num_cores(), "gpu": _gpu()}


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe_driver() -> str:
    """The version of the GPU's driver, or nothing where there is none."""
    return _ask_driver("driver_version") or ""


def _gpu() -> str | None:
    return _ask_driver("name,memory.total")


def _ask_driver(query: str) -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return "; ".join(done.stdout.strip().splitlines()) or None if done.returncode == 0 else None
