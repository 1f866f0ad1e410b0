"""The experts' kernels, in the interpreter, against a float64 reference on fresh random inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from real.kernels.experts import run_experts
from real.kernels.routing import TILES, choose, routes
from real.layers.experts import choose_experts, run_experts_one_by_one
from real.layers.fp8 import STORED, Fp8Layout, column_run
from real.layers.linear import Kept, Part, whole_part
from real.layers.matrix import Matrix, Scales
from testbed.specs.quantization import Fp8Scheme


@settings(max_examples=25)
@given(
    num_tokens=st.sampled_from([1, 2, 7, 33]), num_experts=st.sampled_from([1, 3, 8]), per_token=st.integers(1, 4),
    hidden=st.sampled_from([16, 64, 72]), inner=st.sampled_from([8, 64, 100]),
    dtype=st.sampled_from([torch.float32, torch.float16]), crowds=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
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
    output = run_experts(x, shares.to(dtype), experts, Matrix(gate_up), Matrix(down))
    wide = [Matrix(part.double()) for part in (gate_up, down)]
    expected = run_experts_one_by_one(x.double(), shares.to(dtype).double(), experts, *wide)
    tolerance = 5e-6 if dtype == torch.float32 else 4e-3
    largest = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(output.double(), expected, atol=tolerance * largest, rtol=0)


@settings(max_examples=15)
@given(
    num_tokens=st.sampled_from([1, 9]), groups=st.sampled_from([(10, 7), (128, 128), (1, None), (None, None)]),
    hidden=st.sampled_from([64, 72, 136]), inner=st.sampled_from([24, 64]), start=st.sampled_from([0, 32, 64]),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_fp8_weights_are_multiplied_by_their_scales(num_tokens, groups, hidden, inner, start, seed):
    """Also where a rank's columns begin within a block of weights that share a scale."""
    generator = torch.Generator().manual_seed(seed)
    scheme = Fp8Scheme(*groups)

    def draw(num_out: int, num_in: int) -> Matrix:
        columns = Part(start + num_in, start, num_in)
        layout = Fp8Layout(scheme, Kept({"a": whole_part(num_out)}, columns))
        weight = (64 * num_in**-0.5 * torch.randn(4, num_out, num_in, generator=generator)).to(STORED)
        scales = torch.rand(4, *layout.shape, generator=generator) / 32
        return Matrix(weight, Scales(scales, *layout.groups(torch.device("cpu")), column_run(scheme, columns)))

    gate_up, down = draw(2 * inner, hidden), draw(hidden, inner)
    x = torch.randn(num_tokens, hidden, generator=generator)
    shares, experts = choose_experts(torch.randn(num_tokens, 4, generator=generator), 2, normalizes=False)
    output = run_experts(x, shares, experts, gate_up, down)
    wide = [
        Matrix(torch.stack([one.one(i).dense(torch.float32) for i in range(4)]).double()) for one in (gate_up, down)
    ]
    expected = run_experts_one_by_one(x.double(), shares.double(), experts, *wide)
    largest = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(output.double(), expected, atol=5e-6 * largest, rtol=0)


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 200, 700])
@pytest.mark.parametrize("num_experts", [1, 4, 60, 128])
def test_tiles_hold_every_pair_once_and_are_of_one_expert(num_tokens, num_experts):
    generator = torch.Generator().manual_seed(num_tokens)
    skew = torch.linspace(1, 3, num_experts)  # some experts have more pairs than others
    drawn = (torch.rand(num_tokens, num_experts, generator=generator) * skew).argsort(1)
    experts = drawn[:, : min(8, num_experts)].int().contiguous()
    order, tiles, block_m = routes(experts, num_experts)
    assert block_m in TILES
    flat, seen = experts.flatten(), []
    for expert, first, last in tiles.tolist():
        assert last - first <= block_m
        pairs = order[first : max(first, last)].tolist()
        assert all(flat[pair] == expert for pair in pairs)
        seen += pairs
    assert seen == flat.argsort(stable=True).tolist()


@given(
    num_tokens=st.integers(1, 5), num_experts=st.sampled_from([1, 3, 8, 60, 128]), per_token=st.integers(1, 8),
    normalizes=st.booleans(), dtype=st.sampled_from([torch.float32, torch.float16]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_the_experts_of_the_largest_scores_are_chosen(num_tokens, num_experts, per_token, normalizes, dtype, seed):
    """Scores differ, or lie so far apart that shares are 0."""
    per_token = min(per_token, num_experts)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)])
    scores = (scores * (0.5 if seed % 2 else 40.0)).to(dtype)
    shares, experts = choose(scores, per_token, normalizes=normalizes)
    expected, chosen = scores.double().softmax(-1).topk(per_token, -1)
    if normalizes:
        expected /= expected.sum(-1, keepdim=True)
    assert all(len({*row}) == per_token for row in experts.tolist())
    if seed % 2:
        assert torch.equal(experts.long(), chosen)
    torch.testing.assert_close(shares.double(), expected, atol=1e-6 if dtype == torch.float32 else 1e-3, rtol=0)


def test_of_equal_scores_the_first_experts_are_chosen_and_none_beyond_the_last():
    equal, nothing = torch.zeros(2, 6), torch.full((2, 6), float("nan"))
    assert choose(equal, 3, normalizes=True)[1].tolist() == [[0, 1, 2]] * 2
    assert int(choose(nothing, 3, normalizes=True)[1].max()) < 6
