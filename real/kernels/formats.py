"""FP8 formats of the KV cache (Micikevicius et al. 2022), e4m3fn and e5m2, read and written bit by bit.

Written bits are those of torch: round to nearest even, after clamping to the largest finite value. Where a GPU has no
instruction for a format (e4m3 before compute capability 8.9) its bits are moved into a float16's: one shift keeps sign,
exponent and mantissa, subnormals too; the exponent's bias differs, so the value is 2^8 too small, which the caller's
scale makes up for.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PLAIN = tl.constexpr(0)  # the cache holds the model's own format
NATIVE = tl.constexpr(1)  # FP8 that the compiler converts
E4M3_BITS = tl.constexpr(2)
E5M2_BITS = tl.constexpr(3)

BITS = {torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}


class Stored(NamedTuple):
    """KV memory as the kernels take it."""

    keys: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: Tensor
    kv_format: int
    k_factor: float  # what a key that was read is to be multiplied by
    v_factor: float


def readable(stored: Tensor, capability: tuple[int, int] | None) -> tuple[Tensor, int, float]:
    """What a GPU of that capability (None: the interpreter) reads in the place of a tensor; its format; what is read is
    to be multiplied by the last."""
    bits = BITS.get(stored.dtype)
    if bits is None:
        return stored, 0, 1.0
    if capability is not None and (capability >= (8, 9) or stored.dtype == torch.float8_e5m2):
        return stored, 1, 1.0
    return stored.view(torch.uint8), bits, 256.0 if stored.dtype == torch.float8_e4m3fn else 1.0


def as_stored(kv_cache: Tensor, capability: tuple[int, int] | None, k_scale: float, v_scale: float) -> Stored:
    """The KV memory of a layer, [2, num_blocks, …], for reading on a GPU of that capability (None: the interpreter).

    The scales are those that FP8 was written with; other caches have none.
    """
    cache, kv_format, factor = readable(kv_cache, capability)
    k_scale, v_scale = (k_scale, v_scale) if kv_format else (1.0, 1.0)
    return Stored(cache[0], cache[1], kv_format, k_scale * factor, v_scale * factor)


def for_writing(kv_cache: Tensor) -> tuple[Tensor, int]:
    """The KV memory of a layer, and its format: FP8 is written as bits."""
    bits = BITS.get(kv_cache.dtype)
    return (kv_cache, 0) if bits is None else (kv_cache.view(torch.uint8), bits)


@cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@triton.jit
def widen(x, dtype: tl.constexpr, kv_format: tl.constexpr):
    """What was read from the cache, as dtype."""
    if kv_format == E4M3_BITS:
        bits = x.to(tl.uint16)
        x = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    elif kv_format == E5M2_BITS:
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return x.to(dtype)


@triton.jit
def narrow(x, kv_format: tl.constexpr):
    """float32 -> the bits of an FP8 number, uint8."""
    if kv_format == E4M3_BITS:
        return round_to_bits(x, 3, 7, 448.0)
    return round_to_bits(x, 2, 15, 57344.0)


@triton.jit
def store_as(cache, x, mask, inverse_scale, kv_format: tl.constexpr):
    """Puts x into the cache, at pointers, in the format that it holds."""
    if kv_format == PLAIN:
        tl.store(cache, x.to(cache.dtype.element_ty), mask=mask)
    else:
        tl.store(cache, narrow(x.to(tl.float32) * inverse_scale, kv_format), mask=mask)


@triton.jit
def round_to_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """float32 -> sign, exponent, and so many bits of mantissa, as uint8."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    SHIFT: tl.constexpr = 23 - MANTISSA
    half = (1 << (SHIFT - 1)) - 1 + ((bits >> SHIFT) & 1)  # ties go to even
    normal = ((bits + half) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # in a sum with this power of two the smallest subnormal is the last bit: the addition rounds
    subnormal = (magnitude + 2.0 ** (24 - BIAS - MANTISSA)).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), subnormal, normal)
    code = tl.where(x != x, 0x7F, code)  # NaN stays NaN
    return (code | sign).to(tl.uint8)
