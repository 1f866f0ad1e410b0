"""FlashAttention-2 (Dao 2023) through the flash-attn package. real/attention/flash_step.py describes which rows it
computes and which our kernels do. It computes decodes by flash_attn_with_kvcache, other rows by flash_attn_varlen_func.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from real.attention import triton_provider
from real.attention.flash_step import (
    PAGE,
    FlashProvider,
    FlashStep,
    Options,
    StepPart,
    takes_pages,
    why_not_here,
    why_not_loaded,
)
from real.attention.interface import AttentionSpec


def why_not(spec: AttentionSpec) -> str | None:
    """Why this provider cannot run here; None if it can."""
    reason = why_not_here(spec) or why_not_loaded("flash_attn", "flash-attn", lambda: import_module("flash_attn"))
    if reason is not None:
        return reason
    if not takes_pages(spec) and (reason := triton_provider.why_not(spec)) is not None:
        return f"the Triton kernels would take its paged calls ({_why_no_pages(spec)}), and: {reason}"
    return None


def _why_no_pages(spec: AttentionSpec) -> str:
    if spec.kv_dtype != "auto":
        return f"it reads no {spec.kv_dtype} cache"
    return f"cache.block_size is {spec.block_size}, no multiple of {PAGE}"


def create(spec: AttentionSpec) -> FlashProvider:
    return FlashProvider("flash_attn", spec, partial(FlashStep, varlen=_varlen, decode=_decode))


def _arguments(options: Options) -> dict[str, Any]:
    arguments: dict[str, Any] = {"softmax_scale": options.scale, "causal": True}
    if options.window != (-1, 0):
        arguments["window_size"] = options.window
    if options.slopes is not None:
        arguments["alibi_slopes"] = options.slopes
    return arguments


def _varlen(part: StepPart, query: Tensor, keys: Tensor, values: Tensor, options: Options, *, is_paged: bool) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    output: Tensor = flash_attn_varlen_func(
        query,
        keys,
        values,
        cu_seqlens_q=part.query_starts,
        cu_seqlens_k=part.context_starts,
        max_seqlen_q=part.max_query_len,
        max_seqlen_k=part.max_context_len,
        **({"block_table": part.block_tables} if is_paged else {}),
        **_arguments(options),
    )
    return output


def _decode(part: StepPart, query: Tensor, kv_cache: Tensor, options: Options) -> Tensor:
    from flash_attn import flash_attn_with_kvcache

    output: Tensor = flash_attn_with_kvcache(
        query[:, None],  # [rows, 1, num_heads, head_dim]
        kv_cache[0],
        kv_cache[1],
        cache_seqlens=part.context_lens,
        block_table=part.block_tables,
        **_arguments(options),
    )
    return output[:, 0]
