"""GEMMs with FP8 weights. A few tokens are multiplied by the weight as it is stored, which such a step waits for: it is
read once, a byte for each element, and widened in registers. For more tokens it is dequantised first.

For a few, the input features are cut into parts, so that there are enough programs for all multiprocessors; a second
kernel adds the parts' sums, always in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from real.kernels.formats import E4M3_BITS, widen
from real.kernels.parts import num_processors
from real.kernels.weights import dequantized, load_part, stored

if TYPE_CHECKING:
    from real.layers.matrix import Matrix

MAX_TOKENS = 64  # beyond, to dequantise the weight first takes about as long, or less
BLOCK_K = 128  # input features of an iteration, which have one scale a row
PROGRAMS = {16: 4, 32: 3, 64: 2}  # of a multiprocessor, by tokens: there are registers for as many at once
TILE = 1024  # sums of a program


@triton.jit(do_not_specialize=["num_tokens", "num_turns"])
def multiply_kernel(
    output, x, weight, scales, row_groups, column_groups, bias, num_tokens, num_turns,
    stride_x, stride_row, stride_scale_row,
    NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program (output features, part of the input features, num_turns * BLOCK_K of them): the part's sums, [parts,
    num_tokens, NUM_OUT], float32 if there are several parts.

    Products are scaled, not weights: one multiplication for BLOCK_K of them. With 64 tokens the weight is the left
    operand, of which tensor cores take 64 rows at least.
    """
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_feature = features < NUM_OUT
    tokens = tl.arange(0, BLOCK_M)
    is_token = tokens < num_tokens
    rows = weight + features.to(tl.int64)[:, None] * stride_row
    of_rows = scales + tl.load(row_groups + features, mask=is_feature, other=0) * stride_scale_row
    inputs = x + tokens.to(tl.int64)[:, None] * stride_x
    first = tl.program_id(1) * num_turns * BLOCK_K  # whole blocks, as Triton must see, or it would load single bytes
    IS_LEFT: tl.constexpr = BLOCK_M >= 64
    total = tl.zeros([BLOCK_N, BLOCK_M] if IS_LEFT else [BLOCK_M, BLOCK_N], tl.float32)
    scale = tl.load(of_rows + tl.load(column_groups + first), mask=is_feature, other=0.0)
    for start in range(first, tl.minimum(first + num_turns * BLOCK_K, NUM_IN), BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        part = load_part(inputs, at, is_token, NUM_IN, BLOCK_K)  # [BLOCK_M, BLOCK_K]
        own = widen(load_part(rows, at, is_feature, NUM_IN, BLOCK_K), part.dtype, FORMAT)  # [BLOCK_N, BLOCK_K]
        behind = tl.load(column_groups + start + BLOCK_K, mask=start + BLOCK_K < NUM_IN, other=0)
        following = tl.load(of_rows + behind, mask=is_feature, other=0.0)  # a turn before it is waited for
        if IS_LEFT:
            total += tl.dot(own, tl.trans(part), input_precision="ieee") * scale[:, None]
        else:
            total += tl.dot(part, tl.trans(own), input_precision="ieee") * scale[None, :]
        scale = following
    if IS_LEFT:
        total = tl.trans(total)
    if FORMAT == E4M3_BITS:
        total *= 256.0  # see formats.py
    if HAS_BIAS:
        total += tl.load(bias + features, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    places = (tl.program_id(1) * num_tokens + tokens).to(tl.int64)[:, None] * NUM_OUT + features[None, :]
    tl.store(output + places, total.to(output.dtype.element_ty), mask=is_token[:, None] & is_feature[None, :])


@triton.jit(do_not_specialize=["num_parts"])
def add_kernel(output, sums, bias, num_parts, NUM_OUT: tl.constexpr, TILE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Program (output features, token): adds the parts' sums, and the bias."""
    features = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_feature = features < NUM_OUT
    places = tl.program_id(1).to(tl.int64) * NUM_OUT + features
    total = tl.zeros([TILE], tl.float32)
    for part in range(num_parts):
        total += tl.load(sums + part * tl.num_programs(1) * NUM_OUT + places, mask=is_feature, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + features, mask=is_feature, other=0.0).to(tl.float32)
    tl.store(output + places, total.to(output.dtype.element_ty), mask=is_feature)


def multiply_fp8(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`: [num_tokens, in_features] -> [num_tokens, out_features]."""
    if can_multiply(x, matrix):
        return multiply_few(x, matrix, bias)
    return functional.linear(x, dequantized(matrix, x.dtype), bias)


def can_multiply(x: Tensor, matrix: Matrix) -> bool:
    """Whether `multiply_few` takes these tokens, for which it has registers, and these scales."""
    is_few = len(x) <= MAX_TOKENS and x.dtype != torch.float32
    return is_few and matrix.scales is not None and matrix.scales.run % BLOCK_K == 0


def multiply_few(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """As multiply_fp8, summed in float32. Depends on no value on the device, so it can be captured in a graph."""
    assert x.stride(1) == 1, "the elements of a row lie side by side"
    num_tokens, (num_out, num_in) = len(x), matrix.weight.shape
    kept = stored(matrix)
    block_m = max(16, triton.next_power_of_2(num_tokens))
    block_n = 128 if block_m >= 64 else 64
    num_tiles, num_blocks = triton.cdiv(num_out, block_n), triton.cdiv(num_in, BLOCK_K)
    wanted = max(1, PROGRAMS[block_m] * num_processors(x.device) // num_tiles)
    num_turns = triton.cdiv(num_blocks, wanted)
    num_parts = triton.cdiv(num_blocks, num_turns)
    output = x.new_empty((num_tokens, num_out))
    is_whole = num_parts == 1
    sums = output if is_whole else x.new_empty((num_parts, num_tokens, num_out), dtype=torch.float32)
    multiply_kernel[(num_tiles, num_parts)](
        sums, x, *kept.tensors, bias, num_tokens, num_turns, x.stride(0), *kept.strides,
        NUM_IN=num_in, NUM_OUT=num_out, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK_K, FORMAT=kept.kind % 4,
        HAS_BIAS=is_whole and bias is not None, num_warps=4, num_stages=4,
    )  # fmt: skip
    if not is_whole:
        add_kernel[(triton.cdiv(num_out, TILE), num_tokens)](
            output, sums, bias, num_parts, NUM_OUT=num_out, TILE=TILE, HAS_BIAS=bias is not None, num_warps=4
        )
    return output
