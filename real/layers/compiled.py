"""Fusing of small element-wise functions: on a GPU each tensor that they read or write costs a trip to memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def compiled_on_cuda(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn`, whose first argument is a tensor: compiled where that lies on a GPU, called as it is elsewhere.

    It is compiled when the first tensor on a GPU comes, for all sizes but 0 and 1, which are compiled by themselves. So
    that a capture never compiles, who captures a graph runs its sizes once before. What lies between is rounded to the
    tensors' format, as torch's own operators do. Without Triton or a C compiler, which torch.compile needs, the
    function stays as it is; so it does under torch's TORCHDYNAMO_DISABLE=1.
    """
    compiled: Callable[P, R] | None = None

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        first: Any = args[0]
        assert isinstance(first, Tensor)
        if not first.is_cuda or not can_compile():
            return fn(*args, **kwargs)
        if compiled is None:
            compiled = torch.compile(fn, fullgraph=True, dynamic=True, options={"emulate_precision_casts": True})
        return compiled(*args, **kwargs)

    return call


@cache
def can_compile() -> bool:
    """Whether torch.compile finds what it makes kernels with."""
    compilers = (os.environ.get("CC"), "cc", "gcc", "clang")
    return find_spec("triton") is not None and any(name and shutil.which(name) for name in compilers)
