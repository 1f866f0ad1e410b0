"""Attention providers against a float64 reference, over random paged batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from real.attention import cpu_provider, flash3_provider, flash_provider, torch_provider
from real.attention.cpu_provider import CpuAttention
from real.attention.interface import HeadNorm
from real.attention.registry import PROVIDERS
from real.attention.torch_provider import TorchAttention
from real.layers.norm import rms_norm
from real.layers.rotary import rotate
from tests.kernels.paged_batches import Batch, make_spec


@settings(max_examples=120, deadline=None)
@given(
    num_kv_heads=st.sampled_from([1, 2, 3]), group=st.sampled_from([1, 2, 5]), head_dim=st.sampled_from([4, 16, 24]),
    block_size=st.sampled_from([1, 2, 5, 16]),
    rows=st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 20))), min_size=1, max_size=6),
    mask_limit=st.sampled_from([1, 40, 2**24]), gather_limit=st.sampled_from([1, 50, 2**16]),
    query_limit=st.sampled_from([1, 3, 256]), window=st.one_of(st.none(), st.integers(1, 70), st.just(2**40)),
    kv_dtype=st.sampled_from(["auto", "auto", "fp8_e4m3", "fp8_e5m2"]),
    scales=st.sampled_from([(1.0, 1.0), (0.037, 2.5)]), alibi=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_attention_equals_a_float64_reference(
    num_kv_heads, group, head_dim, block_size, rows, mask_limit, gather_limit, query_limit, window, kv_dtype, scales,
    alibi, seed,
):  # fmt: skip
    spec = make_spec(
        num_kv_heads, group, head_dim, block_size, window=window, kv_dtype=kv_dtype, scales=scales, alibi=alibi
    )
    expected = Batch(spec, rows, seed).expected()
    tolerance = 2e-6 * max(1.0, float(expected.abs().max()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_provider, "MAX_MASK_ELEMENTS", mask_limit)
        patch.setattr(torch_provider, "MAX_GATHERED_TOKENS", gather_limit)
        patch.setattr(torch_provider, "MAX_MASKED_QUERIES", query_limit)
        for name, entry in PROVIDERS.items():
            if entry.why_not(spec) is None:
                batch = Batch(spec, rows, seed)
                step = entry.create(spec).prepare(batch.metadata)
                output = step(batch.query, batch.key, batch.value, batch.kv_cache)
                off = float((output.double() - expected).abs().max())
                assert off <= tolerance, name


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_step_normalises_and_rotates_heads_before_it_stores_them(has_norm, is_fused):
    if is_fused and (reason := cpu_provider.why_not(make_spec(head_dim=16))):
        pytest.skip(reason)
    spec, rows = make_spec(head_dim=16), [(9, 1), (0, 5), (30, 4)]
    batch, turned = Batch(spec, rows, seed=3), Batch(spec, rows, seed=3)
    angles = torch.rand(len(batch.query), 1, 8) * 6.3
    rotation, norm = (angles.cos(), angles.sin()), None
    if has_norm:
        norm = HeadNorm(torch.rand(16), torch.rand(16), 1e-6)
        turned.query = rms_norm(turned.query, norm.query_weight, norm.eps)
        turned.key = rms_norm(turned.key, norm.key_weight, norm.eps)
    turned.query, turned.key = (rotate(x, *rotation) for x in (turned.query, turned.key))
    step = (CpuAttention if is_fused else TorchAttention)(spec).prepare(batch.metadata)
    assert (step.turn_and_store is not None) == is_fused
    output = step(batch.query, batch.key, batch.value, batch.kv_cache, rotation, norm)
    torch.testing.assert_close(output.double(), turned.expected(), atol=1e-5, rtol=0)
    TorchAttention(spec).prepare(turned.metadata)(turned.query, turned.key, turned.value, turned.kv_cache)
    torch.testing.assert_close(batch.kv_cache, turned.kv_cache, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("window", "lengths", "num_keys"),
    [(None, range(20, 30), 32), (10, (100, 13, 333, 51), 16)],  # 6 to 8 blocks of 4; 3 or 4 of the window
    ids=["like lengths", "far beyond the window"],
)
def test_decodes_are_computed_in_one_call_over_the_blocks_that_they_see(monkeypatch, window, lengths, num_keys):
    calls: list[tuple[int, int]] = []  # of each, rows and keys
    real = torch.nn.functional.scaled_dot_product_attention

    def compute(query, key, *others, **options):
        calls.append((key.shape[0], key.shape[2]))
        return real(query, key, *others, **options)

    monkeypatch.setattr(torch_provider.functional, "scaled_dot_product_attention", compute)
    spec = make_spec(window=window)
    batch = Batch(spec, [(length, 1) for length in lengths], seed=1)
    TorchAttention(spec).prepare(batch.metadata)(batch.query, batch.key, batch.value, batch.kv_cache)
    assert calls == [(len(lengths), num_keys)]


MIXED = [(0, 11), (300, 1), (0, 4), (5, 7), (30, 1), (0, 1), (260, 9)]  # cached positions, new tokens


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("window", [None, 1, 6, 270, 2**40])
@pytest.mark.parametrize(
    ("rows", "calls"),
    [
        (MIXED, [("varlen", 2), ("paged varlen", 2), ("decode", 3)]),
        ([(30, 1), (400, 1)], [("decode", 2)]),
        ([(0, 8), (0, 3)], [("varlen", 2)]),
        ([(9, 8), (256, 3)], [("paged varlen", 2)]),
        ([(30, 1), (400, 1), (0, 30)], [("varlen", 1), ("decode", 2)]),
    ],
)
def test_flash_attention_is_called_as_its_documentation_asks(flash, rows, calls, window, alibi):
    spec = make_spec(block_size=256, window=window, alibi=alibi)
    batch = Batch(spec, rows, seed=3, released=0)
    provider = flash_provider.create(spec)
    assert not provider.supports_graphs  # nobody is here who leaves slots out
    output = provider.prepare(batch.metadata)(batch.query, batch.key, batch.value, batch.kv_cache)
    torch.testing.assert_close(output.double(), batch.expected(), atol=2e-6, rtol=0)
    assert flash.calls == calls


@pytest.mark.parametrize("window", [None, 1, 6, 270, 2**40])
@pytest.mark.parametrize("block_size", [256, 16, 3])
@pytest.mark.parametrize("rows", [MIXED, [(30, 1), (400, 1)], [(0, 8)]], ids=str)
def test_flash_attention_3_computes_a_step_in_one_call(flash3, rows, block_size, window):
    spec = make_spec(block_size=block_size, window=window)
    batch = Batch(spec, rows, seed=3, released=0)
    output = flash3_provider.create(spec).prepare(batch.metadata)(batch.query, batch.key, batch.value, batch.kv_cache)
    torch.testing.assert_close(output.double(), batch.expected(), atol=2e-6, rtol=0)
    assert flash3.calls == [("step", len(rows))]
