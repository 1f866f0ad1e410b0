"""Loads parts of weights in the format of a GEMM. FP8 (e4m3) is multiplied by its scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from real.kernels.formats import E4M3_BITS, PLAIN, capability, readable, settled, widen

if TYPE_CHECKING:
    from real.layers.matrix import Matrix

TILE = 64  # rows and columns that are dequantised by one program


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


@triton.jit
def dequantize_kernel(
    output, weight, scales, row_groups, column_groups, stride_row, stride_scale_row, stride_output,
    NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Program (columns, rows): a tile of the weight in the output's format, rounded once."""
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_row = rows < NUM_OUT
    start = tl.program_id(0) * TILE
    at = start + tl.arange(0, TILE)
    of_rows = (scales + tl.load(row_groups + rows, mask=is_row, other=0) * stride_scale_row)[:, None]
    part = load_weight(
        weight + rows.to(tl.int64)[:, None] * stride_row, start, is_row, of_rows, column_groups,
        output.dtype.element_ty, NUM_IN, TILE, FORMAT, IS_EVEN,
    )  # fmt: skip
    places = rows.to(tl.int64)[:, None] * stride_output + at[None, :]
    tl.store(output + places, part, mask=is_row[:, None] & (at < NUM_IN)[None, :])


class Stored(NamedTuple):
    """A weight, or several along a leading dimension, as the kernels take it."""

    tensors: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]  # weight, scales, groups of rows, of columns
    strides: tuple[int, ...]  # of the leading dimensions and of rows, of the weight and of the scales
    kind: int  # see formats.py
    run: int  # columns that have one scale side by side from each multiple of this number on; 0: all have

    def is_even(self, num_columns: int) -> bool:
        """Whether columns that are loaded together have one scale a row."""
        return self.run % num_columns == 0


def stored(matrix: Matrix) -> Stored:
    weight, scales = matrix
    assert weight.stride(-1) == 1, "the elements of a row lie side by side"
    strides = weight.stride()[:-1]
    if scales is None:
        return Stored((weight, None, None, None), (*strides, *(0 for _ in strides)), 0, 0)
    weight, kind, _ = readable(weight, capability(weight.device))
    return Stored((weight, *scales[:3]), (*strides, *scales.values.stride()[:-1]), kind, scales.run)


def dequantized(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """A single FP8 weight [out, in] in `dtype`, ready for a GEMM."""
    weight, kept = matrix.weight, stored(matrix)
    num_out, num_in = weight.shape
    output = weight.new_empty((num_out, num_in), dtype=dtype)
    dequantize_kernel[(triton.cdiv(num_in, TILE), triton.cdiv(num_out, TILE))](
        output, *kept.tensors, *kept.strides, output.stride(0), NUM_IN=num_in, NUM_OUT=num_out, TILE=TILE,
        FORMAT=kept.kind % 4, IS_EVEN=kept.is_even(TILE), num_warps=4,
    )  # fmt: skip
    return output
