"""Triton kernels over paged KV memory: store, decode, prefill, block copies. See docs/attention.md.

Public functions take torch tensors and hide the launches. They import without a GPU and without a driver; with
TRITON_INTERPRET=1 in the environment before the import they run on the CPU, slowly, for tests.
"""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib.util import find_spec

import torch

MIN_CAPABILITY = (8, 0)


@cache
def has_compiler() -> bool:
    """Whether there is a C compiler, which Triton builds its launchers with."""
    return any(name and shutil.which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang"))


def why_not(device: torch.device) -> str | None:
    """Why these kernels cannot run on a device; None if they can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != "cuda":
        return f"it needs CUDA, the device is {device.type}"
    if not torch.cuda.is_available():
        return "it needs CUDA, and torch finds no GPU here"
    if (found := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        return f"it needs compute capability 8.0 or later, the GPU's is {found[0]}.{found[1]}"
    if not has_compiler():
        return "Triton needs a C compiler to build its launchers; install gcc or clang, or set CC"
    return None
