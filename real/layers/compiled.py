"""Fusing of small element-wise functions: on a GPU each tensor that they read or write costs a trip to memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from real.kernels import MIN_CAPABILITY, why_not

P = ParamSpec("P")
R = TypeVar("R")

FP8_CAPABILITY = (8, 9)  # Triton converts e4m3 from here on
MAX_SHAPES = 64  # compilations of a function: of each hidden size and epsilon, for one token and for several


def compiled_on_cuda(fn: Callable[P, R], least: tuple[int, int] = MIN_CAPABILITY) -> Callable[P, R]:
    """`fn`, whose first argument is a tensor: compiled where that lies on a GPU, called as it is elsewhere.

    It is compiled when the first tensor on a GPU comes, for all sizes but 0 and 1, which are compiled by themselves. So
    that a capture never compiles, who captures a graph runs its sizes once before. What lies between is rounded to the
    tensors' format, as torch's own operators do. Without Triton, or what that builds its launchers with, and before
    compute capability 8.0, where torch.compile refuses bfloat16, or `least`, the function stays as it is; so it does
    under torch's TORCHDYNAMO_DISABLE=1.
    """
    compiled: Callable[P, R] | None = None

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        first: Any = args[0]
        assert isinstance(first, Tensor)
        if not first.is_cuda or not can_compile(first.device, least):
            return fn(*args, **kwargs)
        if compiled is None:
            compiled = compile_shapes(fn, options={"emulate_precision_casts": True})
        return compiled(*args, **kwargs)

    return call


def compile_shapes(fn: Callable[P, R], **how: Any) -> Callable[P, R]:
    """torch.compile for all models that a process loads. Weights are parameters, whose sizes it takes as constants: so
    each model's are compiled anew, and torch by itself gives up after 8. how: further arguments of torch.compile.
    """
    if takes_limit():
        how["recompile_limit"] = MAX_SHAPES
    else:  # torch's own setting, which is read at each compilation, for whatever the process compiles
        torch._dynamo.config.recompile_limit = max(MAX_SHAPES, torch._dynamo.config.recompile_limit)
    return torch.compile(fn, fullgraph=True, dynamic=True, **how)


def takes_limit() -> bool:
    """Whether this torch has a limit for each function, which came after 2.8."""
    return "recompile_limit" in inspect.signature(torch.compile).parameters


@cache
def can_compile(device: torch.device, least: tuple[int, int] = MIN_CAPABILITY) -> bool:
    """Whether torch.compile can make kernels for a GPU, with what it finds here."""
    return why_not(device) is None and torch.cuda.get_device_capability(device) >= least
