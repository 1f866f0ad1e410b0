"""The C functions between a layer's projections, against a float64 reference on fresh numbers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from real.kernels import host_layers
from real.kernels.host import why_no_library
from real.layers.norm import add_rms_norm, rms_norm

pytestmark = pytest.mark.skipif((why_no_library() or "").startswith("there is no C"), reason="no C compiler here")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
UNITS = {torch.float32: 2e-6, torch.bfloat16: 2**-7}  # of numbers around 1
EPS = 1e-6
SEEDS = st.integers(0, 2**31)


@pytest.fixture(params=[1, 2], autouse=True)
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def normalized(x, weight):
    """In float64."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 90), size=st.integers(1, 700), has_residual=st.booleans(), dtype=DTYPES, seed=SEEDS)
def test_a_norm_is_that_of_float64(rows, size, has_residual, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(rows, size, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(size, generator=generator).to(dtype)
    added = (x + residual) if has_residual else x.clone()
    expected, kept = normalized(added, weight), residual.clone()
    norm = partial(host_layers.add_rms_norm, x, residual) if has_residual else partial(host_layers.rms_norm, x)
    found = norm(weight, EPS)
    assert torch.equal(x, added)
    assert torch.equal(residual, kept)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=UNITS[dtype], atol=UNITS[dtype])


def test_without_c_torch_gives_the_same(monkeypatch):
    x, residual, weight = torch.randn(3, 32), torch.randn(3, 32), torch.rand(32)
    found = rms_norm(x, weight, EPS), add_rms_norm(x.clone(), residual, weight, EPS)
    monkeypatch.setattr(host_layers, "why_no_library", lambda: "there is no C compiler")
    torch.testing.assert_close((rms_norm(x, weight, EPS), add_rms_norm(x, residual, weight, EPS)), found)


def test_a_row_of_zeros_stays_one():
    assert host_layers.rms_norm(torch.zeros(2, 5), torch.ones(5), EPS).eq(0).all()


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 70), kv_heads=st.integers(1, 3), group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 6, 16, 64, 80, 128, 256, 1088]), block_size=st.sampled_from([1, 4, 16]),
    has_norm=st.booleans(), dtype=DTYPES, seed=SEEDS,
)  # fmt: skip
def test_heads_are_turned_and_stored_as_in_float64(
    tokens, kv_heads, group, head_dim, block_size, has_norm, dtype, seed
):
    """The views of one projection; tokens that only pad a batch have slot -1."""
    generator = torch.Generator().manual_seed(seed)
    sizes, num_blocks = [group * kv_heads, kv_heads, kv_heads], -(-tokens // block_size) + 1
    query, key, value = (
        torch.randn(tokens, sum(sizes), head_dim, generator=generator).to(dtype).split(sizes, dim=1)
    )  # fmt: skip
    angles = torch.rand(tokens, 1, head_dim // 2, generator=generator) * 6.3
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = [torch.rand(head_dim, generator=generator).to(dtype) for _ in range(2)] if has_norm else None
    expected = []
    for place, x in enumerate((query, key)):
        heads = x.double() if weights is None else normalized(x, weights[place]).to(dtype).double()
        first, second = heads.chunk(2, dim=-1)
        c, s = cos.double(), sin.double()
        expected.append(torch.cat((first * c - second * s, second * c + first * s), dim=-1))
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:tokens]
    slots[torch.rand(tokens, generator=generator) < 0.2] = -1
    cache, values = torch.zeros(2, num_blocks, block_size, kv_heads, head_dim, dtype=dtype), value.clone()
    norm = None if weights is None else (*weights, EPS)
    host_layers.turn_and_store(query, key, value, norm, (cos, sin), cache, slots)
    for found, wanted in zip((query, key), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=4 * UNITS[dtype], atol=4 * UNITS[dtype])
    assert torch.equal(value, values)
    stored, is_kept = torch.zeros_like(cache), slots >= 0
    stored.flatten(1, 2)[:, slots[is_kept]] = torch.stack((key, value))[:, is_kept]
    assert torch.equal(cache, stored)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 9), size=st.integers(1, 5000), values=st.sampled_from([2, 50, 10**6]), seed=SEEDS)
def test_the_first_of_the_largest_logits_is_found(rows, size, values, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-values, values, (rows, size), generator=generator).float()
    logits[torch.rand(rows, size, generator=generator) < 0.3] = float("-inf")
    found = host_layers.argmax(logits)
    assert found.tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("size", [1, 5, 64, 200])
def test_a_logit_that_is_no_number_is_found_as_torch_finds_it(size):
    for place in {0, size // 2, size - 1}:
        logits = torch.randn(3, size)
        logits[1, place:] = float("nan")
        assert host_layers.argmax(logits).tolist() == logits.argmax(dim=-1).tolist()


def test_what_is_no_number_stays_none():
    x = torch.tensor([[1.0, float("nan"), 2.0]])
    for dtype in UNITS:
        assert host_layers.rms_norm(x.to(dtype), torch.ones(3, dtype=dtype), EPS).isnan().all()
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # not what torch makes
    assert host_layers.rms_norm(odd[:, None].clone(), torch.ones(1), EPS).isnan().all()


def test_a_row_depends_on_no_other():
    x, weight = torch.randn(300, 257), torch.rand(257)
    whole = host_layers.rms_norm(x, weight, EPS)
    for row in (0, 150, 299):
        assert torch.equal(host_layers.rms_norm(x[row : row + 1].clone(), weight, EPS)[0], whole[row])


def test_others_are_left_to_torch():
    assert host_layers.takes(torch.zeros(4, 4))
    others = torch.zeros(4, 4).half(), torch.zeros(4, 8)[:, :4], torch.zeros(4, 4, device="meta"), torch.zeros(1, 2, 8)
    for other in others:
        assert not host_layers.takes(other)
