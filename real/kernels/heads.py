"""The work between a layer's projections and its attention, in one launch: queries and keys are normalised per head and
rotated by their positions; keys and values are stored in the KV memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from real.kernels.chain import after_previous, chained
from real.kernels.formats import for_writing, store_as

HEADS = 8  # of a program


@triton.jit
def load_turned(x, exists, weight, cos, sin, eps, HALF: tl.constexpr, HALF_PAD: tl.constexpr, HAS_NORM: tl.constexpr):
    """Loads both halves of heads, normalised (with HAS_NORM) and rotated, in their own format: [HEADS, HALF_PAD] each.
    x: pointers to the heads' first elements, [HEADS, 1]."""
    dims = tl.arange(0, HALF_PAD)
    is_dim = dims < HALF
    is_part = exists[:, None] & is_dim[None, :]
    first = tl.load(x + dims[None, :], mask=is_part, other=0.0).to(tl.float32)
    second = tl.load(x + HALF + dims[None, :], mask=is_part, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
        first = first * scale * tl.load(weight + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        second = second * scale * tl.load(weight + HALF + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        first = first.to(x.dtype.element_ty).to(tl.float32)  # rounded like the result of a separate norm
        second = second.to(x.dtype.element_ty).to(tl.float32)
    c = tl.load(cos + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    return (first * c - second * s).to(x.dtype.element_ty), (second * c + first * s).to(x.dtype.element_ty)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def heads_kernel(
    query, key, value, query_weight, key_weight, cos, sin, key_cache, value_cache, slots,
    eps, inverse_k_scale, inverse_v_scale,
    stride_query_token, stride_key_token, stride_value_token, stride_block, stride_slot, stride_kv_head,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_FORMAT: tl.constexpr, HAS_NORM: tl.constexpr, HEADS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (token, HEADS heads). Query heads come first, then key heads, then value heads. Nothing is stored for a
    slot below 0."""
    after_previous(IS_CHAINED)
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    QUERY_TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_TILES: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    cos += token * HALF
    sin += token * HALF
    dims = tl.arange(0, HALF_PAD)[None, :]
    if tile < QUERY_TILES:
        heads = tile * HEADS + tl.arange(0, HEADS)
        exists = heads < NUM_HEADS
        place = query + token * stride_query_token + heads[:, None] * 2 * HALF
        first, second = load_turned(place, exists, query_weight, cos, sin, eps, HALF, HALF_PAD, HAS_NORM)
        is_part = exists[:, None] & (dims < HALF)
        tl.store(place + dims, first, mask=is_part)
        tl.store(place + HALF + dims, second, mask=is_part)
    else:
        slot = tl.load(slots + token)
        heads = (tile - QUERY_TILES) % KV_TILES * HEADS + tl.arange(0, HEADS)
        exists = heads < NUM_KV_HEADS
        is_part = exists[:, None] & (dims < HALF)
        cached = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
        cached += heads[:, None] * stride_kv_head + dims
        if tile < QUERY_TILES + KV_TILES:
            place = key + token * stride_key_token + heads[:, None] * 2 * HALF
            first, second = load_turned(place, exists, key_weight, cos, sin, eps, HALF, HALF_PAD, HAS_NORM)
            tl.store(place + dims, first, mask=is_part)
            tl.store(place + HALF + dims, second, mask=is_part)
            if slot >= 0:
                store_as(key_cache + cached, first, is_part, inverse_k_scale, KV_FORMAT)
                store_as(key_cache + cached + HALF, second, is_part, inverse_k_scale, KV_FORMAT)
        elif slot >= 0:
            place = value + token * stride_value_token + heads[:, None] * 2 * HALF + dims
            first = tl.load(place, mask=is_part, other=0.0)
            second = tl.load(place + HALF, mask=is_part, other=0.0)
            store_as(value_cache + cached, first, is_part, inverse_v_scale, KV_FORMAT)
            store_as(value_cache + cached + HALF, second, is_part, inverse_v_scale, KV_FORMAT)


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
    num_tiles = triton.cdiv(num_heads, HEADS) + 2 * triton.cdiv(num_kv_heads, HEADS)
    heads_kernel[(num_tokens, num_tiles)](
        query, key, value, query_weight, key_weight, cos, sin, cache[0], cache[1], slot_mapping,
        eps, 1.0 / k_scale, 1.0 / v_scale,
        query.stride(0), key.stride(0), value.stride(0), cache.stride(1), cache.stride(2), cache.stride(3),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2,
        HALF_PAD=triton.next_power_of_2(head_dim // 2), BLOCK_SIZE=cache.shape[2], KV_FORMAT=kv_format,
        HAS_NORM=norm is not None, HEADS=HEADS, num_warps=1, **chained(query.device),
    )  # fmt: skip
