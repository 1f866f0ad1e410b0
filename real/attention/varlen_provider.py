"""The FlashAttention-2 in torch itself (torch.nn.attention.varlen), so that prompts need no package except torch.
real/attention/flash_step.py describes which rows it computes; our kernels compute decodes.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor

from real.attention import triton_provider
from real.attention.flash_step import FlashProvider, FlashStep, Options, StepPart, why_not_here
from real.attention.interface import AttentionSpec

ASKED = ("scale", "window_size", "enable_gqa", "seqused_k", "block_table")  # arguments passed by name


def why_not(spec: AttentionSpec) -> str | None:
    """Why this provider cannot run here; None if it can."""
    if (reason := why_not_here(spec)) is not None:
        return reason
    if spec.alibi_slopes is not None:
        return "torch.nn.attention.varlen has no ALiBi, and the model has slopes"
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    if lacking := [name for name in ASKED if name not in known]:
        return f"varlen_attn of torch {torch.__version__} takes no {lacking[0]}; install torch 2.13"
    if not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} was built without FlashAttention"
    if (reason := triton_provider.why_not(spec)) is not None:
        return f"the Triton kernels would take its decodes, and: {reason}"
    return None


def create(spec: AttentionSpec) -> FlashProvider:
    return FlashProvider("varlen", spec, partial(FlashStep, varlen=_varlen))


def _varlen(part: StepPart, query: Tensor, keys: Tensor, values: Tensor, options: Options, *, is_paged: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    pages: dict[str, Any] = {}
    if is_paged:
        pages = {"seqused_k": part.context_lens, "block_table": part.block_tables}
    output = varlen_attn(
        query,
        keys,
        values,
        part.query_starts,
        part.context_starts,
        part.max_query_len,
        part.max_context_len,
        scale=options.scale,
        window_size=options.window,
        enable_gqa=True,
        **pages,
    )
    assert isinstance(output, Tensor), "nothing else was asked for"
    return output
