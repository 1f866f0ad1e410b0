"""The experts' kernels, in the interpreter, against a float64 reference on fresh random inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from real.kernels.experts import MAX_TILE, MIN_TILE, routes, run_experts
from real.layers.experts import choose_experts, run_experts_one_by_one


@settings(max_examples=25)
@given(
    num_tokens=st.sampled_from([1, 2, 7, 33]),
    num_experts=st.sampled_from([1, 3, 8]),
    per_token=st.integers(1, 4),
    hidden=st.sampled_from([16, 64, 72]),
    inner=st.sampled_from([8, 64, 100]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    crowds=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_results_are_those_of_each_expert_by_itself(
    num_tokens, num_experts, per_token, hidden, inner, dtype, crowds, seed
):
    """crowds: all tokens go to the same experts, so that others have none."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    per_token = min(per_token, num_experts)
    x, gate_up, down = (
        part.to(dtype) for part in (8 * draw(num_tokens, hidden), draw(num_experts, 2 * inner, hidden),
                                    draw(num_experts, hidden, inner))
    )  # fmt: skip
    scores = draw(1 if crowds else num_tokens, num_experts).expand(num_tokens, -1)
    shares, experts = choose_experts(scores, per_token, normalizes=True)
    output = run_experts(x, shares.to(dtype), experts, gate_up, down)
    expected = run_experts_one_by_one(x.double(), shares.to(dtype).double(), experts, gate_up.double(), down.double())
    tolerance = 5e-6 if dtype == torch.float32 else 4e-3
    largest = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(output.double(), expected, atol=tolerance * largest, rtol=0)


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 700])
@pytest.mark.parametrize("num_experts", [1, 4, 128])
def test_tiles_hold_every_pair_once_and_are_of_one_expert(num_tokens, num_experts):
    generator = torch.Generator().manual_seed(num_tokens)
    experts = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, : min(8, num_experts)]
    order, tiles, block_m = routes(experts, num_experts)
    assert MIN_TILE <= block_m <= MAX_TILE
    flat, seen = experts.flatten(), []
    for expert, first, last in tiles.tolist():
        assert last - first <= block_m
        pairs = order[first : max(first, last)].tolist()
        assert all(flat[pair] == expert for pair in pairs)
        seen += pairs
    assert sorted(seen) == list(range(flat.numel()))
