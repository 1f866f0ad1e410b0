"""FlashAttention-3 (Shah et al. 2024), through the package flash_attn_3: one call per layer for all rows of a step,
whatever their lengths, over KV blocks of any size.

It reads lengths, tables and cumulative lengths on the device, so any step could be captured. But its grid follows from
the bounds of a step. In a captured step with prompts every row has the greatest possible length as its bound, so the
grid would be far too large. Our Triton kernels compute such steps, as with FlashAttention-2.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from real.attention.flash_step import FlashProvider, why_not_here, why_not_loaded
from real.attention.interface import AttentionMetadata, AttentionSpec

HOPPER = 9  # major compute capability


def why_not(spec: AttentionSpec) -> str | None:
    """Why this provider cannot run here; None if it can."""
    if (reason := why_not_here(spec)) is not None:
        return reason
    if (found := torch.cuda.get_device_capability(spec.device))[0] != HOPPER:
        return f"it needs compute capability 9.0, the GPU's is {found[0]}.{found[1]}"
    if spec.kv_dtype != "auto":
        return f"it would want queries in FP8 beside a cache in {spec.kv_dtype}"
    if spec.alibi_slopes is not None:
        return "it has no ALiBi, and the model has slopes"
    return why_not_loaded("flash_attn_interface", "flash_attn_3", lambda: import_module("flash_attn_interface"))


def create(spec: AttentionSpec) -> FlashProvider:
    return FlashProvider("flash_attn_3", spec, Flash3Step)


class Flash3Step:
    """One step's attention, in one paged call per layer."""

    def __init__(self, provider: FlashProvider, metadata: AttentionMetadata) -> None:
        self._scale, self._metadata = provider.spec.scale, metadata
        window = provider.window(metadata)
        self._window = (-1, -1) if window is None else (window - 1, 0)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor) -> Tensor:
        from flash_attn_interface import flash_attn_with_kvcache

        metadata = self._metadata
        output: Tensor = flash_attn_with_kvcache(
            query,  # [num_tokens, num_heads, head_dim]
            kv_cache[0],
            kv_cache[1],
            cache_seqlens=metadata.context_lens_tensor,
            page_table=metadata.block_tables,
            cu_seqlens_q=metadata.query_starts,
            max_seqlen_q=min(max(metadata.query_lens), metadata.num_tokens),
            softmax_scale=self._scale,
            causal=True,
            window_size=self._window,
        )
        return output
