"""Attention of one query token a row over its paged KV: all query heads of a KV head in one program.

Long contexts of few rows are split over several programs (Flash-Decoding, Dao et al. 2023), whose partial results a
second kernel joins. How many programs is decided on the host from what a CUDA graph fixes (rows, the longest context);
how long each part is, the device decides from the row's own context. A row of context length 0 gives zeros.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from real.kernels.attend import LOG2_E, MAX_WINDOW, STAGES, Scoring, Tiling, attend
from real.kernels.formats import as_stored, capability

MAX_GROUP_TILE = 64  # query heads of one program
MIN_SPLIT = 128  # keys that are worth a program of their own
MAX_SPLITS = 64
PROGRAMS_PER_SM = 4  # that a launch aims at
REDUCE_TILE = 16  # splits that are joined at a time

INDICES = ["tables", "context_lens", "rows", "query_starts"]  # their alignment and strides vary from step to step


@triton.jit
def split_length(length, num_splits, MIN_SPLIT: tl.constexpr):
    """Keys of each of a row's parts but the last."""
    share = tl.maximum((length + num_splits - 1) // num_splits, 1)
    return (share + MIN_SPLIT - 1) // MIN_SPLIT * MIN_SPLIT


@triton.jit(
    do_not_specialize=["window", "num_splits", "stride_table", "partial_size"],
    do_not_specialize_on_alignment=INDICES,
)
def decode_kernel(
    output, partial, query, keys, values, tables, context_lens, rows, query_starts, slopes,
    qk_scale, value_scale, window, num_splits, partial_size,
    stride_query_token, stride_query_head, stride_output_token, stride_output_head,
    stride_block, stride_slot, stride_kv_head, stride_table,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    KV_FORMAT: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ROWS: tl.constexpr,
    IS_SPLIT: tl.constexpr, MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head and tile of its query heads, split).

    partial: float32, sums of weighted values [rows, heads, splits, head_dim], then (at partial_size) the log2 of the
    sums of weights [rows, heads, splits].
    """
    index = tl.program_id(0)
    row, token = index, index
    if HAS_ROWS:
        row = tl.load(rows + index)
        token = tl.load(query_starts + row)
    TILES: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    kv_head = tl.program_id(1) // TILES
    split = tl.program_id(2)
    last = tl.load(context_lens + row)
    position = last - 1
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(last - window, 0)
    if IS_SPLIT:
        length = split_length(last - first, num_splits, MIN_SPLIT)
        first += split * length
        if first >= last:
            return
        last = tl.minimum(first + length, last)

    in_group = tl.program_id(1) % TILES * GROUP_TILE + tl.arange(0, GROUP_TILE)
    heads = kv_head * GROUP + in_group
    dims = tl.arange(0, HEAD_PAD)
    is_part = (in_group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    queries = query + token.to(tl.int64) * stride_query_token + heads[:, None] * stride_query_head + dims[None, :]
    vectors = tl.load(queries, mask=is_part, other=0.0)  # [GROUP_TILE, HEAD_PAD]
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
    if IS_SPLIT:
        places = (index.to(tl.int64) * NUM_HEADS + heads) * num_splits + split
        tl.store(partial + places[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_part)
        tl.store(partial + partial_size + places, top + tl.log2(total), mask=in_group < GROUP)
    else:
        outputs = output + token.to(tl.int64) * stride_output_token + heads[:, None] * stride_output_head
        tl.store(outputs + dims[None, :], acc.to(output.dtype.element_ty), mask=is_part)


@triton.jit(do_not_specialize=["window", "num_splits", "partial_size"], do_not_specialize_on_alignment=INDICES)
def reduce_kernel(
    output, partial, context_lens, rows, query_starts, window, num_splits, partial_size,
    stride_output_token, stride_output_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr,
    TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ROWS: tl.constexpr, MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (row, head): the mean of the parts' results, weighted by their sums of weights."""
    index = tl.program_id(0)
    row, token = index, index
    if HAS_ROWS:
        row = tl.load(rows + index)
        token = tl.load(query_starts + row)
    head = tl.program_id(1)
    num_keys = tl.load(context_lens + row)
    if HAS_WINDOW:
        num_keys = tl.minimum(num_keys, window)
    length = split_length(num_keys, num_splits, MIN_SPLIT)
    num_parts = (num_keys + length - 1) // length  # 0 where there is no context
    begin = (index.to(tl.int64) * NUM_HEADS + head) * num_splits
    parts = tl.arange(0, SPLITS_PAD)
    logs = tl.load(partial + partial_size + begin + parts, mask=parts < num_parts, other=float("-inf"))
    top = tl.max(logs, 0)
    top = tl.where(num_parts == 0, 0.0, top)
    total = tl.sum(tl.exp2(logs - top), 0)
    total = tl.where(num_parts == 0, 1.0, total)
    dims = tl.arange(0, HEAD_PAD)
    acc = tl.zeros([HEAD_PAD], tl.float32)
    for start in range(0, num_parts, TILE):
        tile = start + tl.arange(0, TILE)
        tile_logs = tl.load(partial + partial_size + begin + tile, mask=tile < num_parts, other=float("-inf"))
        is_part = (tile < num_parts)[:, None] & (dims < HEAD_DIM)[None, :]
        sums = tl.load(partial + (begin + tile)[:, None] * HEAD_DIM + dims[None, :], mask=is_part, other=0.0)
        acc += tl.sum(sums * tl.exp2(tile_logs - top)[:, None], 0)
    outputs = output + token.to(tl.int64) * stride_output_token + head * stride_output_head + dims
    tl.store(outputs, (acc / total).to(output.dtype.element_ty), mask=dims < HEAD_DIM)


def tiling(head_dim: int, group: int, dtype: torch.dtype) -> Tiling:
    """Tiles for a head size, the query heads of a KV head, and the format that is computed in."""
    group_tile = min(MAX_GROUP_TILE, max(16, triton.next_power_of_2(group)))  # tl.dot wants 16 rows
    head_pad = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        return Tiling(group_tile, 32 if head_pad <= 64 else 16, 4, 2)
    if head_pad > 128:
        return Tiling(group_tile, 32, 4, 3)
    return Tiling(group_tile, 4096 // max(64, head_pad), 4, STAGES)


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; of the interpreter, one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def choose_num_splits(num_programs: int, max_context: int, num_sms: int) -> int:
    """Parts that each row's context is cut into at most; 1: a single pass.

    num_programs: rows x KV heads. Enough parts to give every multiprocessor its share, none shorter than MIN_SPLIT.
    """
    wanted = PROGRAMS_PER_SM * num_sms // num_programs
    return max(1, min(wanted, -(-max_context // MIN_SPLIT), MAX_SPLITS))


def paged_decode(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    output: Tensor,
    scoring: Scoring,
    *,
    max_context: int,
    rows: Tensor | None = None,
    query_starts: Tensor | None = None,
    num_splits: int | None = None,
) -> None:
    """Fills output for rows of one query token each, which is the last of the row's context.

    query, output [num_tokens, num_heads, head_dim]; kv_cache [2, num_blocks, block_size, num_kv_heads, head_dim];
    block_tables int32 [num_rows, max blocks]; context_lens int32 [num_rows]. rows: int32, which rows these are, their
    tokens at query_starts[row] (None: row i is token i). max_context: no row's context is longer. num_splits: None lets
    the heuristic choose. Waits for nothing, and depends on no value that lies on the device: fit for a CUDA graph.
    """
    num_rows = len(context_lens) if rows is None else len(rows)
    num_heads, head_dim = query.shape[1:]
    group = num_heads // kv_cache.shape[3]
    tile = tiling(head_dim, group, query.dtype)
    programs = kv_cache.shape[3] * triton.cdiv(group, tile.block_m)
    max_keys = max_context if scoring.window is None else min(max_context, scoring.window)
    if num_splits is None:
        num_splits = choose_num_splits(num_rows * programs, max_keys, num_processors(query.device))
    is_split = num_splits > 1
    stored = as_stored(kv_cache, capability(query.device), scoring.k_scale, scoring.v_scale)
    head_pad = max(16, triton.next_power_of_2(head_dim))
    partial_size = num_rows * num_heads * num_splits * head_dim
    partial = query.new_empty(partial_size + partial_size // head_dim, dtype=torch.float32) if is_split else None
    window = 0 if scoring.window is None else min(scoring.window, MAX_WINDOW)
    flags = {"HAS_WINDOW": scoring.window is not None, "HAS_ROWS": rows is not None, "MIN_SPLIT": MIN_SPLIT}
    decode_kernel[(num_rows, programs, num_splits)](
        output, partial, query, stored.keys, stored.values, block_tables, context_lens, rows, query_starts,
        scoring.slopes, scoring.scale * LOG2_E * stored.k_factor, stored.v_factor,
        window, num_splits, partial_size,
        query.stride(0), query.stride(1), output.stride(0), output.stride(1),
        stored.keys.stride(0), stored.keys.stride(1), stored.keys.stride(2), block_tables.stride(0),
        NUM_HEADS=num_heads, GROUP=group, GROUP_TILE=tile.block_m, HEAD_DIM=head_dim, HEAD_PAD=head_pad,
        BLOCK_SIZE=kv_cache.shape[2], BLOCK_N=tile.block_n, KV_FORMAT=stored.kv_format,
        HAS_ALIBI=scoring.slopes is not None, IS_SPLIT=is_split, **flags,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if is_split:
        assert num_splits <= MAX_SPLITS, "the second kernel reads that many"
        reduce_kernel[(num_rows, num_heads)](
            output, partial, context_lens, rows, query_starts, window, num_splits, partial_size,
            output.stride(0), output.stride(1),
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, HEAD_PAD=head_pad, SPLITS_PAD=MAX_SPLITS,
            TILE=REDUCE_TILE, **flags, num_warps=4,
        )  # fmt: skip
