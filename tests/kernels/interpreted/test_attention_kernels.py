"""The kernels, in the interpreter, against a float64 reference on fresh random inputs."""

from __future__ import annotations

import mmap
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from real.attention import first_step, flash_provider
from real.attention.interface import AttentionMetadata
from real.attention.torch_provider import TorchAttention
from real.attention.triton_provider import TritonAttention, scoring_of, why_not
from real.kernels import decode, parts, prefill
from real.kernels.block_copy import move_blocks
from real.kernels.store import store_kv
from tests.kernels.paged_batches import Batch, make_spec
from tests.real.fake_flash import FakeFlash

NAN = float("nan")
SEEDS = st.integers(0, 2**31)
FORMATS = ["auto", "fp8_e4m3", "fp8_e5m2"]


def run(provider, batch: Batch) -> torch.Tensor:
    return provider(batch.spec).prepare(batch.metadata)(batch.query, batch.key, batch.value, batch.kv_cache)


def assert_right(batch: Batch, output: torch.Tensor, expected: torch.Tensor, tolerance: float = 4e-3) -> None:
    if batch.spec.dtype == torch.float32:
        tolerance = 5e-6
    largest = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(output.double(), expected, atol=tolerance * largest, rtol=0)


@settings(max_examples=12)
@given(
    num_kv_heads=st.sampled_from([1, 2]), group=st.sampled_from([1, 2, 5, 8]),
    head_dim=st.sampled_from([16, 24, 64, 80, 112]), block_size=st.sampled_from([1, 5, 8, 16, 32]),
    rows=st.lists(st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 30))), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    window=st.one_of(st.none(), st.integers(1, 70), st.just(2**40)), alibi=st.booleans(),
    kv_dtype=st.sampled_from(FORMATS), scales=st.sampled_from([(1.0, 1.0), (0.037, 2.5)]), seed=SEEDS,
)  # fmt: skip
def test_mixed_batches(num_kv_heads, group, head_dim, block_size, rows, dtype, window, alibi, kv_dtype, scales, seed):
    """Prefills, chunks and decodes side by side; what lies in the cache and belongs to nobody is not a number."""
    spec = make_spec(
        num_kv_heads, group, head_dim, block_size, dtype, window=window, kv_dtype=kv_dtype, scales=scales, alibi=alibi
    )
    batch = Batch(spec, rows, seed, released=0, poison=NAN)
    expected = batch.expected()
    assert_right(batch, run(TritonAttention, batch), expected)
    plain = Batch(spec, rows, seed, released=0)
    assert_right(plain, run(TorchAttention, plain), expected)


@pytest.mark.parametrize("head_dim", [96, 128, 192, 256])
@pytest.mark.parametrize("num_new", [1, 7])
def test_large_heads(head_dim, num_new):
    seed = int(np.random.SeedSequence().entropy % 2**31)
    print(f"seed {seed}")
    batch = Batch(make_spec(1, 4, head_dim, 16), [(40, num_new), (0, num_new)], seed, poison=NAN)
    assert_right(batch, run(TritonAttention, batch), batch.expected())


@pytest.mark.parametrize("window", [1, 3, 40, 130])
def test_prompts_much_longer_than_the_window(window):
    """Tiles of 128 query tokens and 64 keys: the last queries see none of the keys that come first."""
    batch = Batch(make_spec(1, 1, 16, 16, torch.float16, window=window), [(20, 140)], window, released=0, poison=NAN)
    assert_right(batch, run(TritonAttention, batch), batch.expected())


@pytest.mark.parametrize("group", [48, 71])
def test_many_query_heads_for_one_kv_head(group):
    batch = Batch(make_spec(1, group, 16, 16), [(40, 1), (3, 1), (0, 5), (20, 2)], group, poison=NAN)
    assert_right(batch, run(TritonAttention, batch), batch.expected())


# --- decodes: rows as a whole, in parts ---


def decode_by(batch: Batch, num_parts: int | None) -> torch.Tensor:
    """The decode kernel alone, over what the cache holds, which the batch's keys and values are stored into first."""
    spec, metadata = batch.spec, batch.metadata
    store_kv(batch.key, batch.value, batch.kv_cache, metadata.slot_mapping, spec.k_scale, spec.v_scale)
    output = torch.full_like(batch.query, NAN)
    lens, longest = metadata.context_lens_tensor, max(metadata.context_lens)
    programs = decode.num_programs(spec.num_heads // spec.num_kv_heads, spec.num_kv_heads)
    cut = parts.plan_parts(
        lens, None, spec.sliding_window,
        programs=programs, max_context=longest, num_decodes=len(lens), num_parts=num_parts,
    )  # fmt: skip
    decode.paged_decode(
        batch.query, batch.kv_cache, metadata.block_tables, lens, output, scoring_of(spec), parts=cut
    )  # fmt: skip
    return output


@settings(max_examples=8)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 30, 31, 32, 33, 63, 64, 95, 127, 128, 200]), min_size=1, max_size=4),
    num_parts=st.sampled_from([1, 2, 3, 7, 20]), window=st.one_of(st.none(), st.sampled_from([1, 32, 33, 100, 500])),
    alibi=st.booleans(), kv_dtype=st.sampled_from(FORMATS), seed=SEEDS,
)  # fmt: skip
def test_decodes_in_parts(lengths, num_parts, window, alibi, kv_dtype, seed):
    """Parts of 32 keys or more; also more parts than there are keys for."""
    spec = make_spec(2, 3, 24, 16, window=window, alibi=alibi, kv_dtype=kv_dtype, scales=(0.5, 3.0))
    batch = Batch(spec, [(length, 1) for length in lengths], seed, released=0, poison=NAN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MIN_PART", 32)
        output = decode_by(batch, num_parts)
    assert_right(batch, output, batch.expected())


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_in_bfloat16_an_fp8_cache_is_read_as_float16(kv_dtype):
    """Queries that float16 could not hold among them; in bfloat16 the interpreter cannot multiply."""
    spec = make_spec(2, 4, 64, 16, torch.bfloat16, kv_dtype=kv_dtype, scales=(0.037, 2.5))
    batch = Batch(spec, [(70, 1), (20, 33), (0, 40), (300, 1)], 5, released=0, poison=NAN)
    assert_right(batch, run(TritonAttention, batch), batch.expected(), 8e-3)
    batch.query[::3] *= 2.0**17
    assert float(batch.query.abs().max()) > 65504 * 2
    assert_right(batch, run(TritonAttention, batch), batch.expected(), 8e-3)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_rows_that_pad_a_batch_change_nothing_and_give_zeros(num_parts):
    """As in a replayed graph: context 0, slot -1, and a table of zeros, in the middle and at the end."""
    batch = Batch(make_spec(2, 4, 32, 16, window=50), [(70, 1), (20, 1), (300, 1), (9, 1)], 3, released=0, poison=NAN)
    expected, metadata = batch.expected(), batch.metadata
    before = batch.kv_cache.clone()
    for row in (1, 3):
        metadata.context_lens_tensor[row] = 0
        metadata.slot_mapping[row] = -1
        metadata.block_tables[row] = 0
        expected[row] = 0.0
    assert_right(batch, decode_by(batch, num_parts), expected)
    slots = metadata.slot_mapping[[0, 2]]
    before.flatten(1, 2)[:, slots] = torch.stack([batch.key, batch.value])[:, [0, 2]]
    assert torch.equal(batch.kv_cache.nan_to_num(7.0), before.nan_to_num(7.0))


def test_lengths_are_read_when_the_kernel_runs():
    """The host names the longest context there may be, as for a graph; the tensors tell each row's own."""
    spec = make_spec(1, 2, 16, 16)
    long, short = Batch(spec, [(200, 1), (90, 1)], 1), Batch(spec, [(17, 1), (64, 1)], 2)
    for batch in (long, short):
        batch.metadata = replace(batch.metadata, context_lens=(4096, 4096))
        assert_right(batch, decode_by(batch, 5), batch.expected())
        assert_right(batch, run(TritonAttention, batch), batch.expected())


@settings(max_examples=25)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 700), st.sampled_from([0, 1, 127, 128, 129])), min_size=1, max_size=150),
    outlier=st.integers(0, 100_000), num_parts=st.integers(2, 300), window=st.one_of(st.none(), st.integers(1, 2000)),
    is_mixed=st.booleans(), seed=SEEDS,
)  # fmt: skip
def test_how_contexts_are_cut(lengths, outlier, num_parts, window, is_mixed, seed):
    """Parts of one length cover the keys of every decode, in order; there is room for all of them; none is much longer
    than its share of all keys."""
    lens = torch.tensor([*lengths, outlier], dtype=torch.int32)
    num_queries = np.random.default_rng(seed).integers(0, 3, len(lens)) if is_mixed else np.ones(len(lens), dtype=int)
    starts_of = torch.tensor([0, *np.cumsum(num_queries)], dtype=torch.int32) if is_mixed else None
    longest = int(lens.max()) + seed % 100
    items, starts = parts.plan_parts(
        lens, starts_of, window, programs=8, max_context=max(1, longest), num_decodes=1, num_parts=num_parts
    )
    num_keys = [min(n, window or n) if num == 1 else 0 for n, num in zip(lens.tolist(), num_queries, strict=True)]
    length = items[0, 3].item()
    share = -(-sum(num_keys) // num_parts)
    assert length % parts.MIN_PART == 0
    assert share <= length < share + parts.MIN_PART or length == parts.MIN_PART
    counts = [-(-num // length) for num in num_keys]
    expected = [(row, i, count, length) for row, count in enumerate(counts) for i in range(count)]
    assert [tuple(item) for item in items.tolist()[: len(expected)]] == expected
    assert (items[len(expected) :, 0] == -1).all()
    assert starts.tolist() == [0, *np.cumsum(counts).tolist()]


@settings(max_examples=100)
@given(st.integers(1, 600), st.integers(1, 64), st.integers(1, 200_000), st.integers(1, 200))
def test_the_number_of_parts(num_rows, programs, max_keys, num_sms):
    num = parts.choose_num_parts(num_rows, programs, max_keys, num_sms)
    assert num == 1 or num * programs >= parts.PROGRAMS_PER_SM * num_sms  # they fill the GPU
    if max_keys > parts.MAX_WHOLE or (max_keys > parts.MIN_PART and num_rows * programs < 2 * num_sms):
        assert num == max(1, -(-parts.PROGRAMS_PER_SM * num_sms // programs))
    if max_keys <= parts.MIN_PART:
        assert num == 1


def test_a_long_row_among_short_ones_is_cut_in_a_captured_step():
    """The host knows the longest context there may be; that one row is 30 times as long as the others, the device."""
    batch = Batch(make_spec(1, 2, 16, 16), [(1500, 1), *[(47, 1)] * 6], 6, released=0, poison=NAN)
    lens = batch.metadata.context_lens_tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "num_processors", lambda device: 2)
        items, starts = parts.plan_parts(lens, None, None, programs=1, max_context=100_000, num_decodes=7)
        batch.metadata = replace(batch.metadata, context_lens=(100_000,) * 7)
        assert_right(batch, run(TritonAttention, batch), batch.expected())
    assert len(items) == 7 + 8
    assert starts.diff().tolist() == [6, *[1] * 6]


# --- tiles of prefills, steps whose lengths the host does not know ---


@settings(max_examples=20)
@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 90)), min_size=1, max_size=20),
    num_more=st.sampled_from([0, 150]), tokens_per_tile=st.sampled_from([1, 3, 8, 32]), skips_fresh=st.booleans(),
)  # fmt: skip
def test_tiles_with_the_most_keys_come_first(rows, num_more, tokens_per_tile, skips_fresh):
    """Rows are (cached positions, new tokens); every row of several tokens is cut into tiles, and the bound for
    captured steps leaves room for all."""
    rows = [*rows, *[(7, 1)] * num_more]
    new, contexts = [num for _, num in rows], [before + num for before, num in rows]
    expected = [
        (-(before + first), row, first)
        for row, (before, num) in enumerate(rows)
        if num > 1 and not (skips_fresh and not before)
        for first in range(0, num, tokens_per_tile)
    ]
    num_tiles = prefill.most_tiles(sum(new), len(rows), tokens_per_tile)
    assert num_tiles >= len(expected)
    starts = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
    lens = torch.tensor(contexts, dtype=torch.int32)
    tiles = prefill.lay_out_tiles(starts, lens, num_tiles + 1, tokens_per_tile, skips_fresh=skips_fresh)
    assert [tuple(tile) for tile in tiles.tolist()[: len(expected)]] == [one[1:] for one in sorted(expected)]
    assert (tiles[len(expected) :] == -1).all()


@pytest.mark.parametrize(("window", "kv_dtype"), [(None, "auto"), (9, "fp8_e4m3")])
@pytest.mark.parametrize(
    "rows", [[(0, 11), (70, 1), (5, 7), (0, 1), (300, 1)], [(0, 2)], [(31, 1), (8, 1)], [(40, 22)]], ids=str
)
def test_a_step_is_computed_from_what_the_device_knows(rows, window, kv_dtype):
    """As in a replayed graph of 24 tokens and 7 rows: the host knows bounds alone; what pads gives zeros."""
    spec = make_spec(2, 2, 16, 16, window=window, kv_dtype=kv_dtype, scales=(0.2, 3.0), alibi=True)
    batch = Batch(spec, rows, 9, released=0, poison=NAN)
    expected = batch.expected()
    num_tokens, num_more = len(batch.query), 24 - len(batch.query)
    known, num_rows = batch.metadata, 7 - len(rows)
    pad = torch.nn.functional.pad
    batch.query, batch.key, batch.value = (
        pad(x, (0, 0, 0, 0, 0, num_more), value=NAN) for x in (batch.query, batch.key, batch.value)
    )
    batch.metadata = AttentionMetadata(
        (24,) * 7, (4096,) * 7, pad(known.query_starts, (0, num_rows), value=num_tokens),
        pad(known.context_starts, (0, num_rows), value=int(known.context_starts[-1])),
        pad(known.context_lens_tensor, (0, num_rows)), pad(known.slot_mapping, (0, num_more), value=-1),
        pad(known.block_tables, (0, 3, 0, num_rows)), are_bounds=True,
    )  # fmt: skip
    output = run(TritonAttention, batch)
    assert_right(batch, output[:num_tokens], expected)
    assert not output[num_tokens:].any()


# --- places ---


def test_a_cache_of_more_elements_than_32_bits_count():
    """Blocks at its very end are written, read by decode and prefill, copied. Memory that nobody touches is free."""
    spec = make_spec(1, 2, 32, 16, kv_dtype="fp8_e4m3")
    block = spec.block_size * spec.num_kv_heads * spec.head_dim
    num_blocks = 2**31 // block + 5
    memory = mmap.mmap(-1, 2 * num_blocks * block, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    cache = torch.frombuffer(memory, dtype=torch.uint8).view(spec.cache_dtype).view(2, num_blocks, 16, 1, 32)
    batch = Batch(spec, [(0, 20), (0, 7), (40, 1)], 4)
    expected, small, metadata = batch.expected(), batch.kv_cache, batch.metadata
    offset = num_blocks - small.shape[1]
    cache[:, offset:].view(torch.uint8).copy_(small.view(torch.uint8))
    batch.kv_cache, spare = cache, 2  # of the blocks that are copied, one lies at the beginning
    batch.metadata = replace(
        metadata, slot_mapping=metadata.slot_mapping + offset * 16, block_tables=metadata.block_tables + offset
    )
    assert_right(batch, run(TritonAttention, batch), expected)
    last = batch.tables[0][0] + offset
    move_blocks(cache, cache, torch.tensor([[last, spare]]))
    assert torch.equal(cache[:, spare].view(torch.uint8), cache[:, last].view(torch.uint8))
    move_blocks(cache, cache, torch.tensor([[spare, batch.tables[1][0] + offset]]))
    assert torch.equal(cache[:, batch.tables[1][0] + offset].view(torch.uint8), cache[:, last].view(torch.uint8))
    assert cache[:, last].view(torch.uint8).any()


# --- the providers ---


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_flash_attention_leaves_to_the_kernels_what_it_cannot_page(monkeypatch, kv_dtype, window):
    flash = FakeFlash()
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    spec = make_spec(2, 2, 16, 16, window=window, kv_dtype=kv_dtype, scales=(0.2, 3.0), alibi=True)
    batch = Batch(spec, [(0, 11), (40, 1), (0, 4), (5, 7), (0, 1)], 8, released=0, poison=NAN)
    provider = flash_provider.create(spec)
    assert provider.supports_graphs
    output = provider.prepare(batch.metadata)(batch.query, batch.key, batch.value, batch.kv_cache)
    assert_right(batch, output, batch.expected())
    assert flash.calls == [("varlen", 2)]


def test_the_first_step_on_a_gpu_is_right_here_too():
    for options in ({}, {"kv_dtype": "fp8_e4m3", "scales": (0.02, 40.0), "window": 300}):
        spec = make_spec(1, 2, 32, 16, **options)
        assert first_step.why_it_fails(TritonAttention(spec), spec) is None


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (make_spec(head_dim=264), "head sizes up to 256"),
        (make_spec(1, 129), "up to 128 query heads"),
        (make_spec(dtype=torch.bfloat16), "bfloat16"),
        (make_spec(device=torch.device("cuda")), "kernels run on the CPU"),
        (make_spec(block_size=5), None),
    ],
)
def test_why_it_cannot_run(spec, reason):
    assert (why_not(spec) is None) if reason is None else (reason in why_not(spec))
