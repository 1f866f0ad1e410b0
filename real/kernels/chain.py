"""Starts a kernel while the one before it ends: CUDA's programmatic dependent launch, of compute capability 9.0 on.

Between two kernels of a stream a GPU does nothing for some time, and a layer has ten of them: on an H200 that is 4 % of
a decode of one sequence with Qwen3-8B, and 8 % with 0.6B. A chained kernel is started as soon as all programs of the
kernel before it run, and waits for the end of that kernel itself, before it reads or writes anything. So all its
programs call `after_previous` first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from real.kernels.formats import capability


@triton.jit
def after_previous(IS_CHAINED: tl.constexpr):
    """Has the next kernel started, and waits until the previous one has ended and its results can be read."""
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def chained(device: torch.device) -> dict[str, Any]:
    """The launch options of a chained kernel. On other GPUs and in the interpreter kernels run one after the other."""
    gpu = capability(device)
    return {"IS_CHAINED": True, "launch_pdl": True} if gpu is not None and gpu >= (9, 0) else {"IS_CHAINED": False}
