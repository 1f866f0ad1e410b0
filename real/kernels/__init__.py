"""Triton kernels over paged KV memory (store, decode, prefill, block copies; see docs/attention.md), for a layer's
other parts and for sampling; and the C kernels for CPUs.

Public functions take torch tensors and hide the launches. They can be imported without a GPU or driver. If
TRITON_INTERPRET=1 is in the environment before the import, they run on the CPU, slowly, for tests.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

MIN_CAPABILITY = (8, 0)


@cache
def why_no_launchers() -> str | None:
    """Why Triton cannot build its launchers; None if it can. It needs the compiler that CC names, else gcc or clang,
    and the headers of this Python."""
    named = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([named] if named else ["gcc", "clang"])):
        problem = f"CC={named} is not found" if named else "there is none"
        return f"Triton needs a C compiler to build its launchers, and {problem}; install gcc or clang, or set CC"
    default = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if default == "posix_local" else default  # Debian's own scheme has no headers
    include = sysconfig.get_paths(scheme)["include"]
    if not Path(include, "Python.h").is_file():
        return f"Triton needs Python.h to build its launchers, and {include} lacks it; install python3-dev"
    return None


def why_no_gpu(device: torch.device) -> str | None:
    """Why a device is no GPU for these kernels, or for FlashAttention; None if it is one."""
    if device.type != "cuda":
        return f"it needs CUDA, the device is {device.type}"
    if not torch.cuda.is_available():
        return "it needs CUDA, and torch finds no GPU here"
    if (found := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        return f"it needs compute capability 8.0 or later, the GPU's is {found[0]}.{found[1]}"
    return None


def why_not(device: torch.device) -> str | None:
    """Why these kernels cannot run on a device; None if they can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    return why_no_gpu(device) or why_no_launchers()


@cache
def has_kernels(device: torch.device) -> bool:
    """As why_not, remembered: for what is called in each layer."""
    return why_not(device) is None


def takes_rows(x: Tensor) -> bool:
    """Whether x is contiguous rows on a GPU on which these kernels run."""
    return x.is_cuda and x.dim() == 2 and x.is_contiguous() and has_kernels(x.device)
