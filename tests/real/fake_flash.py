"""A stand-in for the package flash-attn 2.8: its parameters, what it refuses, what its documentation says, in torch."""

from __future__ import annotations

import importlib.machinery
import types

import torch


def seen(num_queries: int, num_keys: int, window_size: tuple[int, int]) -> torch.Tensor:
    """By flash-attn's documentation, the query at i attends to [i + keys - queries - window_size[0], i + keys - queries
    + window_size[1]], where -1 is no bound, and with causal to no key behind i + keys - queries."""
    left, right = window_size
    assert right in (-1, 0)
    own = torch.arange(num_queries)[:, None] + num_keys - num_queries
    keys = torch.arange(num_keys)
    return (keys <= own) & ((keys >= own - left) | (left < 0))


def plain_attention(query, keys, values, softmax_scale, window_size, alibi_slopes):
    """query [num_queries, num_heads, head_dim], keys and values [num_keys, num_kv_heads, head_dim]."""
    group, num_queries, num_keys = query.shape[1] // keys.shape[1], len(query), len(keys)
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,phd->hqp", query, keys) * softmax_scale
    if alibi_slopes is not None:  # "(-alibi_slope * |i + seqlen_k - seqlen_q - j|) is added to the attention score"
        assert alibi_slopes.dtype == torch.float32
        assert alibi_slopes.shape == (query.shape[1],)
        own = torch.arange(num_queries)[:, None] + num_keys - num_queries
        scores = scores - alibi_slopes[:, None, None] * (own - torch.arange(num_keys)).abs()
    hidden = ~seen(num_queries, num_keys, window_size)
    return torch.einsum("hqp,phd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


def assert_taken(query, keys, values):
    """What its C++ refuses: formats, head sizes, groups, elements of a head that do not lie side by side."""
    assert query.dtype == keys.dtype == values.dtype
    assert query.shape[-1] == keys.shape[-1] == values.shape[-1] <= 256
    assert keys.shape == values.shape
    assert query.shape[-2] % keys.shape[-2] == 0
    assert query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1


def assert_taken_index(index, num):
    assert index.dtype == torch.int32
    assert index.is_contiguous()
    assert index.shape == (num,)


def assert_taken_table(table, num_rows):
    assert table.dtype == torch.int32
    assert table.stride(-1) == 1
    assert table.dim() == 2
    assert len(table) == num_rows > 0


class FakeFlash(types.ModuleType):
    """Stands in for the package: checks what it is called with, and computes what its documentation says."""

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.calls: list[tuple[str, int]] = []  # kind, rows
        self.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        assert causal
        assert_taken(q, k, v)
        for starts in (cu_seqlens_q, cu_seqlens_k):
            assert_taken_index(starts, len(cu_seqlens_q))
        assert (dropout_p, softcap, return_attn_probs) == (0.0, 0.0, False)
        query_lens, key_lens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert sum(query_lens) == len(q)
        assert (max_seqlen_q, max_seqlen_k) == (max(query_lens), max(key_lens))
        self.calls.append(("varlen" if block_table is None else "paged varlen", len(query_lens)))
        if block_table is None:
            assert sum(key_lens) == len(k) == len(v)
        else:
            assert k.shape[1] % 256 == 0
            assert_taken_table(block_table, len(query_lens))
        output = torch.empty_like(q)
        for row, (num_queries, num_keys) in enumerate(zip(query_lens, key_lens, strict=True)):
            first, first_key = int(cu_seqlens_q[row]), int(cu_seqlens_k[row])
            span = slice(first_key, first_key + num_keys)
            keys, values = (
                x[span] if block_table is None else x[block_table[row].long()].flatten(0, 1)[:num_keys] for x in (k, v)
            )
            own = slice(first, first + num_queries)
            output[own] = plain_attention(q[own], keys, values, softmax_scale, window_size, alibi_slopes)
        return output

    def flash_attn_with_kvcache(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        assert causal
        assert q.shape[1] == 1
        assert k_cache.shape[1] % 256 == 0
        assert_taken(q, k_cache, v_cache)
        assert_taken_index(cache_seqlens, len(q))
        assert_taken_table(block_table, len(q))
        assert [k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad] == [None] * 6
        assert (softcap, num_splits, return_softmax_lse) == (0.0, 0, False)
        self.calls.append(("decode", len(q)))
        output = torch.empty_like(q)
        for row, (num_keys, table) in enumerate(zip(cache_seqlens.tolist(), block_table.long(), strict=True)):
            keys, values = (x[table].flatten(0, 1)[:num_keys] for x in (k_cache, v_cache))
            output[row] = plain_attention(q[row], keys, values, softmax_scale, window_size, alibi_slopes)
        return output
