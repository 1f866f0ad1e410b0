"""GEMMs of a few tokens, which wait for the weight to be read: plain ones, and FP8, which is read as it is stored, a
byte for each element, and widened in registers.

The input features are cut into parts, so that there are enough programs for all multiprocessors. Of the programs with
the same output features, the last to end adds the sums of all, always in the same order.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from real.kernels.chain import after_previous, chained
from real.kernels.formats import E4M3_BITS, PLAIN, capability, widen
from real.kernels.parts import num_processors
from real.kernels.weights import dequantized, load_part, stored

if TYPE_CHECKING:
    from real.layers.matrix import Matrix

MAX_FP8_TOKENS = 64  # beyond, to dequantise the weight first takes about as long, or less
MAX_TOKENS = 32  # of plain weights; beyond, cuBLAS takes as long, or less (docs/results/2026-11-29-h200-decode.md)


class Tiling(NamedTuple):
    """Output features of a program, input features of an iteration, stages, and programs of a multiprocessor, for which
    there are registers and shared memory at once."""

    block_n: int
    block_k: int
    num_stages: int
    num_programs: int


RUN = 128  # input features of an iteration over FP8, which must have one scale a row
OF_PLAIN = Tiling(64, 256, 3, 1)
OF_FP8 = {16: Tiling(64, RUN, 4, 4), 32: Tiling(64, RUN, 4, 3), 64: Tiling(128, RUN, 4, 2)}  # by tokens


@triton.jit(do_not_specialize=["num_tokens", "num_turns"])
def multiply_kernel(
    output, sums, tickets, x, weight, scales, row_groups, column_groups, bias, num_tokens, num_turns,
    stride_x, stride_row, stride_scale_row,
    NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr, IS_SPLIT: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (output features, part of the input features, num_turns * BLOCK_K of them).

    sums: float32 [parts, num_tokens, NUM_OUT]. tickets: int32, 0 for each program of the first dimension, and again
    when all have ended. Of FP8, products are scaled, not weights: one multiplication for BLOCK_K of them. Tensor cores
    read a plain weight from shared memory as their left operand, of which they take 64 rows at least.
    """
    after_previous(IS_CHAINED)
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_feature = features < NUM_OUT
    tokens = tl.arange(0, BLOCK_M)
    is_token = tokens < num_tokens
    rows = weight + features.to(tl.int64)[:, None] * stride_row
    inputs = x + tokens.to(tl.int64)[:, None] * stride_x
    first = tl.program_id(1) * num_turns * BLOCK_K  # whole blocks, as Triton must see, or it would load single bytes
    last = tl.minimum(first + num_turns * BLOCK_K, NUM_IN)
    IS_LEFT: tl.constexpr = FORMAT == PLAIN or BLOCK_M >= 64
    total = tl.zeros([BLOCK_N, BLOCK_M] if IS_LEFT else [BLOCK_M, BLOCK_N], tl.float32)
    of_rows = scales
    if FORMAT != PLAIN:
        of_rows += tl.load(row_groups + features, mask=is_feature, other=0) * stride_scale_row
        scale = tl.load(of_rows + tl.load(column_groups + first), mask=is_feature, other=0.0)
    for start in range(first, last, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        part = load_part(inputs, at, is_token, NUM_IN, BLOCK_K)  # [BLOCK_M, BLOCK_K]
        own = load_part(rows, at, is_feature, NUM_IN, BLOCK_K)  # [BLOCK_N, BLOCK_K]
        if FORMAT == PLAIN:
            total = tl.dot(own, tl.trans(part), total, input_precision="ieee")
        else:
            own = widen(own, part.dtype, FORMAT)
            behind = tl.load(column_groups + start + BLOCK_K, mask=start + BLOCK_K < NUM_IN, other=0)
            following = tl.load(of_rows + behind, mask=is_feature, other=0.0)  # a turn before it is waited for
            if IS_LEFT:
                total += tl.dot(own, tl.trans(part), input_precision="ieee") * scale[:, None]
            else:
                total += tl.dot(part, tl.trans(own), input_precision="ieee") * scale[None, :]
            scale = following
    if IS_LEFT:
        total = tl.trans(total)
    exists = is_token[:, None] & is_feature[None, :]
    places = tokens.to(tl.int64)[:, None] * NUM_OUT + features[None, :]
    if IS_SPLIT:
        total, is_last = add_parts(total, sums, num_tokens * NUM_OUT, places, exists, tickets + tl.program_id(0))
        exists = exists & is_last
    if FORMAT == E4M3_BITS:
        total *= 256.0  # see formats.py
    if HAS_BIAS:
        total += tl.load(bias + features, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    tl.store(output + places, total.to(output.dtype.element_ty), mask=exists)


@triton.jit
def add_parts(total, sums, size, places, exists, ticket):
    """Keeps this program's part of a sum. Returns the sum of all parts, of `size` numbers each, and whether this
    program is the last, which knows all."""
    tl.store(sums + tl.program_id(1) * size + places, total, mask=exists)
    tl.debug_barrier()  # all threads have stored
    is_last = tl.atomic_add(ticket, 1, sem="acq_rel") == tl.num_programs(1) - 1
    if is_last:
        total = tl.zeros_like(total)
        for part in range(tl.num_programs(1)):  # past the first-level cache, which other programs do not write
            total += tl.load(sums + part * size + places, mask=exists, other=0.0, cache_modifier=".cg")
        tl.store(ticket, 0)
    return total, is_last


def can_multiply(x: Tensor, matrix: Matrix) -> bool:
    """Whether `multiply_few` takes these tokens and this weight, and is faster than what else there is."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if matrix.scales is not None:
        return len(x) <= MAX_FP8_TOKENS and matrix.scales.run % RUN == 0
    gpu = capability(x.device)  # only Hopper was measured
    return len(x) <= MAX_TOKENS and matrix.weight.dtype == x.dtype and gpu is not None and gpu[0] == 9


def multiply_few(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`, summed in float32: [num_tokens, in_features] -> [num_tokens, out_features]. Depends on no
    value on the device, so it can be captured in a graph. On a device, one at a time."""
    assert x.stride(1) == 1, "the elements of a row lie side by side"
    num_tokens, (num_out, num_in) = len(x), matrix.weight.shape
    kept = stored(matrix)
    block_m = max(16, triton.next_power_of_2(num_tokens))
    tile = OF_FP8[block_m] if kept.kind else OF_PLAIN
    num_tiles, num_blocks = triton.cdiv(num_out, tile.block_n), triton.cdiv(num_in, tile.block_k)
    wanted = max(1, tile.num_programs * num_processors(x.device) // num_tiles)
    num_turns = triton.cdiv(num_blocks, wanted)
    num_parts = triton.cdiv(num_blocks, num_turns)
    output = x.new_empty((num_tokens, num_out))
    is_split = num_parts > 1
    sums = x.new_empty((num_parts, num_tokens, num_out), dtype=torch.float32) if is_split else None
    multiply_kernel[(num_tiles, num_parts)](
        output, sums, all_tickets(x.device) if is_split else None, x, *kept.tensors, bias, num_tokens, num_turns,
        x.stride(0), *kept.strides, NUM_IN=num_in, NUM_OUT=num_out, BLOCK_M=block_m, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, FORMAT=kept.kind % 4, HAS_BIAS=bias is not None, IS_SPLIT=is_split, num_warps=4,
        num_stages=tile.num_stages, **chained(x.device),
    )  # fmt: skip
    return output


@cache
def all_tickets(device: torch.device) -> Tensor:
    """Zeros: more than a split GEMM has programs."""
    return torch.zeros(4096, dtype=torch.int32, device=device)


def multiply_fp8(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """As multiply_few, for any number of tokens and any scales."""
    if can_multiply(x, matrix):
        return multiply_few(x, matrix, bias)
    return functional.linear(x, dequantized(matrix, x.dtype), bias)
