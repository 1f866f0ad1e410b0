"""Providers against a float64 reference over random paged batches, and the choice between them."""

from __future__ import annotations

import importlib.machinery
import random
import sys
import types
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from real.attention import torch_provider
from real.attention.flash_provider import FlashAttention, why_not
from real.attention.interface import AttentionMetadata, AttentionSpec
from real.attention.registry import choose_attention
from real.attention.torch_provider import TorchAttention
from testbed.errors import ConfigError
from tests.real.engine_helpers import tiny_backend

CPU = torch.device("cpu")


NO_BLOCK = 10**6  # torch raises if it is read


def make_spec(
    num_kv_heads=2, group=2, head_dim=8, block_size=4, dtype=torch.float32, device=CPU, window=None
) -> AttentionSpec:
    return AttentionSpec(num_kv_heads * group, num_kv_heads, head_dim, 0.3, block_size, device, dtype, window)


class Batch:
    """Random sequences in random blocks: KV memory that holds their cached positions, and this step's projections."""

    def __init__(self, spec: AttentionSpec, rows: list[tuple[int, int]], seed: int, released: int = NO_BLOCK) -> None:
        """Rows are (cached positions, new tokens). released: stands for blocks outside a row's window."""
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        size = spec.block_size
        blocks_of = [-(-(cached + new) // size) for cached, new in rows]
        free = rng.sample(range(sum(blocks_of) + 3), sum(blocks_of) + 3)
        tables = [[free.pop() for _ in range(num)] for num in blocks_of]
        self.spec, self.rows = spec, rows
        shape = (2, sum(blocks_of) + 3, size, spec.num_kv_heads, spec.head_dim)
        self.kv_cache = torch.randn(shape, generator=generator, dtype=torch.float64).to(spec.dtype)
        num_tokens = sum(new for _, new in rows)
        self.query = torch.randn(num_tokens, spec.num_heads, spec.head_dim, generator=generator).to(spec.dtype)
        self.key, self.value = (
            torch.randn(num_tokens, spec.num_kv_heads, spec.head_dim, generator=generator).to(spec.dtype)
            for _ in range(2)
        )
        slots = [
            table[p // size] * size + p % size
            for table, (cached, new) in zip(tables, rows, strict=True)
            for p in range(cached, cached + new)
        ]
        padded = [table + [0] * (max(blocks_of) - len(table)) for table in tables]
        if spec.sliding_window is not None:
            for table, (cached, _) in zip(padded, rows, strict=True):
                num_released = max(0, cached + 1 - spec.sliding_window) // size
                table[:num_released] = [released] * num_released
        query_lens = tuple(new for _, new in rows)
        context_lens = tuple(cached + new for cached, new in rows)
        self.tables = tables
        self.metadata = AttentionMetadata(
            query_lens,
            context_lens,
            torch.tensor(np.cumsum((0, *query_lens)), dtype=torch.int32),
            torch.tensor(np.cumsum((0, *context_lens)), dtype=torch.int32),
            torch.tensor(context_lens, dtype=torch.int32),
            torch.tensor(slots),
            torch.tensor(padded, dtype=torch.int32),
        )

    def expected(self) -> torch.Tensor:
        """Softmax attention, one query at a time, in float64, from the definition of a slot."""
        spec, size = self.spec, self.spec.block_size
        cache = self.kv_cache.double().flatten(1, 2).clone()
        for token, slot in enumerate(self.metadata.slot_mapping.tolist()):
            cache[0, slot], cache[1, slot] = self.key[token].double(), self.value[token].double()
        output = []
        starts = self.metadata.query_starts.tolist()
        for row, (first, last) in enumerate(pairwise(starts)):
            cached = self.rows[row][0]
            for token in range(first, last):
                last_position = cached + token - first
                positions = range(max(0, last_position + 1 - (spec.sliding_window or 10**9)), last_position + 1)
                slots = [self.tables[row][p // size] * size + p % size for p in positions]
                keys, values = (
                    cache[i, slots].repeat_interleave(spec.num_heads // spec.num_kv_heads, 1) for i in (0, 1)
                )
                scores = torch.einsum("hd,phd->hp", self.query[token].double(), keys) * spec.scale
                output.append(torch.einsum("hp,phd->hd", scores.softmax(-1), values))
        return torch.stack(output)


@settings(max_examples=120, deadline=None)
@given(
    num_kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 5]),
    head_dim=st.sampled_from([4, 16, 24]),
    block_size=st.sampled_from([1, 2, 5, 16]),
    rows=st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 20))), min_size=1, max_size=6),
    mask_limit=st.sampled_from([1, 40, 2**24]),
    gather_limit=st.sampled_from([1, 50, 2**16]),
    query_limit=st.sampled_from([1, 3, 256]),
    window=st.one_of(st.none(), st.integers(1, 70), st.just(2**40)),
    seed=st.integers(0, 2**31),
)
def test_torch_attention_equals_a_float64_reference(
    num_kv_heads, group, head_dim, block_size, rows, mask_limit, gather_limit, query_limit, window, seed
):
    spec = make_spec(num_kv_heads, group, head_dim, block_size, window=window)
    batch = Batch(spec, rows, seed)
    expected = batch.expected()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_provider, "MAX_MASK_ELEMENTS", mask_limit)
        patch.setattr(torch_provider, "MAX_GATHERED_TOKENS", gather_limit)
        patch.setattr(torch_provider, "MAX_MASKED_QUERIES", query_limit)
        output = TorchAttention(spec).prepare(batch.metadata)(batch.query, batch.key, batch.value, batch.kv_cache)
    torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=0)


def test_decodes_of_like_length_are_computed_in_one_call(monkeypatch):
    spec = make_spec()
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch_provider.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(args[0].shape) or real(*args, **kwargs),
    )
    batch = Batch(spec, [(20 + i, 1) for i in range(10)], seed=1)  # 6 to 8 blocks of 4
    TorchAttention(spec).prepare(batch.metadata)(batch.query, batch.key, batch.value, batch.kv_cache)
    assert [shape[0] for shape in calls] == [10]


def test_decodes_far_beyond_the_window_gather_its_blocks_only(monkeypatch):
    spec = make_spec(window=10)  # 3 or 4 blocks of 4
    sizes = []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch_provider.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: sizes.append(tuple(args[1].shape[i] for i in (0, 2))) or real(*args, **kwargs),
    )
    batch = Batch(spec, [(length, 1) for length in (100, 13, 333, 51)], seed=2)
    TorchAttention(spec).prepare(batch.metadata)(batch.query, batch.key, batch.value, batch.kv_cache)
    assert sizes == [(4, 16)]


def fake_varlen(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    block_table,
    window_size=(-1, -1),
):
    """What flash-attn's varlen call computes with paged keys, by its documentation, in plain torch: the query at i
    attends to [i + keys - queries - window_size[0], i + keys - queries + window_size[1]]; -1 is no bound."""
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    query_lens, context_lens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max_seqlen_q, max_seqlen_k) == (max(query_lens), max(context_lens))
    group = q.shape[1] // k.shape[2]
    output = torch.empty_like(q)
    for row, (num_queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        first = int(cu_seqlens_q[row])
        keys = k[block_table[row].long()].flatten(0, 1)[:context].repeat_interleave(group, 1)
        values = v[block_table[row].long()].flatten(0, 1)[:context].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,phd->hqp", q[first : first + num_queries], keys) * softmax_scale
        hidden = torch.ones(num_queries, context, dtype=torch.bool).triu(context - num_queries + 1)
        if window_size != (-1, -1):
            assert window_size[1] == 0
            hidden |= torch.ones_like(hidden).tril(context - num_queries - window_size[0] - 1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        output[first : first + num_queries] = torch.einsum("hqp,phd->qhd", weights, values)
    return output


@pytest.mark.parametrize("window", [None, 1, 6, 8, 13, 500, 2**40])
def test_flash_attention_is_called_as_its_documentation_asks(monkeypatch, window):
    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = fake_varlen
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    spec = make_spec(block_size=8, window=window)
    batch = Batch(spec, [(0, 11), (13, 1), (5, 7), (30, 1)], seed=3, released=0)
    expected = batch.expected()
    output = FlashAttention(spec).prepare(batch.metadata)(batch.query, batch.key, batch.value, batch.kv_cache)
    torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (make_spec(), "needs CUDA"),
        (make_spec(device=torch.device("cuda")), "dtype is float32"),
        (make_spec(device=torch.device("cuda"), dtype=torch.float16), "block_size is 4"),
        (make_spec(device=torch.device("cuda"), dtype=torch.float16, block_size=256, head_dim=320), "head size"),
    ],
)
def test_flash_attention_says_why_it_cannot_run(spec, reason):
    assert reason in why_not(spec)


@pytest.mark.parametrize(("window", "is_old", "is_able"), [(6, True, False), (None, True, True), (6, False, True)])
def test_a_flash_attention_without_windows_is_not_chosen_where_there_is_one(monkeypatch, window, is_old, is_able):
    def old_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k): ...

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = old_varlen if is_old else fake_varlen
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    spec = make_spec(device=torch.device("cuda"), dtype=torch.float16, block_size=256, window=window)
    choice = choose_attention("auto", spec)
    assert choice.provider.name == ("flash_attn" if is_able else "torch")
    if not is_able:
        assert "no window_size" in choice.reasons["flash_attn"]
        assert "cache.sliding_window is 6" in choice.reasons["flash_attn"]


def test_auto_takes_the_first_provider_that_can_run_and_says_why_not_the_others():
    choice = choose_attention("auto", make_spec())
    assert choice.provider.name == "torch"
    assert choice.reasons == {
        "flash_attn": "it needs CUDA, the device is cpu",
        "torch": "first that can run",
    }


@pytest.mark.parametrize(("name", "why"), [("flash_attn", "it needs CUDA"), ("triton", "no such provider")])
def test_a_provider_that_cannot_run_is_refused_with_reason_and_alternative(name, why):
    with pytest.raises(ConfigError, match=f"attention={name} cannot run here: .*{why}.*can run: auto, torch"):
        tiny_backend(attention=name)
