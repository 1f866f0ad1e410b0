"""Fuses small element-wise functions by torch.compile: unfused, each operator reads and writes GPU memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from real.kernels import why_not

P = ParamSpec("P")
R = TypeVar("R")

MAX_SHAPES = 64  # compilations of a function: for each hidden size and epsilon, one for one token, one for several


def compiled_on_cuda(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that runs `fn` compiled if its first argument, a tensor, is on a GPU, else uncompiled.

    It is compiled at its first call with a tensor on a GPU, once for all sizes except 0 and 1, which have compilations
    of their own. A capture must not compile, so each captured size is run once before. Intermediate results are rounded
    to the tensors' format, as by torch's own operators. `fn` stays uncompiled if Triton or the compiler for its
    launchers is missing, if the compute capability is below 8.0 (where torch.compile does not take bfloat16), and under
    torch's TORCHDYNAMO_DISABLE=1.
    """
    compiled: Callable[P, R] | None = None

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        first: Any = args[0]
        assert isinstance(first, Tensor)
        if not first.is_cuda or not can_compile(first.device):
            return fn(*args, **kwargs)
        if compiled is None:
            compiled = compile_shapes(fn, options={"emulate_precision_casts": True})
        return compiled(*args, **kwargs)

    return call


def compile_shapes(fn: Callable[P, R], **how: Any) -> Callable[P, R]:
    """Applies torch.compile with a limit that is enough for all models of a process. It takes the sizes of parameters
    as constants, so it compiles again for each model; torch's own limit is 8. how: further arguments of torch.compile.
    """
    if takes_limit():
        how["recompile_limit"] = MAX_SHAPES
    else:  # torch's global setting, which is read at each compilation and holds for all functions of the process
        torch._dynamo.config.recompile_limit = max(MAX_SHAPES, torch._dynamo.config.recompile_limit)
    return torch.compile(fn, fullgraph=True, dynamic=True, **how)


def takes_limit() -> bool:
    """Whether torch.compile takes a limit for each function, which torch 2.13 does and 2.11 does not."""
    return "recompile_limit" in inspect.signature(torch.compile).parameters


@cache
def can_compile(device: torch.device) -> bool:
    """Whether Triton, also under torch.compile, can build kernels for this GPU with the software that is installed."""
    return why_not(device) is None
