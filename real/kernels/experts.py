"""The feed-forward of a mixture of experts: each token is multiplied by the weights of the experts chosen for it.

Pairs of a token and one of its experts are sorted by expert and cut into tiles of at most BLOCK_M pairs of one expert
(real/kernels/routing.py). A program computes some output features of a tile. The number of tiles depends only on the
number of pairs, so the host does not wait for the device, and a captured graph is valid for any routing. No two
programs write the same element, so results are the same in every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from real.kernels.attend import STAGES
from real.kernels.chain import after_previous, chained
from real.kernels.formats import PLAIN
from real.kernels.routing import TILES, routes
from real.kernels.weights import Stored, load_part, load_weight, stored

if TYPE_CHECKING:
    from real.layers.matrix import Matrix


@triton.jit(do_not_specialize_on_alignment=["order", "tiles"])
def gate_up_kernel(
    output, x, weight, scales, row_groups, column_groups, order, tiles,
    stride_x, stride_expert, stride_row, stride_scales, stride_scale_row, stride_output,
    NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr,
    IS_EVEN: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (tile, features): silu(x @ gate.T) * (x @ up.T) of a tile's pairs, stored in sorted order.

    tiles: (expert, first, last) of the sorted pairs; the program of an empty tile ends at once. weight [num_experts,
    2 * NUM_OUT, NUM_IN]: rows of gate, then of up. Pair p belongs to token p // PER_TOKEN.
    """
    after_previous(IS_CHAINED)
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
    IS_EVEN: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (tile, features): share * (x @ down.T) of a tile's pairs. x is in sorted order, the output is not.

    weight [num_experts, NUM_OUT, NUM_IN]; shares: the weight of each pair's expert for its token.
    """
    after_previous(IS_CHAINED)
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


@triton.jit
def sum_kernel(
    output, results, PER_TOKEN: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, IS_CHAINED: tl.constexpr
):  # fmt: skip
    """Program (TILE features of a token): adds the results of a token's experts."""
    after_previous(IS_CHAINED)
    TILES: tl.constexpr = (SIZE + TILE - 1) // TILE
    token = (tl.program_id(0) // TILES).to(tl.int64)
    at = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for place in tl.static_range(PER_TOKEN):
        total += tl.load(results + (token * PER_TOKEN + place) * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    tl.store(output + token * SIZE + at, total.to(output.dtype.element_ty), mask=at < SIZE)


class Tiling(NamedTuple):
    """Output features of a program, input features of an iteration, launch options, and whether FP8 is `settled`, which
    takes twice the shared memory, so that fewer programs run at once."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    settles: bool = True

    def options(self, weight: Stored) -> dict[str, Any]:
        """What a kernel is told of this, and of the format of a weight."""
        kind = weight.kind if self.settles else weight.kind % 4
        options = {"BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "FORMAT": kind}
        options["IS_EVEN"] = weight.is_even(self.block_k)
        return options | {"num_warps": self.num_warps, "num_stages": self.num_stages}


TILE = 1024  # features of a program of sum_kernel
FEW = Tiling(64, 128, 4, 3, settles=False)  # for tiles of few pairs, which wait for the weights
SOME = Tiling(64, 64, 4, 3)
MANY = Tiling(64, 64, 8, 3), Tiling(128, 64, 8, 3)  # the first kernel has two sums for each feature


def tilings(block_m: int, dtype: torch.dtype, weight: Stored) -> tuple[Tiling, Tiling]:
    """Chooses the tiles of both kernels, as measured on an H200 (docs/results/2026-11-29-h200.md)."""
    if dtype == torch.float32 or not weight.is_even(FEW.block_k) or block_m == TILES[1]:
        return SOME, SOME  # float32, and a scale for each weight, need more registers and shared memory
    if block_m == TILES[2]:
        return MANY
    few = FEW._replace(num_stages=STAGES) if weight.kind else FEW  # a scale waits for the index of its group
    return few, few


def run_experts(x: Tensor, shares: Tensor, experts: Tensor, gate_up: Matrix, down: Matrix) -> Tensor:
    """x [num_tokens, hidden]; shares and experts (int32) [num_tokens, per_token]; gate_up [num_experts, 2 * inner,
    hidden]; down [num_experts, hidden, inner] -> the experts' results, summed by share, [num_tokens, hidden]."""
    num_tokens, per_token = experts.shape
    num_experts, hidden, inner = down.weight.shape
    assert x.stride(1) == 1, "the elements of a row lie side by side"
    first, second = stored(gate_up), stored(down)
    order, tiles, block_m = routes(experts, num_experts, TILES[1] if x.dtype == torch.float32 else TILES[2])
    between = x.new_empty((num_tokens * per_token, inner))
    tile = tilings(block_m, x.dtype, first)[0]
    gate_up_kernel[(len(tiles), triton.cdiv(inner, tile.block_n))](
        between, x, *first.tensors, order, tiles, x.stride(0), *first.strides, between.stride(0),
        NUM_IN=hidden, NUM_OUT=inner, PER_TOKEN=per_token, BLOCK_M=block_m, **tile.options(first), **chained(x.device),
    )  # fmt: skip
    results = x.new_empty((num_tokens * per_token, hidden))
    tile = tilings(block_m, x.dtype, second)[1]
    down_kernel[(len(tiles), triton.cdiv(hidden, tile.block_n))](
        results, between, *second.tensors, shares.contiguous(), order, tiles, between.stride(0), *second.strides,
        results.stride(0), NUM_IN=inner, NUM_OUT=hidden, BLOCK_M=block_m, **tile.options(second), **chained(x.device),
    )  # fmt: skip
    output = x.new_empty((num_tokens, hidden))
    sum_kernel[(num_tokens * triton.cdiv(hidden, TILE),)](
        output, results, PER_TOKEN=per_token, SIZE=hidden, TILE=TILE, num_warps=4, **chained(x.device)
    )
    return output
