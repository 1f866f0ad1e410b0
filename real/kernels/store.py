"""Writes a step's keys and values into their slots of the KV memory, converted to FP8 if the cache is FP8."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from real.kernels.formats import for_writing, store_as

MAX_TILE = 2048  # elements of the keys of one program


@triton.jit(do_not_specialize_on_alignment=["slots"])
def store_kernel(
    keys, values, key_cache, value_cache, slots, inverse_k_scale, inverse_v_scale,
    stride_key_token, stride_key_head, stride_value_token, stride_value_head,
    stride_block, stride_slot, stride_kv_head,
    NUM_KV_HEADS: tl.constexpr, HEADS_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_FORMAT: tl.constexpr,
):  # fmt: skip
    """Program (token, tile of KV heads). Nothing is stored for a slot below 0."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    heads = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)[:, None]
    dims = tl.arange(0, HEAD_PAD)[None, :]
    is_part = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)  # [HEADS_TILE, HEAD_PAD]
    key = tl.load(keys + token * stride_key_token + heads * stride_key_head + dims, mask=is_part, other=0.0)
    value = tl.load(values + token * stride_value_token + heads * stride_value_head + dims, mask=is_part, other=0.0)
    place = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot + heads * stride_kv_head + dims
    store_as(key_cache + place, key, is_part, inverse_k_scale, KV_FORMAT)
    store_as(value_cache + place, value, is_part, inverse_v_scale, KV_FORMAT)


def store_kv(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    """Writes key, value [num_tokens, num_kv_heads, head_dim] to their slots (block * block_size + offset) of kv_cache
    [2, num_blocks, block_size, num_kv_heads, head_dim]. slot_mapping: int64 [num_tokens]; below 0: nothing is stored.

    An FP8 cache holds key / k_scale and value / v_scale, clamped to the format's range.
    """
    num_tokens, num_heads, head_dim = key.shape
    assert key.stride(-1) == value.stride(-1) == kv_cache.stride(-1) == 1, "the elements of a head lie side by side"
    head_pad = triton.next_power_of_2(head_dim)
    heads_tile = min(triton.next_power_of_2(num_heads), max(1, MAX_TILE // head_pad))
    cache, kv_format = for_writing(kv_cache)
    store_kernel[(num_tokens, triton.cdiv(num_heads, heads_tile))](
        key, value, cache[0], cache[1], slot_mapping, 1.0 / k_scale, 1.0 / v_scale,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        cache.stride(1), cache.stride(2), cache.stride(3),
        NUM_KV_HEADS=num_heads, HEADS_TILE=heads_tile, HEAD_DIM=head_dim, HEAD_PAD=head_pad,
        BLOCK_SIZE=cache.shape[2], KV_FORMAT=kv_format, num_warps=4,
    )  # fmt: skip
