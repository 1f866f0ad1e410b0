"""The feed-forward of a mixture of experts: each token is multiplied by the weights of the experts chosen for it.

A pair is a token and one of its experts. Pairs are sorted by expert and cut into tiles of at most BLOCK_M pairs of one
expert. A program computes some output features of a tile. The number of tiles depends only on the number of pairs, so
the host does not wait for the device, and a captured graph is valid for any routing. No two programs write the same
element, so results are the same in every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from real.kernels.attend import STAGES
from real.kernels.formats import E4M3_BITS, PLAIN, capability, readable, settled, widen

if TYPE_CHECKING:
    from real.layers.fp8 import Matrix

MIN_TILE, MAX_TILE = 16, 64  # pairs of a tile: least for tensor cores; most that keeps both sums in registers
BLOCK_N, BLOCK_K = 64, 64  # output features of a program, input features of an iteration


@triton.jit
def load_part(rows, at, exists, NUM_IN: tl.constexpr, BLOCK_K: tl.constexpr):
    """Loads elements `at` of some rows, [len(exists), BLOCK_K]; 0 beyond the rows. Full parts need no column mask."""
    if NUM_IN % BLOCK_K == 0:
        return tl.load(rows + at[None, :], mask=exists[:, None], other=0.0)
    return tl.load(rows + at[None, :], mask=exists[:, None] & (at < NUM_IN)[None, :], other=0.0)


@triton.jit
def load_weight(
    rows, start, exists, scale_rows, column_groups, dtype: tl.constexpr,
    NUM_IN: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Loads columns from `start` on of a weight like load_part, in the format of the GEMM; FP8 is multiplied by its
    scales.

    scale_rows: pointers to the scales of each row; column_groups: index of each column's scale among them. IS_EVEN: the
    columns that are loaded together have one scale a row.
    """
    at = start + tl.arange(0, BLOCK_K)
    part = load_part(rows, at, exists, NUM_IN, BLOCK_K)
    if FORMAT != PLAIN:
        if IS_EVEN:
            scales = tl.load(scale_rows + tl.load(column_groups + start), mask=exists[:, None], other=0.0)
        else:
            groups = tl.load(column_groups + at, mask=at < NUM_IN, other=0)
            scales = tl.load(scale_rows + groups[None, :], mask=exists[:, None], other=0.0)
        if FORMAT % 4 == E4M3_BITS:  # with SETTLED or without
            scales *= 256.0  # see formats.py
        part = settled((widen(part, tl.float32, FORMAT) * scales).to(dtype), FORMAT)
    return part


@triton.jit(do_not_specialize_on_alignment=["order", "tiles"])
def gate_up_kernel(
    output, x, weight, scales, row_groups, column_groups, order, tiles,
    stride_x, stride_expert, stride_row, stride_scales, stride_scale_row, stride_output,
    NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr,
    IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Program (tile, features): silu(x @ gate.T) * (x @ up.T) of a tile's pairs, stored in sorted order.

    tiles: (expert, first, last) of the sorted pairs; the program of an empty tile ends at once. weight [num_experts,
    2 * NUM_OUT, NUM_IN]: rows of gate, then of up. Pair p belongs to token p // PER_TOKEN.
    """
    tile = tiles + 3 * tl.program_id(0)
    expert, first, last = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if first >= last:
        return
    places = first + tl.arange(0, BLOCK_M)
    is_pair = places < last
    tokens = (tl.load(order + places, mask=is_pair, other=0) // PER_TOKEN).to(tl.int64)
    features = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_feature = features < NUM_OUT
    rows = (weight + expert * stride_expert + features.to(tl.int64) * stride_row)[:, None]
    up_rows = rows + NUM_OUT * stride_row
    of_gates = rows  # pointers to scales, which only FP8 has
    of_ups = rows
    if FORMAT != PLAIN:
        own = scales + expert * stride_scales
        of_gates = (own + tl.load(row_groups + features, mask=is_feature, other=0) * stride_scale_row)[:, None]
        of_ups = (own + tl.load(row_groups + NUM_OUT + features, mask=is_feature, other=0) * stride_scale_row)[:, None]
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, NUM_IN, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        part = load_part(x + tokens[:, None] * stride_x, at, is_pair, NUM_IN, BLOCK_K)  # [BLOCK_M, BLOCK_K]
        of_gate = load_weight(
            rows, start, is_feature, of_gates, column_groups, part.dtype, NUM_IN, BLOCK_K, FORMAT, IS_EVEN
        )  # [BLOCK_N, BLOCK_K]
        of_up = load_weight(
            up_rows, start, is_feature, of_ups, column_groups, part.dtype, NUM_IN, BLOCK_K, FORMAT, IS_EVEN
        )
        gate = tl.dot(part, tl.trans(of_gate), gate, input_precision="ieee")
        up = tl.dot(part, tl.trans(of_up), up, input_precision="ieee")
    inner = gate * tl.sigmoid(gate) * up
    tl.store(
        output + places.to(tl.int64)[:, None] * stride_output + features[None, :],
        inner.to(output.dtype.element_ty), mask=is_pair[:, None] & is_feature[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["order", "tiles"])
def down_kernel(
    output, x, weight, scales, row_groups, column_groups, shares, order, tiles,
    stride_x, stride_expert, stride_row, stride_scales, stride_scale_row, stride_output,
    NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr,
    IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Program (tile, features): share * (x @ down.T) of a tile's pairs. x is in sorted order, the output is not.

    weight [num_experts, NUM_OUT, NUM_IN]; shares: the weight of each pair's expert for its token.
    """
    tile = tiles + 3 * tl.program_id(0)
    expert, first, last = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if first >= last:
        return
    places = first + tl.arange(0, BLOCK_M)
    is_pair = places < last
    pair = tl.load(order + places, mask=is_pair, other=0).to(tl.int64)
    features = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_feature = features < NUM_OUT
    rows = (weight + expert * stride_expert + features.to(tl.int64) * stride_row)[:, None]
    of_rows = rows
    if FORMAT != PLAIN:
        own = scales + expert * stride_scales
        of_rows = (own + tl.load(row_groups + features, mask=is_feature, other=0) * stride_scale_row)[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, NUM_IN, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        part = load_part(x + places.to(tl.int64)[:, None] * stride_x, at, is_pair, NUM_IN, BLOCK_K)
        of_down = load_weight(
            rows, start, is_feature, of_rows, column_groups, part.dtype, NUM_IN, BLOCK_K, FORMAT, IS_EVEN
        )
        total = tl.dot(part, tl.trans(of_down), total, input_precision="ieee")
    share = tl.load(shares + pair, mask=is_pair, other=0.0).to(tl.float32)
    tl.store(
        output + pair[:, None] * stride_output + features[None, :],
        (total * share[:, None]).to(output.dtype.element_ty), mask=is_pair[:, None] & is_feature[None, :],
    )  # fmt: skip


class Routes(NamedTuple):
    """Which pairs are computed with which expert."""

    order: Tensor  # int32 [num_pairs]: the pairs, sorted by expert
    tiles: Tensor  # int32 [num_tiles, 3]: (expert, first, last) of the sorted pairs
    block_m: int


def routes(experts: Tensor, num_experts: int) -> Routes:
    """Sorts pairs into tiles, the last of which can be empty. experts: int64 [num_tokens, per_token]."""
    flat = experts.flatten()
    num_pairs = flat.shape[0]
    block_m = min(MAX_TILE, max(MIN_TILE, triton.next_power_of_2(-(-num_pairs // num_experts))))
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    ends = counts.cumsum(0)  # where the sorted pairs of each expert end
    last_tiles = ((counts + block_m - 1) // block_m).cumsum(0)
    num_tiles = num_pairs // block_m + min(num_experts, num_pairs)  # at most one tile per expert is not full
    tile = torch.arange(num_tiles, device=flat.device)
    expert = torch.searchsorted(last_tiles, tile, right=True).clamp_(max=num_experts - 1)
    num_of = (counts[expert] + block_m - 1) // block_m
    first = ends[expert] - counts[expert] + (tile - (last_tiles[expert] - num_of)) * block_m
    last = torch.minimum(first + block_m, ends[expert])
    return Routes(order.int(), torch.stack([expert, first, last], 1).int(), block_m)


def run_experts(x: Tensor, shares: Tensor, experts: Tensor, gate_up: Matrix, down: Matrix) -> Tensor:
    """x [num_tokens, hidden]; shares and experts (int64) [num_tokens, per_token]; gate_up [num_experts, 2 * inner,
    hidden]; down [num_experts, hidden, inner] -> the experts' results, summed by share, [num_tokens, hidden]."""
    num_tokens, per_token = experts.shape
    num_experts, hidden, inner = down.weight.shape
    assert x.stride(1) == 1, "the elements of a row lie side by side"
    order, tiles, block_m = routes(experts, num_experts)
    between = x.new_empty((num_tokens * per_token, inner))
    weight, strides, how = _stored(gate_up)
    gate_up_kernel[(len(tiles), triton.cdiv(inner, BLOCK_N))](
        between, x, *weight, order, tiles, x.stride(0), *strides, between.stride(0),
        NUM_IN=hidden, NUM_OUT=inner, PER_TOKEN=per_token, BLOCK_M=block_m, **how,
    )  # fmt: skip
    results = x.new_empty((num_tokens * per_token, hidden))
    weight, strides, how = _stored(down)
    down_kernel[(len(tiles), triton.cdiv(hidden, BLOCK_N))](
        results, between, *weight, shares.contiguous(), order, tiles, between.stride(0), *strides, results.stride(0),
        NUM_IN=inner, NUM_OUT=hidden, BLOCK_M=block_m, **how,
    )  # fmt: skip
    return results.view(num_tokens, per_token, hidden).sum(1)


def _stored(matrix: Matrix) -> tuple[tuple[Tensor | None, ...], tuple[int, ...], dict[str, Any]]:
    """Returns weight, scales and groups as the kernels take them; strides of experts and rows of both; what else a
    launch depends on."""
    weight, scales = matrix
    assert weight.stride(2) == 1, "the elements of a row lie side by side"
    strides = weight.stride(0), weight.stride(1)
    how: dict[str, Any] = {"BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "FORMAT": 0, "IS_EVEN": True, "num_warps": 4}
    if scales is None:
        return (weight, None, None, None), (*strides, 0, 0), how
    weight, kind, _ = readable(weight, capability(weight.device))
    how |= {"FORMAT": kind, "IS_EVEN": scales.run % BLOCK_K == 0}
    if how["IS_EVEN"]:  # a scale waits for the index of its group; a scale for each weight would need too much memory
        how["num_stages"] = STAGES
    return (weight, *scales[:3]), (*strides, scales.values.stride(0), scales.values.stride(1)), how
