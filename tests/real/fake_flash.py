"""Stand-ins for flash-attn 2.8, for flash_attn_3 (its main branch of 2026) and for torch 2.13's varlen_attn: their
parameters, what they refuse, what their documentation says, in torch."""

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
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
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
        self, q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ):  # fmt: skip
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


class FakeVarlen(types.ModuleType):
    """Stands in for torch.nn.attention.varlen, over the FlashAttention-2 of torch."""

    def __init__(self) -> None:
        super().__init__("torch.nn.attention.varlen")
        self._flash = FakeFlash()
        self.calls = self._flash.calls
        self.__spec__ = importlib.machinery.ModuleSpec(self.__name__, None)

    def varlen_attn(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
        enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        assert return_aux is num_splits is None
        assert enable_gqa or query.shape[1] == key.shape[-2]
        assert (seqused_k is None) == (block_table is None)
        if seqused_k is not None:
            assert_taken_index(seqused_k, len(cu_seq_q) - 1)
            assert torch.equal(seqused_k, cu_seq_k.diff())
        assert window_size[1] == 0, "causal"
        return self._flash.flash_attn_varlen_func(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
            softmax_scale=scale, causal=True, window_size=window_size, block_table=block_table,
        )  # fmt: skip


class FakeFlash3(types.ModuleType):
    """Stands in for flash_attn_interface, of which one function is called."""

    def __init__(self) -> None:
        super().__init__("flash_attn_interface")
        self.calls: list[tuple[str, int]] = []
        self.longest: list[int] = []  # of each call, the most tokens that a row may have
        self.__spec__ = importlib.machinery.ModuleSpec(self.__name__, None)

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        """Rows may have no tokens, and the batch tokens of no row: these it does not write."""
        assert causal
        assert [k, v, qv, rotary_cos, cache_batch_idx, cache_leftpad, q_descale, k_descale, pack_gqa] == [None] * 9
        assert (attention_chunk, softcap, num_splits, return_softmax_lse) == (0, 0.0, 0, False)
        assert_taken(q, k_cache, v_cache)
        num_rows = len(cache_seqlens)
        assert_taken_index(cache_seqlens, num_rows)
        assert_taken_index(cu_seqlens_q, num_rows + 1)
        assert_taken_table(page_table, num_rows)
        assert int(cu_seqlens_q[-1]) <= len(q)
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q <= len(q)
        self.calls.append(("step", num_rows))
        self.longest.append(max_seqlen_q)
        output = torch.full_like(q, 7.0)
        for row, (num_keys, table) in enumerate(zip(cache_seqlens.tolist(), page_table.long(), strict=True)):
            own = slice(int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]))
            if own.start < own.stop:
                num_pages = -(-num_keys // k_cache.shape[1])
                keys, values = (x[table[:num_pages]].flatten(0, 1)[:num_keys] for x in (k_cache, v_cache))
                output[own] = plain_attention(q[own], keys, values, softmax_scale, window_size, None)
        return output
