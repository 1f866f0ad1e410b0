"""Attention of rows with one query token over their paged KV. A program has all query heads of a KV head (up to 64).

Long contexts are cut into parts (see real/kernels/parts.py), one program each; a second kernel joins their results. The
output of a row with context length 0 is zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from real.kernels.attend import LOG2_E, MAX_WINDOW, STAGES, Scoring, Tiling, attend
from real.kernels.chain import after_previous, chained
from real.kernels.formats import as_stored, beside, capability
from real.kernels.parts import Parts

MAX_GROUP_TILE = 64  # query heads of one program
REDUCE_TILE = 16  # parts that are joined in one iteration

INDICES = ["tables", "context_lens", "query_starts"]  # their alignment and strides vary from step to step


@triton.jit(
    do_not_specialize=["window", "stride_table", "partial_size"],
    do_not_specialize_on_alignment=INDICES,
)
def decode_kernel(
    output, partial, items, query, keys, values, tables, context_lens, query_starts, slopes,
    qk_scale, value_scale, window, partial_size,
    stride_query_token, stride_query_head, stride_output_token, stride_output_head,
    stride_block, stride_slot, stride_kv_head, stride_table,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    KV_FORMAT: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_MIXED: tl.constexpr,
    IS_SPLIT: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row, or item of Parts; KV head and tile of its query heads).

    partial: float32, for rows that have several parts: averages of the values [items, heads, head_dim], then (at
    partial_size) the log2 of the sums of weights [items, heads].
    """
    after_previous(IS_CHAINED)
    item = tl.program_id(0)
    row = item
    if IS_SPLIT:
        row = tl.load(items + 4 * item)
        if row < 0:
            return
    token = row
    if IS_MIXED:
        token = tl.load(query_starts + row)
        if tl.load(query_starts + row + 1) - token != 1:
            return
    TILES: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    kv_head = tl.program_id(1) // TILES
    last = tl.load(context_lens + row)
    position = last - 1
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(last - window, 0)
    if IS_SPLIT:
        length = tl.load(items + 4 * item + 3)
        first += tl.load(items + 4 * item + 1) * length
        last = tl.minimum(first + length, last)

    in_group = tl.program_id(1) % TILES * GROUP_TILE + tl.arange(0, GROUP_TILE)
    heads = kv_head * GROUP + in_group
    dims = tl.arange(0, HEAD_PAD)
    is_part = (in_group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    queries = query + token.to(tl.int64) * stride_query_token + heads[:, None] * stride_query_head + dims[None, :]
    vectors = beside(tl.load(queries, mask=is_part, other=0.0), KV_FORMAT)  # [GROUP_TILE, HEAD_PAD]
    head_slopes = tl.zeros([GROUP_TILE], tl.float32)
    if HAS_ALIBI:
        head_slopes = tl.load(slopes + heads, mask=in_group < GROUP, other=0.0) * 1.4426950408889634
    acc = tl.zeros([GROUP_TILE, HEAD_PAD], tl.float32)
    top = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    positions = tl.zeros([GROUP_TILE], tl.int32) + position
    acc, top, total = attend(
        vectors, acc, top, total, first, last, positions, head_slopes, tables + row.to(tl.int64) * stride_table,
        keys + kv_head.to(tl.int64) * stride_kv_head, values + kv_head.to(tl.int64) * stride_kv_head,
        stride_block, stride_slot, qk_scale, window, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, BLOCK_N, KV_FORMAT,
        HAS_ALIBI, False, True, False,
    )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)  # a row without context: 0 / 1
    acc = acc * (value_scale / total)[:, None]
    outputs = output + token.to(tl.int64) * stride_output_token + heads[:, None] * stride_output_head + dims[None, :]
    if IS_SPLIT:
        num_parts = tl.load(items + 4 * item + 2)
        if num_parts > 1:
            places = item.to(tl.int64) * NUM_HEADS + heads
            tl.store(partial + places[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_part)
            tl.store(partial + partial_size + places, top + tl.log2(total), mask=in_group < GROUP)
            return
    tl.store(outputs, acc.to(output.dtype.element_ty), mask=is_part)


@triton.jit(do_not_specialize=["partial_size"], do_not_specialize_on_alignment=INDICES)
def reduce_kernel(
    output, partial, starts, query_starts, partial_size, stride_output_token, stride_output_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, TILE: tl.constexpr,
    IS_MIXED: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row, head): averages the parts' results, weighted by their sums of weights. Rows with a single part are
    skipped, as decode_kernel has written their output."""
    after_previous(IS_CHAINED)
    row = tl.program_id(0)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    if end - begin == 1:
        return
    token = row
    if IS_MIXED:
        token = tl.load(query_starts + row)
        if tl.load(query_starts + row + 1) - token != 1:
            return
    head = tl.program_id(1)
    dims = tl.arange(0, HEAD_PAD)
    acc = tl.zeros([HEAD_PAD], tl.float32)
    top = float("-inf")
    total = 0.0
    for first in range(begin, end, TILE):
        items = first + tl.arange(0, TILE)
        places = items.to(tl.int64) * NUM_HEADS + head
        logs = tl.load(partial + partial_size + places, mask=items < end, other=float("-inf"))
        is_part = (items < end)[:, None] & (dims < HEAD_DIM)[None, :]
        sums = tl.load(partial + places[:, None] * HEAD_DIM + dims[None, :], mask=is_part, other=0.0)
        higher = tl.maximum(top, tl.max(logs, 0))
        weights = tl.exp2(logs - higher)
        fading = tl.exp2(top - higher)
        acc = acc * fading + tl.sum(sums * weights[:, None], 0)
        total = total * fading + tl.sum(weights, 0)
        top = higher
    total = tl.where(total == 0.0, 1.0, total)  # a row without context
    outputs = output + token.to(tl.int64) * stride_output_token + head * stride_output_head + dims
    tl.store(outputs, (acc / total).to(output.dtype.element_ty), mask=dims < HEAD_DIM)


def group_tile(group: int) -> int:
    """Returns the number of query heads that one program computes. group: query heads of a KV head."""
    return min(MAX_GROUP_TILE, max(16, 1 << (group - 1).bit_length()))  # tl.dot needs 16 rows


def num_programs(group: int, num_kv_heads: int) -> int:
    """Returns the number of programs for one row, or for one part of a row."""
    return num_kv_heads * -(-group // group_tile(group))


def tiling(head_dim: int, group: int, dtype: torch.dtype, kv_format: int, on_hopper: bool) -> Tiling:
    """Chooses tiles for a head size, the number of query heads of a KV head, the formats of computation and cache, and
    whether the GPU is a Hopper."""
    head_pad = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        return Tiling(group_tile(group), 32 if head_pad <= 64 else 16, 4, 2)
    if head_pad > 128:
        return Tiling(group_tile(group), 32, 4, 3)
    if kv_format and on_hopper:  # a key has half of the bytes; elsewhere more keys would leave fewer programs at once
        return Tiling(group_tile(group), 128, 4, STAGES)
    return Tiling(group_tile(group), 4096 // max(64, head_pad), 4, STAGES)


def paged_decode(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    output: Tensor,
    scoring: Scoring,
    *,
    query_starts: Tensor | None = None,
    parts: Parts | None = None,
) -> None:
    """Writes the output of the rows with one query token, which is the last of the row's context.

    query, output [num_tokens, num_heads, head_dim]; kv_cache [2, num_blocks, block_size, num_kv_heads, head_dim];
    block_tables int32 [num_rows, max blocks]; context_lens int32 [num_rows]. query_starts: int32 [num_rows + 1], where
    the tokens of each row begin; rows with several tokens or none are left out (None: row i is token i). parts: result
    of plan_parts for the same rows. The launch does not wait and depends on no value on the device, so it can be
    captured in a CUDA graph.
    """
    num_rows = len(context_lens)
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = kv_cache.shape[3]
    group = num_heads // num_kv_heads
    assert query.stride(2) == output.stride(2) == kv_cache.stride(4) == 1, "the elements of a head lie side by side"
    gpu = capability(query.device)
    stored = as_stored(kv_cache, gpu, scoring.k_scale, scoring.v_scale, query.dtype)
    tile = tiling(head_dim, group, query.dtype, stored.kv_format, gpu is not None and gpu[0] == 9)
    head_pad = max(16, triton.next_power_of_2(head_dim))
    num_items = num_rows if parts is None else len(parts.items)
    partial_size = num_items * num_heads * head_dim
    partial = None
    if parts is not None:
        partial = query.new_empty(partial_size + num_items * num_heads, dtype=torch.float32)
    decode_kernel[(num_items, num_programs(group, num_kv_heads))](
        output, partial, None if parts is None else parts.items,
        query, stored.keys, stored.values, block_tables, context_lens, query_starts,
        scoring.slopes, scoring.scale * LOG2_E * stored.k_factor, stored.v_factor,
        0 if scoring.window is None else min(scoring.window, MAX_WINDOW), partial_size,
        query.stride(0), query.stride(1), output.stride(0), output.stride(1),
        stored.keys.stride(0), stored.keys.stride(1), stored.keys.stride(2), block_tables.stride(0),
        NUM_HEADS=num_heads, GROUP=group, GROUP_TILE=tile.block_m, HEAD_DIM=head_dim, HEAD_PAD=head_pad,
        BLOCK_SIZE=kv_cache.shape[2], BLOCK_N=tile.block_n, KV_FORMAT=stored.kv_format,
        HAS_ALIBI=scoring.slopes is not None, HAS_WINDOW=scoring.window is not None,
        IS_MIXED=query_starts is not None, IS_SPLIT=parts is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **chained(query.device),
    )  # fmt: skip
    if parts is not None:
        reduce_kernel[(num_rows, num_heads)](
            output, partial, parts.starts, query_starts, partial_size, output.stride(0), output.stride(1),
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, HEAD_PAD=head_pad, TILE=REDUCE_TILE,
            IS_MIXED=query_starts is not None, num_warps=4, **chained(query.device),
        )  # fmt: skip
