"""The inner loop of paged attention: online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) over a range of keys
that a block table locates. Shared by decode and prefill. Scores are in units of log2, so that exp2 is the exponential.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from real.kernels.formats import widen

LOG2_E = 1.4426950408889634
MAX_WINDOW = 2**30  # no context is longer; positions are int32

# The least number of stages with which loads of keys and values overlap with computation. Triton divides all stages
# except two between the loads of the block table and the loads of keys and values, which depend on the former. With one
# stage for each, every iteration would wait for the loads that the previous one began.
STAGES = 5


class Scoring(NamedTuple):
    """How attention weights are computed from queries and keys, and the scales of an FP8 cache.

    scale: factor of q · k. window: the token at position p attends to p - window + 1 … p; None: to 0 … p. slopes: ALiBi
    (Press et al. 2022), float32 [num_heads]: slope * (position of the key - position of the query) is added to a score.
    """

    scale: float
    window: int | None = None
    slopes: Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


class Tiling(NamedTuple):
    """How a kernel cuts its work into tiles, and its launch options."""

    block_m: int  # rows (query tokens x query heads of a KV head) of a program
    block_n: int  # keys of one iteration
    num_warps: int
    num_stages: int  # see STAGES


@triton.jit
def load_tile(base, places, dims, exists, IS_MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Loads rows of head_dim elements at `places`, [len(places), HEAD_PAD]; 0 where `exists` is false or dims are
    padding."""
    pointers = base + places[:, None] + dims[None, :]
    if IS_MASKED:
        if HEAD_DIM == HEAD_PAD:
            return tl.load(pointers, mask=exists[:, None], other=0.0)
        return tl.load(pointers, mask=exists[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    if HEAD_DIM == HEAD_PAD:
        return tl.load(pointers)
    return tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def attend(
    query, acc, top, total, first, last, positions, slopes, table, keys, values,
    stride_block, stride_slot, qk_scale, window,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    KV_FORMAT: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_MASKED: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Attends from query [M, HEAD_PAD] to the keys at positions first … last - 1; returns the new acc, top, total.

    acc [M, HEAD_PAD], top and total [M], float32: sum of weighted values, largest score, sum of weights so far.
    positions: those of the queries, [M]. IS_MASKED: last - first need not be a multiple of BLOCK_N. IS_CAUSAL (with
    IS_MASKED): a query attends to no later key, and with HAS_WINDOW to none before its window. keys, values: pointers
    to those of the KV head.
    """
    dims = tl.arange(0, HEAD_PAD)
    for start in range(first, last, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)  # positions of the keys
        exists = at < last
        if IS_MASKED:
            blocks = tl.load(table + at // BLOCK_SIZE, mask=exists, other=0)
        else:
            blocks = tl.load(table + at // BLOCK_SIZE)
        places = blocks.to(tl.int64) * stride_block + (at % BLOCK_SIZE) * stride_slot
        key = widen(load_tile(keys, places, dims, exists, IS_MASKED, HEAD_DIM, HEAD_PAD), query.dtype, KV_FORMAT)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")  # [M, BLOCK_N]
        factor = qk_scale  # applied with the exponential, in one multiply-add
        if HAS_ALIBI:
            scores = scores * qk_scale + slopes[:, None] * (at[None, :] - positions[:, None])
            factor = 1.0
        if IS_MASKED:
            is_seen = exists[None, :]
            if IS_CAUSAL:
                is_seen = is_seen & (at[None, :] <= positions[:, None])
                if HAS_WINDOW:
                    is_seen = is_seen & (at[None, :] > positions[:, None] - window)
            scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * factor)
        shift = higher
        if IS_MASKED and HAS_WINDOW:  # a query can have no visible key yet: avoids -inf - -inf = NaN
            shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * factor - shift[:, None])
        fading = tl.exp2(top - shift)
        total = total * fading + tl.sum(weights, 1)
        top = higher
        value = widen(load_tile(values, places, dims, exists, IS_MASKED, HEAD_DIM, HEAD_PAD), query.dtype, KV_FORMAT)
        acc = tl.dot(weights.to(query.dtype), value, acc * fading[:, None], input_precision="ieee")
    return acc, top, total
