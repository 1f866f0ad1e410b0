"""FlashAttention-2 over paged KV (Dao 2023), through the flash-attn package.

Its paged calls want a block size that is a multiple of 256, half precision, and a head size of at most 256. A sliding
window is its `window_size`, (tokens to the left, to the right) of a query, itself not counted.
"""

from __future__ import annotations

import importlib.util
import inspect

import torch
from torch import Tensor

from real.attention.interface import AttentionMetadata, AttentionSpec, StepAttention, store_kv


def why_not(spec: AttentionSpec) -> str | None:
    """Why this provider cannot run here; None if it can."""
    if spec.device.type != "cuda":
        return f"it needs CUDA, the device is {spec.device.type}"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"it needs float16 or bfloat16, the dtype is {str(spec.dtype).removeprefix('torch.')}"
    if spec.block_size % 256:
        return f"its paged calls need a block size that is a multiple of 256, cache.block_size is {spec.block_size}"
    if spec.head_dim > 256 or spec.head_dim % 8:
        return f"it needs a head size of at most 256 and a multiple of 8, the model's is {spec.head_dim}"
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    if spec.sliding_window is not None and not _has_window():
        return (
            f"the installed flash-attn has no window_size (it came with 2.3), cache.sliding_window is "
            f"{spec.sliding_window}"
        )
    return None


def _has_window() -> bool:
    from flash_attn import flash_attn_varlen_func

    return "window_size" in inspect.signature(flash_attn_varlen_func).parameters


class FlashAttention:
    """One varlen call a layer, for prefills, chunks and decodes alike."""

    name = "flash_attn"
    supports_graphs = False

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        return FlashStep(self.spec, metadata)


class FlashStep:
    """One step's attention; see StepAttention for the shapes."""

    def __init__(self, spec: AttentionSpec, metadata: AttentionMetadata) -> None:
        from flash_attn import flash_attn_varlen_func

        self._call = flash_attn_varlen_func
        self._scale = spec.scale
        self._metadata = metadata
        self._max_query_len = max(metadata.query_lens)
        self._max_context_len = max(metadata.context_lens)
        self._window: dict[str, tuple[int, int]] = {}  # nothing where it cuts nothing off
        if spec.sliding_window is not None and spec.sliding_window < self._max_context_len:
            self._window = {"window_size": (spec.sliding_window - 1, 0)}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor) -> Tensor:
        metadata = self._metadata
        store_kv(key, value, kv_cache, metadata.slot_mapping)
        output = self._call(
            query,
            kv_cache[0],  # [num_blocks, block_size, num_kv_heads, head_dim]
            kv_cache[1],
            cu_seqlens_q=metadata.query_starts,
            cu_seqlens_k=metadata.context_starts,
            max_seqlen_q=self._max_query_len,
            max_seqlen_k=self._max_context_len,
            softmax_scale=self._scale,
            causal=True,  # aligned to the end: the last query sees the last key
            block_table=metadata.block_tables,
            **self._window,
        )
        assert isinstance(output, Tensor)
        return output
