"""Which experts compute which tokens: the choice of each token's experts, and these choices sorted into tiles, each of
one expert.

A pair is a token and one of its experts; pair p belongs to token p // per_token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from real.kernels.chain import after_previous, chained

TILES = (16, 64, 128)  # pairs of a tile
BLOCK = 256  # pairs, or tiles, of an iteration, for each warp


@triton.jit
def choose_kernel(
    shares, experts, scores, stride_scores,
    NUM: tl.constexpr, NUM_PAD: tl.constexpr, PER_TOKEN: tl.constexpr, TOKEN_PAD: tl.constexpr,
    NORMALIZES: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (token): its experts with the largest softmax over all, the largest first, of equal ones the first."""
    after_previous(IS_CHAINED)
    token = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, NUM_PAD)
    row = tl.load(scores + token * stride_scores + ids, mask=ids < NUM, other=float("-inf")).to(tl.float32)
    powers = tl.exp(row - tl.max(row, 0))
    left = tl.where(ids < NUM, powers, -1.0)
    places = tl.arange(0, TOKEN_PAD)
    chosen = tl.zeros([TOKEN_PAD], tl.int32)
    weights = tl.zeros([TOKEN_PAD], tl.float32)
    for place in range(PER_TOKEN):
        best = tl.minimum(tl.argmax(left, 0), NUM - 1)  # not beyond the experts if scores are not numbers
        chosen = tl.where(places == place, best, chosen)
        weights = tl.where(places == place, tl.max(left, 0), weights)
        left = tl.where(ids == best, -1.0, left)
    whole = tl.sum(weights, 0) if NORMALIZES else tl.sum(powers, 0)
    at = token * PER_TOKEN + places
    tl.store(shares + at, (weights / whole).to(shares.dtype.element_ty), mask=places < PER_TOKEN)
    tl.store(experts + at, chosen, mask=places < PER_TOKEN)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def routes_kernel(
    order, tiles, experts, num_pairs, num_tiles,
    NUM: tl.constexpr, NUM_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (expert): its pairs, in order, behind those of the experts before it, and its tiles; that of the last
    expert also the empty tiles behind all."""
    after_previous(IS_CHAINED)
    expert = tl.program_id(0)
    ids = tl.arange(0, NUM_PAD)
    counts = tl.zeros([NUM_PAD], tl.int32)  # pairs of each expert
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        counts += tl.histogram(tl.load(experts + pairs, mask=pairs < num_pairs, other=NUM), NUM_PAD)
    own = tl.sum(tl.where(ids == expert, counts, 0), 0)
    first = tl.sum(tl.where(ids < expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(ids < expert, (counts + BLOCK_M - 1) // BLOCK_M, 0), 0)
    end_tile = first_tile + (own + BLOCK_M - 1) // BLOCK_M
    if expert == NUM - 1:
        end_tile = num_tiles
    for start in range(first_tile, end_tile, BLOCK):
        at = start + tl.arange(0, BLOCK)
        begin = first + (at - first_tile) * BLOCK_M
        tl.store(tiles + 3 * at, expert, mask=at < end_tile)
        tl.store(tiles + 3 * at + 1, begin, mask=at < end_tile)
        tl.store(tiles + 3 * at + 2, tl.minimum(begin + BLOCK_M, first + own), mask=at < end_tile)
    if own == 0:
        return
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        is_own = tl.load(experts + pairs, mask=pairs < num_pairs, other=NUM) == expert
        upto = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order + first + upto - 1, pairs, mask=is_own)
        first += tl.sum(is_own.to(tl.int32), 0)


class Routes(NamedTuple):
    """Which pairs are computed with which expert."""

    order: Tensor  # int32 [num_pairs]: the pairs, sorted by expert
    tiles: Tensor  # int32 [num_tiles, 3]: (expert, first, last) of the sorted pairs; empty where first >= last
    block_m: int


def choose(scores: Tensor, per_token: int, *, normalizes: bool) -> tuple[Tensor, Tensor]:
    """As real.layers.experts.choose_experts; experts are int32."""
    num_tokens, num = scores.shape
    assert scores.stride(1) == 1, "the scores of a token lie side by side"
    shares = scores.new_empty((num_tokens, per_token))
    experts = scores.new_empty((num_tokens, per_token), dtype=torch.int32)
    choose_kernel[(num_tokens,)](
        shares, experts, scores, scores.stride(0), NUM=num, NUM_PAD=triton.next_power_of_2(num), PER_TOKEN=per_token,
        TOKEN_PAD=triton.next_power_of_2(per_token), NORMALIZES=normalizes, num_warps=1, **chained(scores.device),
    )  # fmt: skip
    return shares, experts


def routes(experts: Tensor, num_experts: int, max_tile: int = TILES[-1]) -> Routes:
    """Sorts pairs into tiles of at most `max_tile` pairs. experts: int32 [num_tokens, per_token]. Depends on no value
    on the device, so it can be captured in a graph."""
    assert experts.is_contiguous(), "pairs lie side by side"
    num_pairs = experts.numel()
    mean = triton.cdiv(num_pairs, num_experts)
    block_m = min(max_tile, next((tile for tile in TILES if mean <= tile), TILES[-1]))
    num_tiles = num_pairs // block_m + min(num_experts, num_pairs)  # at most one tile per expert is not full
    order, tiles = experts.new_empty(num_pairs), experts.new_empty((num_tiles, 3))
    warps = 4 if block_m == TILES[0] else 16  # each iteration waits for its loads and for all warps
    routes_kernel[(num_experts,)](
        order, tiles, experts, num_pairs, num_tiles, NUM=num_experts, NUM_PAD=triton.next_power_of_2(num_experts + 1),
        BLOCK_M=block_m, BLOCK=warps * BLOCK, num_warps=warps, **chained(experts.device),
    )  # fmt: skip
    return Routes(order, tiles, block_m)
