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

MAX_TOKENS = 64  # beyond, it is faster to dequantise the weight and multiply by torch
BLOCK_K = 128  # input features of an iteration, which have one scale a row
PROGRAMS = 3  # of a multiprocessor, for loads of one to go on while another computes
TILE = 1024  # sums of a program


@triton.jit(do_not_specialize=["num_tokens", "part_size"])
def multiply_kernel(
    sums, x, weight, scales, row_groups, column_groups, num_tokens, part_size,
    stride_x, stride_row, stride_scale_row,
    NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Program (output features, part of the input features): the part's sums, float32 [parts, num_tokens, NUM_OUT].

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
    first = tl.program_id(1) * part_size
    IS_LEFT: tl.constexpr = BLOCK_M >= 64
    total = tl.zeros([BLOCK_N, BLOCK_M] if IS_LEFT else [BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, tl.minimum(first + part_size, NUM_IN), BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        part = load_part(inputs, at, is_token, NUM_IN, BLOCK_K)  # [BLOCK_M, BLOCK_K]
        own = widen(load_part(rows, at, is_feature, NUM_IN, BLOCK_K), part.dtype, FORMAT)  # [BLOCK_N, BLOCK_K]
        scale = tl.load(of_rows + tl.load(column_groups + start), mask=is_feature, other=0.0)
        if FORMAT == E4M3_BITS:
            scale *= 256.0  # see formats.py
        if IS_LEFT:
            total += tl.dot(own, tl.trans(part), input_precision="ieee") * scale[:, None]
        else:
            total += tl.dot(part, tl.trans(own), input_precision="ieee") * scale[None, :]
    if IS_LEFT:
        total = tl.trans(total)
    places = (tl.program_id(1) * num_tokens + tokens).to(tl.int64)[:, None] * NUM_OUT + features[None, :]
    tl.store(sums + places, total, mask=is_token[:, None] & is_feature[None, :])


@triton.jit(do_not_specialize=["num_parts", "size"])
def add_kernel(output, sums, bias, num_parts, size, NUM_OUT: tl.constexpr, TILE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Program (tile of the output): adds the parts' sums, and the bias."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    places = sums + at
    for _ in range(num_parts):
        total += tl.load(places, mask=at < size, other=0.0)
        places += size
    if HAS_BIAS:
        total += tl.load(bias + at % NUM_OUT).to(tl.float32)
    tl.store(output + at, total.to(output.dtype.element_ty), mask=at < size)


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
    wanted = triton.cdiv(PROGRAMS * num_processors(x.device), num_tiles)
    part_size = BLOCK_K * triton.cdiv(num_blocks, min(wanted, num_blocks))
    num_parts = triton.cdiv(num_in, part_size)
    sums = x.new_empty((num_parts, num_tokens, num_out), dtype=torch.float32)
    multiply_kernel[(num_tiles, num_parts)](
        sums, x, *kept.tensors, num_tokens, part_size, x.stride(0), *kept.strides,
        NUM_IN=num_in, NUM_OUT=num_out, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK_K, FORMAT=kept.kind % 4,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    output = x.new_empty((num_tokens, num_out))
    add_kernel[(triton.cdiv(output.numel(), TILE),)](
        output, sums, bias, num_parts, output.numel(), NUM_OUT=num_out, TILE=TILE, HAS_BIAS=bias is not None,
        num_warps=4,
    )  # fmt: skip
    return output
