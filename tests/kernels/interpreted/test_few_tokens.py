"""GEMMs of a few tokens, in the interpreter: by plain weights, and by FP8 as it is stored; FP8 dequantised."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from real.kernels import few_tokens
from real.kernels.few_tokens import MAX_FP8_TOKENS, MAX_TOKENS, RUN, all_tickets, can_multiply, multiply_few
from real.kernels.weights import dequantized
from real.layers.fp8 import STORED, Fp8Layout, column_run
from real.layers.linear import Kept, Part, whole_part
from real.layers.matrix import Matrix, Scales, dequantize
from testbed.specs.quantization import Fp8Scheme

CPU = torch.device("cpu")


def draw(scheme: Fp8Scheme, num_out: int, num_in: int, start: int, seed: int) -> Matrix:
    """start: the first column that a rank keeps."""
    generator, columns = torch.Generator().manual_seed(seed), Part(start + num_in, start, num_in)
    layout = Fp8Layout(scheme, Kept({"a": whole_part(num_out)}, columns))
    weight = (64 * num_in**-0.5 * torch.randn(num_out, num_in, generator=generator)).to(STORED)
    scales = (1 + torch.rand(layout.shape, generator=generator)) / 32
    return Matrix(weight, Scales(scales, *layout.groups(CPU), column_run(scheme, columns)))


@settings(max_examples=30)
@given(
    groups=st.sampled_from([(10, 7), (128, 128), (1, None), (None, None)]), num_out=st.sampled_from([16, 72, 130]),
    num_in=st.sampled_from([8, 64, 200]), start=st.sampled_from([0, 32, 128]),
    dtype=st.sampled_from([torch.float32, torch.float16]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_a_weight_is_dequantised_as_by_torch(groups, num_out, num_in, start, dtype, seed):
    matrix = draw(Fp8Scheme(*groups), num_out, num_in, start, seed)
    assert matrix.scales is not None
    expected = dequantize(matrix.weight, *matrix.scales[:3], dtype)
    torch.testing.assert_close(dequantized(matrix, dtype), expected, atol=0, rtol=1e-6 if dtype == torch.float32 else 0)


@settings(max_examples=40)
@given(
    groups=st.sampled_from([None, (128, 128), (48, 256), (1, None), (None, None)]),
    num_tokens=st.sampled_from([1, 5, 16, 17, 64]), num_out=st.sampled_from([16, 72, 200]),
    num_in=st.sampled_from([72, 640, 1000]), num_processors=st.sampled_from([1, 4, 132]), has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_a_few_tokens_are_multiplied_by_the_stored_weight(
    groups, num_tokens, num_out, num_in, num_processors, has_bias, dtype, seed
):
    """Inputs are parts of wider rows. groups: those of FP8 that share a scale; None: a plain weight. num_processors: as
    many parts as are worth while with them; their tickets are given back."""
    generator = torch.Generator().manual_seed(seed)
    if groups is None:
        matrix = Matrix((num_in**-0.5 * torch.randn(num_out, num_in, generator=generator)).to(dtype))
        exact = matrix.weight.double()
    else:
        matrix = draw(Fp8Scheme(*groups), num_out, num_in, 0, seed)
        assert matrix.scales is not None
        exact = dequantize(matrix.weight, *matrix.scales[:3], torch.float64)
    x = torch.randn(num_tokens, num_in + 3, generator=generator).to(dtype)[:, 3:]
    bias = torch.randn(num_out, generator=generator).to(dtype) if has_bias else None
    assert groups is None or can_multiply(x.half(), matrix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_tokens, "num_processors", lambda device: num_processors)
        output = multiply_few(x, matrix, bias)
    expected = x.double() @ exact.T + (0.0 if bias is None else bias.double())
    tolerance = 5e-6 if dtype == torch.float32 else 2e-3
    largest = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(output.double(), expected, atol=tolerance * largest, rtol=0)
    assert not all_tickets(CPU).any()


def test_only_the_last_of_a_split_gemm_writes_the_output(monkeypatch):
    """Another may end after it. If the tickets are used up none is the last, and new memory stays as torch fills it."""
    monkeypatch.setattr(few_tokens, "num_processors", lambda device: 100)
    tickets = torch.full((2,), 1000, dtype=torch.int32)
    monkeypatch.setattr(few_tokens, "all_tickets", lambda device: tickets)
    torch.use_deterministic_algorithms(True)
    try:
        output = multiply_few(torch.ones(3, 1000).half(), Matrix(torch.ones(72, 1000).half()), None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert output.isnan().all()
    assert tickets.tolist() == [1004, 1004]  # each of the four parts has counted itself among those of its features


def test_which_fp8_it_cannot_multiply():
    """Many tokens, float32, and columns of a rank that begin within a block, or smaller blocks."""
    whole, few = draw(Fp8Scheme(128, 128), 16, 256, 0, 1), torch.zeros(1, 256, dtype=torch.bfloat16)
    assert can_multiply(few, whole)
    assert can_multiply(few, draw(Fp8Scheme(128, 128), 16, 256, RUN, 1))
    assert not can_multiply(few.expand(MAX_FP8_TOKENS + 1, -1), whole)
    assert not can_multiply(few.float(), whole)
    assert not can_multiply(few, draw(Fp8Scheme(128, 128), 16, 256, RUN // 2, 1))
    assert not can_multiply(few, draw(Fp8Scheme(64, 64), 16, 256, 0, 1))


@pytest.mark.parametrize(("gpu", "is_known"), [((9, 0), True), ((8, 0), False), ((10, 0), False), (None, False)])
def test_plain_weights_are_left_to_torch_but_for_a_few_tokens_on_hopper(monkeypatch, gpu, is_known):
    monkeypatch.setattr(few_tokens, "capability", lambda device: gpu)
    few, weight = torch.zeros(MAX_TOKENS, 64, dtype=torch.bfloat16), torch.zeros(8, 64, dtype=torch.bfloat16)
    assert can_multiply(few, Matrix(weight)) == is_known
    assert not can_multiply(few, Matrix(weight.half()))
    assert not can_multiply(few.float(), Matrix(weight.float()))
    assert not can_multiply(few.repeat(2, 1), Matrix(weight))
