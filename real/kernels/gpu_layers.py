"""Norms and SwiGLU on a GPU. Intermediate results are rounded to the tensors' format, as by torch's own operators."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from real.kernels.chain import after_previous, chained

TILE = 1024  # features of a program of silu_kernel


@triton.jit
def norm_kernel(
    output, x, residual, weight, eps,
    SIZE: tl.constexpr, PAD: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (token): output = x / rms(x) * weight. HAS_RESIDUAL: after residual was added to x, in place."""
    after_previous(IS_CHAINED)
    at = tl.arange(0, PAD)
    exists = at < SIZE
    place = tl.program_id(0).to(tl.int64) * SIZE + at
    row = tl.load(x + place, mask=exists, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        row += tl.load(residual + place, mask=exists, other=0.0).to(tl.float32)
        kept = row.to(x.dtype.element_ty)
        tl.store(x + place, kept, mask=exists)
        row = kept.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(row * row, 0) / SIZE + eps)
    row = row * scale * tl.load(weight + at, mask=exists, other=0.0).to(tl.float32)
    tl.store(output + place, row.to(output.dtype.element_ty), mask=exists)


@triton.jit
def silu_kernel(output, gate_up, SIZE: tl.constexpr, TILE: tl.constexpr, IS_CHAINED: tl.constexpr):
    """Program (TILE features of a token): silu(gate) * up. A grid's second dimension, 65,535, is too few for tokens."""
    after_previous(IS_CHAINED)
    TILES: tl.constexpr = (SIZE + TILE - 1) // TILE
    at = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    exists = at < SIZE
    token = (tl.program_id(0) // TILES).to(tl.int64)
    gate = tl.load(gate_up + token * 2 * SIZE + at, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (token * 2 + 1) * SIZE + at, mask=exists, other=0.0).to(tl.float32)
    inner = (gate * tl.sigmoid(gate)).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + token * SIZE + at, (inner * up).to(output.dtype.element_ty), mask=exists)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x, residual [num_tokens, size], contiguous; weight [size]. Adds the residual, if there is one, to x in place."""
    assert x.is_contiguous()
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    num_tokens, size = x.shape
    output, pad = torch.empty_like(x), triton.next_power_of_2(size)
    if num_tokens:
        norm_kernel[(num_tokens,)](
            output, x, residual, weight, eps, SIZE=size, PAD=pad, HAS_RESIDUAL=residual is not None,
            num_warps=min(16, max(1, pad // 512)), **chained(x.device),
        )  # fmt: skip
    return output


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """As real.layers.activation.silu_and_mul; contiguous."""
    assert gate_up.is_contiguous()
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    output = gate_up.new_empty((num_tokens, size))
    if num_tokens:
        silu_kernel[(num_tokens * triton.cdiv(size, TILE),)](
            output, gate_up, SIZE=size, TILE=TILE, num_warps=4, **chained(gate_up.device)
        )
    return output
