"""FP8 formats of the KV cache (Micikevicius et al. 2022), e4m3fn and e5m2, read and written bit by bit.

Written bits are those of torch: round to nearest even, after clamping to the largest finite value. If a GPU has no
instruction for a format (e4m3 before compute capability 8.9), its bits are shifted into those of a float16. This keeps
sign, exponent and mantissa, also of subnormals. The bias of the exponent differs, so the value is too small by a factor
of 2^8, which the caller includes in its scale.

Attention over FP8 computes in float16 where the model computes in bfloat16: FP8 becomes float16 in one instruction, and
exactly. Queries are made smaller, so that large ones fit, and the factor is included in the scale.
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
QUERY_FACTOR = tl.constexpr(2.0**-8)
SETTLED = tl.constexpr(4)  # is added to a format on the GPUs that `settled` serves

BITS = {torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}
SETTLING = (8, 9, 12)  # major compute capabilities; on others Triton fails to pipeline a loop with `settled`


class Stored(NamedTuple):
    """KV memory as the kernels read it."""

    keys: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: Tensor
    kv_format: int
    k_factor: float  # by which the product of a loaded key and a query, as `beside` returns it, must be multiplied
    v_factor: float


def readable(stored: Tensor, capability: tuple[int, int] | None) -> tuple[Tensor, int, float]:
    """Returns the tensor as a GPU of this capability (None: the interpreter) reads it, its format, and the factor by
    which loaded values must be multiplied."""
    bits = BITS.get(stored.dtype)
    if bits is None:
        return stored, 0, 1.0
    settled = 4 if capability is not None and capability[0] in SETTLING else 0
    if capability is not None and (capability >= (8, 9) or stored.dtype == torch.float8_e5m2):
        return stored, 1 + settled, 1.0
    return stored.view(torch.uint8), bits + settled, 256.0 if stored.dtype == torch.float8_e4m3fn else 1.0


def as_stored(
    kv_cache: Tensor, capability: tuple[int, int] | None, k_scale: float, v_scale: float, dtype: torch.dtype
) -> Stored:
    """Returns a layer's KV memory, [2, num_blocks, …], for reading on a GPU of this capability (None: the interpreter).

    k_scale, v_scale: the scales with which an FP8 cache was written; ignored for other caches. dtype: of the queries.
    """
    cache, kv_format, factor = readable(kv_cache, capability)
    k_scale, v_scale = (k_scale, v_scale) if kv_format else (1.0, 1.0)
    smaller = QUERY_FACTOR.value if kv_format and dtype == torch.bfloat16 else 1.0
    return Stored(cache[0], cache[1], kv_format, k_scale * factor / smaller, v_scale * factor)


def for_writing(kv_cache: Tensor) -> tuple[Tensor, int]:
    """Returns a layer's KV memory for writing, and its format; FP8 is written as bits."""
    bits = BITS.get(kv_cache.dtype)
    return (kv_cache, 0) if bits is None else (kv_cache.view(torch.uint8), bits)


@cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@triton.jit
def beside(query, kv_format: tl.constexpr):
    """Returns queries as they are multiplied by keys of the cache."""
    if kv_format != PLAIN and query.dtype == tl.bfloat16:
        query = (query.to(tl.float32) * QUERY_FACTOR).to(tl.float16)
    return query


@triton.jit
def widen(x, dtype: tl.constexpr, kv_format: tl.constexpr):
    """Converts values read from the cache to dtype."""
    FORMAT: tl.constexpr = kv_format % 4  # without SETTLED
    if FORMAT == E4M3_BITS:
        bits = x.to(tl.uint16)
        x = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    elif FORMAT == E5M2_BITS:
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif FORMAT == NATIVE and dtype == tl.bfloat16:
        x = x.to(tl.float32)  # from which a GPU rounds in pairs; from float16, which it reads FP8 as, one by one
    return settled(x.to(dtype), kv_format)


@triton.jit
def settled(x, kv_format: tl.constexpr):
    """Returns x, converted in the layout in which it was loaded. Triton moves conversions that it knows to be pure
    behind the change to the layout of the tensor cores, where single bytes are read from shared memory, and converted
    by each warp that multiplies them. Not for rows of 256 numbers, with which a prefill would spill registers."""
    if kv_format >= SETTLED and x.dtype != tl.float32 and x.shape[1] <= 128:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def narrow(x, kv_format: tl.constexpr):
    """Converts float32 to the bits of FP8, uint8."""
    if kv_format == E4M3_BITS:
        return round_to_bits(x, 3, 7, 448.0)
    return round_to_bits(x, 2, 15, 57344.0)


@triton.jit
def store_as(cache, x, mask, inverse_scale, kv_format: tl.constexpr):
    """Stores x at the pointers `cache`, in the cache's format."""
    if kv_format == PLAIN:
        tl.store(cache, x.to(cache.dtype.element_ty), mask=mask)
    else:
        tl.store(cache, narrow(x.to(tl.float32) * inverse_scale, kv_format), mask=mask)


@triton.jit
def round_to_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """Converts float32 to sign, exponent and MANTISSA bits of mantissa, as uint8."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    SHIFT: tl.constexpr = 23 - MANTISSA
    half = (1 << (SHIFT - 1)) - 1 + ((bits >> SHIFT) & 1)  # ties go to even
    normal = ((bits + half) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # added to this power of two, the smallest subnormal is the last bit of the mantissa, so the addition rounds
    subnormal = (magnitude + 2.0 ** (24 - BIAS - MANTISSA)).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), subnormal, normal)
    code = tl.where(x != x, 0x7F, code)  # NaN stays NaN
    return (code | sign).to(tl.uint8)
