"""Attention of rows with several query tokens over their paged KV: whole prompts, chunks, and prompts after a cached
prefix. The step's own keys and values are already in the cache.

A program takes some consecutive query tokens of a row with all query heads of a KV head. So loaded keys serve the whole
group, and short chunks fill a tile too. The device assigns tokens to programs once per step. This also works in a CUDA
graph, of which the host does not know the rows' lengths. Tiles with the most keys come first, so that the launch does
not end with one long program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from real.kernels.attend import LOG2_E, MAX_WINDOW, STAGES, Scoring, Tiling, attend
from real.kernels.formats import as_stored, beside, capability

ROWS, TILES = 128, 16  # rows and tiles of one iteration of tiles_kernel
HAVE_ROOM = (9, 10)  # major compute capabilities with 227 KB of shared memory per program; others have 99 or 163


@triton.jit(
    do_not_specialize=["window", "stride_table"],
    do_not_specialize_on_alignment=["tables", "context_lens", "query_starts", "tiles"],
)
def prefill_kernel(
    output, query, keys, values, tables, context_lens, query_starts, tiles, slopes,
    qk_scale, value_scale, window,
    stride_query_token, stride_query_head, stride_output_token, stride_output_head,
    stride_block, stride_slot, stride_kv_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KV_FORMAT: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head). Tile: (row, index of its first query token in the row); row -1: no tile."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    tile = tiles + 2 * tl.program_id(0)
    row, first_query = tl.load(tile), tl.load(tile + 1)
    if row < 0:
        return
    begin = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - begin
    num_before = tl.load(context_lens + row) - num_queries  # positions before the row's first query
    lanes = tl.arange(0, BLOCK_M)
    queries = first_query + lanes // GROUP
    heads = kv_head * GROUP + lanes % GROUP
    is_query = (lanes < TOKENS * GROUP) & (queries < num_queries)
    dims = tl.arange(0, HEAD_PAD)
    is_part = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (begin + queries).to(tl.int64)
    vectors = tl.load(
        query + tokens[:, None] * stride_query_token + heads[:, None] * stride_query_head + dims[None, :],
        mask=is_part, other=0.0,
    )  # fmt: skip
    vectors = beside(vectors, KV_FORMAT)
    head_slopes = tl.zeros([BLOCK_M], tl.float32)
    if HAS_ALIBI:
        head_slopes = tl.load(slopes + heads) * 1.4426950408889634
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    positions = num_before + queries
    table = tables + row.to(tl.int64) * stride_table
    keys += kv_head.to(tl.int64) * stride_kv_head
    values += kv_head.to(tl.int64) * stride_kv_head

    # three ranges of keys: only in the window of some queries; seen by all queries; the rest, which not all queries see
    last = num_before + tl.minimum(first_query + TOKENS, num_queries)  # end of the keys that the last query sees
    first, seen_from = 0, 0
    if HAS_WINDOW:
        first = tl.maximum(num_before + first_query + 1 - window, 0)
        seen_from = tl.minimum(tl.maximum(last - window, 0), num_before + first_query + 1)
        acc, top, total = attend(
            vectors, acc, top, total, first, seen_from, positions, head_slopes, table, keys, values,
            stride_block, stride_slot, qk_scale, window, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, BLOCK_N, KV_FORMAT,
            HAS_ALIBI, HAS_WINDOW, True, True,
        )  # fmt: skip
    seen_until = seen_from + (num_before + first_query + 1 - seen_from) // BLOCK_N * BLOCK_N
    acc, top, total = attend(
        vectors, acc, top, total, seen_from, seen_until, positions, head_slopes, table, keys, values,
        stride_block, stride_slot, qk_scale, window, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, BLOCK_N, KV_FORMAT,
        HAS_ALIBI, HAS_WINDOW, False, True,
    )  # fmt: skip
    acc, top, total = attend(
        vectors, acc, top, total, seen_until, last, positions, head_slopes, table, keys, values,
        stride_block, stride_slot, qk_scale, window, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, BLOCK_N, KV_FORMAT,
        HAS_ALIBI, HAS_WINDOW, True, True,
    )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)  # lanes without a query
    acc = acc * (value_scale / total)[:, None]
    outputs = output + tokens[:, None] * stride_output_token + heads[:, None] * stride_output_head + dims[None, :]
    tl.store(outputs, acc.to(output.dtype.element_ty), mask=is_part)


def tiling(
    head_dim: int, group: int, dtype: torch.dtype, max_query_len: int, capability: tuple[int, int] | None
) -> Tiling:
    """Chooses tiles for a head size, the query heads of a KV head, the format of the computation, the longest row, and
    the GPU. If STAGES would need more than the 99 KB of shared memory that every GPU has, tiles have fewer keys, or
    there are fewer stages and loads wait.
    """
    head_pad = max(16, triton.next_power_of_2(head_dim))
    block_m = 64 if max_query_len * group <= 64 or head_pad > 128 else 128
    block_m = max(block_m, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return Tiling(max(32, triton.next_power_of_2(group)), 32 if head_pad <= 128 else 16, 8, 2)
    num_warps = 8 if block_m >= 128 or head_pad > 128 else 4
    has_room = capability is None or capability[0] in HAVE_ROOM
    block_n = 64 if has_room and head_pad <= 128 and num_warps == 8 else 32
    return Tiling(block_m, block_n, num_warps, STAGES if has_room or head_pad <= 128 else 3)


@triton.jit
def load_lengths(query_starts, context_lens, row, exists, TOKENS: tl.constexpr, SKIPS_FRESH: tl.constexpr):
    """Loads for each row how many tiles it has, and the number of positions before its first query. Decodes have no
    tiles; nor have rows beyond the last, and with SKIPS_FRESH rows without cached positions."""
    num_queries = tl.load(query_starts + row + 1, mask=exists, other=0) - tl.load(
        query_starts + row, mask=exists, other=0
    )
    num_before = tl.load(context_lens + row, mask=exists, other=0) - num_queries
    is_taken = num_queries > 1
    if SKIPS_FRESH:
        is_taken = is_taken & (num_before > 0)
    return tl.where(is_taken, (num_queries + TOKENS - 1) // TOKENS, 0), num_before


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["query_starts", "context_lens"])
def tiles_kernel(
    tiles, query_starts, context_lens, num_rows,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, SKIPS_FRESH: tl.constexpr,
):  # fmt: skip
    """Each program places the tiles of one row. A tile comes after all tiles with more keys before their first query;
    of tiles with equally many, the one of the earlier row comes first."""
    row = tl.program_id(0)
    num_own, num_before = load_lengths(query_starts, context_lens, row, row < num_rows, TOKENS, SKIPS_FRESH)
    for first in range(0, num_own, TILES):
        own = first + tl.arange(0, TILES)
        at = num_before + own * TOKENS  # the position of a tile's first query
        place = tl.zeros([TILES], tl.int32)
        for other in range(0, num_rows, ROWS):
            others = other + tl.arange(0, ROWS)
            counts, befores = load_lengths(
                query_starts, context_lens, others, others < num_rows, TOKENS, SKIPS_FRESH
            )  # fmt: skip
            gap = at[:, None] - befores[None, :]
            # how many tiles of the other row, counted from its first, do not come before this tile
            num_not = tl.where(others[None, :] < row, gap + TOKENS - 1, gap + TOKENS) // TOKENS
            num_not = tl.where(gap < 0, 0, num_not)
            place += tl.sum(tl.maximum(counts[None, :] - num_not, 0), 1)
        tl.store(tiles + 2 * place, tl.zeros([TILES], tl.int32) + row, mask=own < num_own)
        tl.store(tiles + 2 * place + 1, own * TOKENS, mask=own < num_own)


def most_tiles(num_tokens: int, num_rows: int, tokens_per_tile: int) -> int:
    """Returns the most tiles that `num_tokens` can make, in up to `num_rows` rows of two or more tokens each."""
    num_rows = min(num_rows, num_tokens // 2)
    return num_rows + (num_tokens - num_rows) // tokens_per_tile


def lay_out_tiles(
    query_starts: Tensor, context_lens: Tensor, num_tiles: int, tokens_per_tile: int, *, skips_fresh: bool = False
) -> Tensor:
    """Returns the tiles of the rows with several query tokens, int32 [num_tiles, 2]: the row, and the index of the
    tile's first query token in the row; (-1, -1) after the last.

    Shapes as for paged_prefill. num_tiles: upper bound. skips_fresh: leaves out rows that have no cached positions as
    well. Does not wait; depends on no value on the device.
    """
    tiles = context_lens.new_full((num_tiles, 2), -1)
    tiles_kernel[(len(context_lens),)](
        tiles, query_starts, context_lens, len(context_lens),
        TOKENS=tokens_per_tile, ROWS=ROWS, TILES=TILES, SKIPS_FRESH=skips_fresh, num_warps=4,
    )  # fmt: skip
    return tiles


def paged_prefill(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    tiles: Tensor,
    tile: Tiling,
    output: Tensor,
    scoring: Scoring,
) -> None:
    """Writes the output of the rows in `tiles` (see lay_out_tiles). tile: the Tiling for which they were laid out.

    Shapes as for paged_decode; query_starts: int32 [num_rows + 1]. The queries of a row are the last positions of its
    context; each attends to the keys up to its own position.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = kv_cache.shape[3]
    stored = as_stored(kv_cache, capability(query.device), scoring.k_scale, scoring.v_scale, query.dtype)
    window = 0 if scoring.window is None else min(scoring.window, MAX_WINDOW)
    prefill_kernel[(len(tiles), num_kv_heads)](
        output, query, stored.keys, stored.values, block_tables, context_lens, query_starts, tiles, scoring.slopes,
        scoring.scale * LOG2_E * stored.k_factor, stored.v_factor, window,
        query.stride(0), query.stride(1), output.stride(0), output.stride(1),
        stored.keys.stride(0), stored.keys.stride(1), stored.keys.stride(2), block_tables.stride(0),
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, HEAD_PAD=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=kv_cache.shape[2], BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, KV_FORMAT=stored.kv_format,
        HAS_ALIBI=scoring.slopes is not None, HAS_WINDOW=scoring.window is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
