"""Norms and SwiGLU of a GPU, in the interpreter: against float64 on fresh numbers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from real.kernels.gpu_layers import TILE, rms_norm, silu_and_mul

ROWS, SEEDS, DTYPES = st.integers(0, 5), st.integers(0, 2**31), st.sampled_from([torch.float32, torch.float16])
UNITS = {torch.float32: 1e-6, torch.float16: 2e-3}  # of numbers around 1


@settings(max_examples=25, deadline=None)
@given(
    rows=ROWS, size=st.integers(1, 700), eps=st.sampled_from([1e-6, 0.5]), has_residual=st.booleans(), dtype=DTYPES,
    seed=SEEDS,
)  # fmt: skip
def test_a_norm_is_that_of_float64(rows, size, eps, has_residual, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(rows, size, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(size, generator=generator).to(dtype)
    added = (x + residual) if has_residual else x.clone()
    kept = residual.clone()
    exact = added.double()
    expected = exact * (exact.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    found = rms_norm(x, weight, eps, residual if has_residual else None)
    assert torch.equal(x, added)
    assert torch.equal(residual, kept)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=UNITS[dtype], atol=UNITS[dtype])


@settings(max_examples=25, deadline=None)
@given(rows=ROWS, size=st.sampled_from([1, 40, TILE, TILE + 8]), dtype=DTYPES, seed=SEEDS)
def test_swiglu_is_that_of_float64(rows, size, dtype, seed):
    gate_up = (4 * torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(seed))).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    found = silu_and_mul(gate_up)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), functional.silu(gate) * up, rtol=2 * UNITS[dtype], atol=UNITS[dtype])


def test_intermediate_results_are_rounded_as_by_torch():
    """What is normalised is what the residual stream holds; and silu(gate) is rounded before it is multiplied. Few
    numbers differ, by a last bit of float32 before they are rounded."""
    generator = torch.Generator().manual_seed(0)
    x, residual, weight = (torch.randn(*shape, generator=generator).half() for shape in ((9, 700), (9, 700), (700,)))
    wanted = functional.rms_norm(x + residual, weight.shape, weight, 1e-6)
    assert (rms_norm(x, weight, 1e-6, residual) != wanted).float().mean() < 0.01
    gate, up = x.chunk(2, dim=-1)
    assert (silu_and_mul(x) != functional.silu(gate) * up).float().mean() < 0.01
