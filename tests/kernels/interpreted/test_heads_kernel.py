"""Heads normalised, turned and stored by one kernel, in the interpreter: against float64, and the store kernel."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from real.attention.interface import HeadNorm, as_bytes
from real.kernels.heads import turn_and_store
from real.kernels.store import store_kv
from real.layers.rotary import rotate

FP8 = {"auto": None, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor):
    """Float64 [num_tokens, num_heads, head_dim]."""
    x = x.double()
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.double(), sin.double()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@settings(max_examples=15, deadline=None)
@given(
    num_tokens=st.integers(1, 5), num_kv_heads=st.sampled_from([1, 3, 8, 9, 17]), group=st.sampled_from([1, 2, 4]),
    eps=st.sampled_from([1e-6, 0.5]), head_dim=st.sampled_from([2, 16, 24, 80, 128]),
    block_size=st.sampled_from([1, 4, 16]), dtype=st.sampled_from([torch.float32, torch.float16]),
    kv_dtype=st.sampled_from(sorted(FP8)), has_norm=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_heads(num_tokens, num_kv_heads, group, eps, head_dim, block_size, dtype, kv_dtype, has_norm, seed):
    """The views of one projection; tokens that only pad a batch have slot -1."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

    sizes = [group * num_kv_heads, num_kv_heads, num_kv_heads]
    query, key, value = normal(num_tokens, sum(sizes), head_dim).split(sizes, dim=1)
    angles = torch.from_numpy(rng.uniform(0, 6.3, (num_tokens, 1, head_dim // 2)))
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norm = HeadNorm(normal(head_dim), normal(head_dim), eps) if has_norm else None
    weights = (norm.query_weight, norm.key_weight) if norm is not None else (None, None)
    expected = [reference(x, weight, eps, cos, sin) for x, weight in zip((query, key), weights, strict=True)]
    values, num_blocks = value.clone(), -(-num_tokens // block_size) + 2
    slots = torch.from_numpy(rng.permutation(num_blocks * block_size)[:num_tokens])
    slots[rng.random(num_tokens) < 0.2] = -1
    cache = torch.zeros((2, num_blocks, block_size, num_kv_heads, head_dim)).to(FP8[kv_dtype] or dtype)
    stored = cache.clone()
    turn_and_store(query, key, value, norm, (cos, sin), cache, slots, 0.5, 3.0)
    tolerance = 2e-6 if dtype == torch.float32 else 4e-3
    for found, wanted in zip((query, key), expected, strict=True):
        largest = max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(found.double(), wanted, atol=tolerance * largest, rtol=0)
    assert torch.equal(value, values)
    store_kv(key, value, stored, slots, 0.5, 3.0)
    assert torch.equal(as_bytes(cache), as_bytes(stored))


def test_heads_are_rounded_after_their_norms_and_after_the_rotation():
    """But not within the rotation. Few numbers differ, by a last bit of float32 before they are rounded."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(9, 12, 128, generator=generator).half().split([8, 2, 2], dim=1)
    weights, angles = torch.randn(2, 128, generator=generator).half(), torch.rand(9, 1, 64, generator=generator)
    cos, sin = angles.cos().half(), angles.sin().half()
    wanted = [
        rotate(functional.rms_norm(x, weight.shape, weight, 1e-6).float(), cos.float(), sin.float()).half()
        for x, weight in zip((query, key), weights, strict=True)
    ]
    cache = torch.zeros((2, 3, 4, 2, 128)).half()
    turn_and_store(query, key, value, HeadNorm(*weights, 1e-6), (cos, sin), cache, torch.arange(9))
    for found, expected in zip((query, key), wanted, strict=True):
        assert (found != expected).float().mean() < 0.01
