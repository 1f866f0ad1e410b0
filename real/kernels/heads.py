"""The work between a layer's projections and its attention, in one launch: queries and keys are normalised per head and
rotated by their positions; keys and values are stored in the KV memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from real.kernels.formats import for_writing, store_as


@triton.jit
def load_turned(x, weight, cos, sin, eps, HALF: tl.constexpr, HALF_PAD: tl.constexpr, HAS_NORM: tl.constexpr):
    """Loads both halves of a head, normalised (with HAS_NORM) and rotated, in the head's own format."""
    dims = tl.arange(0, HALF_PAD)
    is_part = dims < HALF
    first = tl.load(x + dims, mask=is_part, other=0.0).to(tl.float32)
    second = tl.load(x + HALF + dims, mask=is_part, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 0) + tl.sum(second * second, 0)
        scale = 1.0 / tl.sqrt(squares / (2 * HALF) + eps)
        first = first * scale * tl.load(weight + dims, mask=is_part, other=0.0).to(tl.float32)
        second = second * scale * tl.load(weight + HALF + dims, mask=is_part, other=0.0).to(tl.float32)
        first = first.to(x.dtype.element_ty).to(tl.float32)  # rounded like the result of a separate norm
        second = second.to(x.dtype.element_ty).to(tl.float32)
    c = tl.load(cos + dims, mask=is_part, other=0.0).to(tl.float32)
    s = tl.load(sin + dims, mask=is_part, other=0.0).to(tl.float32)
    return (first * c - second * s).to(x.dtype.element_ty), (second * c + first * s).to(x.dtype.element_ty)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def heads_kernel(
    query, key, value, query_weight, key_weight, cos, sin, key_cache, value_cache, slots,
    eps, inverse_k_scale, inverse_v_scale,
    stride_query_token, stride_key_token, stride_value_token, stride_block, stride_slot, stride_kv_head,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_FORMAT: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Program (token, head). Query heads come first, then key heads, then value heads. Nothing is stored for a slot
    below 0."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, HALF_PAD)
    is_part = dims < HALF
    angles = token * HALF
    if head < NUM_HEADS:
        place = query + token * stride_query_token + head * 2 * HALF
        first, second = load_turned(
            place, query_weight, cos + angles, sin + angles, eps, HALF, HALF_PAD, HAS_NORM
        )  # fmt: skip
        tl.store(place + dims, first, mask=is_part)
        tl.store(place + HALF + dims, second, mask=is_part)
    else:
        slot = tl.load(slots + token)
        cached = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
        if head < NUM_HEADS + NUM_KV_HEADS:
            kv_head = head - NUM_HEADS
            place = key + token * stride_key_token + kv_head * 2 * HALF
            first, second = load_turned(
                place, key_weight, cos + angles, sin + angles, eps, HALF, HALF_PAD, HAS_NORM
            )  # fmt: skip
            tl.store(place + dims, first, mask=is_part)
            tl.store(place + HALF + dims, second, mask=is_part)
            if slot >= 0:
                to = key_cache + cached + kv_head * stride_kv_head
                store_as(to + dims, first, is_part, inverse_k_scale, KV_FORMAT)
                store_as(to + HALF + dims, second, is_part, inverse_k_scale, KV_FORMAT)
        else:
            kv_head = head - NUM_HEADS - NUM_KV_HEADS
            place = value + token * stride_value_token + kv_head * 2 * HALF
            if slot >= 0:
                to = value_cache + cached + kv_head * stride_kv_head
                first = tl.load(place + dims, mask=is_part, other=0.0)
                second = tl.load(place + HALF + dims, mask=is_part, other=0.0)
                store_as(to + dims, first, is_part, inverse_v_scale, KV_FORMAT)
                store_as(to + HALF + dims, second, is_part, inverse_v_scale, KV_FORMAT)


def turn_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    norm: tuple[Tensor, Tensor, float] | None,
    rotation: tuple[Tensor, Tensor],
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Normalises and rotates query and key in place; stores key and value.

    query [num_tokens, num_heads, head_dim]; key, value [num_tokens, num_kv_heads, head_dim]. norm: weights of query and
    key, [head_dim] each, and epsilon; None: no norm. rotation: cos and sin, [num_tokens, 1, head_dim / 2]. kv_cache,
    slot_mapping, scales: as for real.kernels.store.store_kv. Results are rounded to the tensors' format after the norm
    and after the rotation.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, (cos, sin) = key.shape[1], rotation
    for heads in (query, key, value):
        assert heads.stride()[1:] == (head_dim, 1), "the heads of a token lie side by side"
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    cache, kv_format = for_writing(kv_cache)
    query_weight, key_weight, eps = norm or (None, None, 0.0)
    heads_kernel[(num_tokens, num_heads + 2 * num_kv_heads)](
        query, key, value, query_weight, key_weight, cos, sin, cache[0], cache[1], slot_mapping,
        eps, 1.0 / k_scale, 1.0 / v_scale,
        query.stride(0), key.stride(0), value.stride(0), cache.stride(1), cache.stride(2), cache.stride(3),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2,
        HALF_PAD=triton.next_power_of_2(head_dim // 2), BLOCK_SIZE=cache.shape[2], KV_FORMAT=kv_format,
        HAS_NORM=norm is not None, num_warps=1,
    )  # fmt: skip
