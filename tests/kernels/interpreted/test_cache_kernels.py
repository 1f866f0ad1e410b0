"""What stores K and V in blocks, and what moves blocks: the same bytes, wherever they lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from real.attention.triton_provider import scoring_of
from real.kernels import decode
from real.kernels.block_copy import move_blocks
from real.kernels.store import store_kv
from tests.kernels.paged_batches import make_spec, read_fp8, round_to_fp8

NAN = float("nan")
SEEDS = st.integers(0, 2**31)
FORMATS = ["auto", "fp8_e4m3", "fp8_e5m2"]


# --- storing ---


@settings(max_examples=25)
@given(
    num_kv_heads=st.sampled_from([1, 3, 8]), head_dim=st.sampled_from([16, 80, 256]),
    block_size=st.sampled_from([1, 5, 16]), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    kv_dtype=st.sampled_from(FORMATS), seed=SEEDS,
)  # fmt: skip
def test_store(num_kv_heads, head_dim, block_size, dtype, kv_dtype, seed):
    """Keys and values as they come out of one projection; some tokens have no slot."""
    rng = np.random.default_rng(seed)
    spec = make_spec(num_kv_heads, 1, head_dim, block_size, dtype, kv_dtype=kv_dtype, scales=(0.3, 1.7))
    num_tokens, num_slots = 7, 11 * block_size
    scale = 10.0 ** rng.integers(-6, 6, (num_tokens, 1))
    width = num_kv_heads * head_dim
    projected = torch.from_numpy(rng.standard_normal((num_tokens, 3 * width)) * scale).to(dtype)
    _, key, value = (part.unflatten(-1, (num_kv_heads, head_dim)) for part in projected.split(width, dim=-1))
    slots = torch.from_numpy(rng.permutation(num_slots)[:num_tokens] if num_slots >= 7 else np.arange(7))
    slots[[1, 4]] = -1
    cache = torch.zeros((2, 11, block_size, num_kv_heads, head_dim)).to(spec.cache_dtype)
    store_kv(key, value, cache, slots, spec.k_scale, spec.v_scale)
    flat = cache.flatten(1, 2).view(torch.uint8 if kv_dtype != "auto" else dtype)
    untouched = torch.ones(flat.shape[1], dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        untouched[slot] = False
        for i, (x, own) in enumerate(((key, spec.k_scale), (value, spec.v_scale))):
            expected = x[token]
            if kv_dtype != "auto":
                divided = x[token].float().numpy() * np.float32(1.0 / own)
                expected = torch.from_numpy(round_to_fp8(divided, kv_dtype))
            assert torch.equal(flat[i, slot], expected)
    assert not flat[:, untouched].any()


@pytest.mark.parametrize("kv_dtype", FORMATS[1:])
def test_every_fp8_number_and_what_lies_between(kv_dtype):
    """Written: every finite number, the middle between two, and their neighbours in float32; read: every number."""
    numbers = np.unique(np.abs(read_fp8(np.arange(128, dtype=np.uint8), kv_dtype)))
    numbers = numbers[np.isfinite(numbers)]
    middles = (numbers[1:] + numbers[:-1]) / 2
    exact = np.concatenate([numbers, middles, [numbers[-1] * 1.01, 1e30]]).astype(np.float32)
    tried = np.concatenate([exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(0))])
    tried = np.concatenate([tried, -tried, np.zeros(-2 * len(tried) % 64, np.float32)])
    key = torch.from_numpy(tried).view(-1, 1, 64)
    spec = make_spec(1, 1, 64, 16, kv_dtype=kv_dtype)
    cache = torch.zeros((2, 99, 16, 1, 64)).to(spec.cache_dtype)
    store_kv(key, key, cache, torch.arange(len(key)))
    codes = cache.view(torch.uint8).flatten(1, 2)[:, : len(key), 0].flatten(1)
    assert np.array_equal(codes[0], round_to_fp8(tried, kv_dtype))
    assert torch.equal(codes[0], codes[1])
    by_torch = torch.from_numpy(tried).clamp(-numbers[-1], numbers[-1]).to(spec.cache_dtype).view(torch.uint8)
    assert torch.equal(codes[0], by_torch)
    # one key a row: its value comes back
    every = np.concatenate([code + np.arange(128, dtype=np.uint8)[: len(numbers)] for code in (0, 128)])
    every = np.resize(every.astype(np.uint8), (-(-len(every) // 64), 64))
    cache.view(torch.uint8)[1, : len(every), 0, 0] = torch.from_numpy(every)
    output = torch.zeros((len(every), 1, 64))
    tables, lens = torch.arange(len(every), dtype=torch.int32)[:, None], torch.ones(len(every), dtype=torch.int32)
    query = torch.zeros_like(output)
    decode.paged_decode(query, cache, tables, lens, output, scoring_of(spec))
    assert np.array_equal(output[:, 0].double().numpy(), read_fp8(every, kv_dtype))


def test_what_is_not_a_number_stays_so():
    for kv_dtype in FORMATS[1:]:
        cache = torch.zeros((2, 1, 1, 1, 16)).to(make_spec(kv_dtype=kv_dtype).cache_dtype)
        store_kv(torch.full((1, 1, 16), NAN), torch.full((1, 1, 16), -NAN), cache, torch.tensor([0]))
        assert cache.float().isnan().all()


# --- copies ---


@settings(max_examples=15)
@given(
    shape=st.sampled_from([(3, 16, 2, 16), (1, 1, 1, 3), (2, 5, 3, 6), (2, 16, 8, 80)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn]),
    num_pairs=st.integers(1, 6),
    seed=SEEDS,
)
def test_copies(shape, dtype, num_pairs, seed):
    """All layers, keys and values; one source may have several destinations."""
    rng = np.random.default_rng(seed)
    layers, *tail = shape
    cache = random_blocks(rng, (layers * 2, 12, *tail), dtype)
    blocks = rng.permutation(12).tolist()
    destinations, sources = blocks[:num_pairs], rng.choice(blocks[num_pairs:], num_pairs).tolist()
    expected = cache.clone().view(torch.uint8)
    expected[:, destinations] = expected[:, sources]
    move_blocks(cache, cache, torch.tensor(list(zip(sources, destinations, strict=True))))
    assert torch.equal(cache.view(torch.uint8), expected)


@settings(max_examples=15)
@given(
    tail=st.sampled_from([(16, 2, 16), (1, 1, 3), (5, 3, 6)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]), num_pairs=st.integers(1, 6),
    max_programs=st.sampled_from([1, 2, 5, 1000]), seed=SEEDS,
)  # fmt: skip
def test_moves_between_two_memories(tail, dtype, num_pairs, max_programs, seed):
    """Pools of different sizes, by any number of programs; nothing else is written."""
    rng = np.random.default_rng(seed)
    target, source = random_blocks(rng, (2, 9, *tail), dtype), random_blocks(rng, (3, 2, 14, *tail), dtype)[1]
    sources, destinations = rng.integers(0, 14, num_pairs).tolist(), rng.permutation(9)[:num_pairs].tolist()
    expected = target.clone().view(torch.uint8)
    expected[:, destinations] = source.view(torch.uint8)[:, sources]
    move_blocks(target, source, torch.tensor(list(zip(sources, destinations, strict=True))), max_programs)
    assert torch.equal(target.view(torch.uint8), expected)


def random_blocks(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(rng.integers(0, 256, num_bytes, dtype=np.uint8)).view(dtype).view(shape)
