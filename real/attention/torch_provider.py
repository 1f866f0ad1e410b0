"""The reference provider: plain torch, any device, any block size.

Rows with one new token (decodes) are computed together: their blocks are gathered into one padded batch. Decodes are
grouped by the power of two above their length in blocks, so that padding at most doubles the work. Rows with several
new tokens (prefills, chunks) are computed one by one, in tiles of queries that bound the size of the mask. With a
sliding window, only blocks to which some query of a row (or tile) attends are gathered; their other positions are
masked. With ALiBi, a mask holds the biases that are added to the scores of each head, and attention is computed in
float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from real.attention.interface import (
    AttentionMetadata,
    AttentionSpec,
    StepAttention,
    as_bytes,
    as_stored,
    dequantize,
    store_kv,
)
from real.staging import send_array

MAX_GATHERED_TOKENS = 2**16  # padded positions that one decode group gathers; a longer row is a group of its own
MAX_MASK_ELEMENTS = 2**24  # queries x keys of one prefill tile, times heads with ALiBi
MAX_MASKED_QUERIES = 256  # of a tile that needs a mask: scores that the mask hides are computed for nothing


class DecodeGroup(NamedTuple):
    """Decode rows of similar length."""

    tokens: Tensor | None  # int64 [n], indices of their queries in the flat batch; None: they are the whole batch
    blocks: Tensor  # int32 [n * max blocks of the group], the blocks that they attend to, row after row
    mask: Tensor  # bool [n, 1, 1, max blocks * block_size]: positions that exist and are in the window; with ALiBi the
    # biases, float32 [n, num_kv_heads, query heads of a KV head, max blocks * block_size]


Decodes = Callable[[Tensor, Tensor, Tensor], None]  # (query, KV memory, output): fills the output of all decodes


class PrefillTile(NamedTuple):
    """Consecutive queries of one row: tokens first … last - 1 of the flat batch, the last of `num_keys` positions."""

    first: int
    last: int
    num_keys: int
    block_table: Tensor | None  # [blocks that hold num_keys]; None: the keys are of the step's tokens … last - 1
    window: int | None  # None: it excludes no position


class TorchAttention:
    """Gathers keys and values by block table and calls scaled_dot_product_attention."""

    name = "torch"
    supports_graphs = False  # shapes depend on how many blocks the rows have

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        slopes = spec.slopes_on_device()  # reshaped below to [num_kv_heads, query heads of a KV head, 1]
        self._slopes = None if slopes is None else slopes.view(spec.num_kv_heads, -1, 1)

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        first_tokens = [0, *accumulate(metadata.query_lens)]
        decodes = [row for row, num_queries in enumerate(metadata.query_lens) if num_queries == 1]
        tiles: list[PrefillTile] = []
        for row, num_queries in enumerate(metadata.query_lens):
            if num_queries > 1:
                tiles += self._tiles(metadata, row, first_tokens[row])
        attend = partial(self._attend, self._decodes(metadata, decodes, first_tokens), tiles)
        spec, slots = self.spec, metadata.slot_mapping
        return StepAttention(attend, partial(store_kv, slot_mapping=slots, k_scale=spec.k_scale, v_scale=spec.v_scale))

    def _attend(
        self, decodes: Decodes, tiles: list[PrefillTile], query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor
    ) -> Tensor:
        if tiles:
            key, value = as_stored(key, value, kv_cache.dtype, self.spec.k_scale, self.spec.v_scale)
        output = torch.empty_like(query)
        decodes(query, kv_cache, output)
        for tile in tiles:
            output[tile.first : tile.last] = self._prefill(tile, query, key, value, kv_cache)
        return output

    def _decodes(self, metadata: AttentionMetadata, decodes: list[int], first_tokens: list[int]) -> Decodes:
        groups = [self._decode_group(metadata, rows, first_tokens) for rows in self._group(decodes, metadata)]
        return partial(self._attend_groups, groups)

    def _group(self, rows: list[int], metadata: AttentionMetadata) -> list[list[int]]:
        """Splits decode rows by length class, and each class so that no group gathers more than MAX_GATHERED_TOKENS."""
        by_class: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            by_class[(self._num_attended_blocks(metadata.context_lens[row]) - 1).bit_length()].append(row)
        groups = []
        for size_class, members in sorted(by_class.items()):
            limit = max(1, MAX_GATHERED_TOKENS // (self.spec.block_size << size_class))
            groups += [members[i : i + limit] for i in range(0, len(members), limit)]
        return groups

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.spec.block_size)

    def _first_attended(self, position: int) -> int:
        """Returns the first position that the token at `position` attends to."""
        window = self.spec.sliding_window
        return 0 if window is None else max(0, position + 1 - window)

    def _num_attended_blocks(self, context_len: int) -> int:
        """Returns the number of blocks that the last of `context_len` tokens attends to."""
        return self._num_blocks(context_len) - self._first_attended(context_len - 1) // self.spec.block_size

    def _decode_group(self, metadata: AttentionMetadata, rows: list[int], first_tokens: list[int]) -> DecodeGroup:
        device, window = metadata.block_tables.device, self.spec.sliding_window
        tables, lengths = metadata.block_tables, metadata.context_lens_tensor
        tokens: Tensor | None = None
        if len(rows) != metadata.num_rows:
            index = send_array(np.array(rows), device)
            tables, lengths = tables[index], lengths[index]
            tokens = send_array(np.array([first_tokens[row] for row in rows]), device)
        num_blocks = max(self._num_attended_blocks(metadata.context_lens[row]) for row in rows)
        positions = torch.arange(num_blocks * self.spec.block_size, device=device)
        if window is None or window >= max(metadata.context_lens[row] for row in rows):
            tables = tables[:, :num_blocks]
            mask = positions < lengths[:, None]  # [n, max positions]
        else:
            first_blocks = (lengths - window).clamp(min=0) // self.spec.block_size  # [n]
            columns = first_blocks[:, None] + torch.arange(num_blocks, device=device)
            tables = tables.gather(1, columns.clamp(max=tables.shape[1] - 1))  # beyond a row's end they are masked
            positions = positions + first_blocks[:, None] * self.spec.block_size
            mask = (positions < lengths[:, None]) & (positions >= lengths[:, None] - window)
        mask = mask[:, None, None, :]
        if self._slopes is not None:
            distances = (positions - lengths[:, None] + 1)[:, None, None, :]  # [n, 1, 1, max positions]
            mask = (self._slopes * distances).masked_fill(~mask, float("-inf"))
        return DecodeGroup(tokens, tables.flatten(), mask)

    def _tiles(self, metadata: AttentionMetadata, row: int, row_first: int) -> list[PrefillTile]:
        num_queries, context = metadata.query_lens[row], metadata.context_lens[row]
        num_cached, block_size, window = context - num_queries, self.spec.block_size, self.spec.sliding_window
        if window is not None and window >= context:
            window = None
        most_keys = context if window is None else min(context, window + MAX_MASKED_QUERIES + block_size)
        num_masks = 1 if self._slopes is None else self.spec.num_heads
        tile = max(1, min(num_queries, MAX_MASK_ELEMENTS // (most_keys * num_masks)))
        if num_cached or window is not None or self._slopes is not None:
            tile = min(tile, MAX_MASKED_QUERIES)
        tiles = []
        for begin in range(0, num_queries, tile):
            end = min(begin + tile, num_queries)
            last_key = num_cached + end
            first_key = self._first_attended(num_cached + begin)
            table: Tensor | None = None
            if first_key < num_cached:
                first_block = first_key // block_size
                table = metadata.block_tables[row, first_block : self._num_blocks(last_key)]
                first_key = first_block * block_size
            tiles.append(PrefillTile(row_first + begin, row_first + end, last_key - first_key, table, window))
        return tiles

    def _attend_groups(self, groups: list[DecodeGroup], query: Tensor, kv_cache: Tensor, output: Tensor) -> None:
        for group in groups:
            if group.tokens is None:
                output.copy_(self._decode(group, query, kv_cache))
            else:
                output.index_copy_(0, group.tokens, self._decode(group, query.index_select(0, group.tokens), kv_cache))

    def _decode(self, group: DecodeGroup, query: Tensor, kv_cache: Tensor) -> Tensor:
        """Query [n, num_heads, head_dim] -> the same shape. The query heads of a KV head are passed as its queries."""
        num_rows = query.shape[0]
        num_kv_heads, head_dim = self.spec.num_kv_heads, self.spec.head_dim
        queries = query.reshape(num_rows, num_kv_heads, -1, head_dim)
        shape = (num_rows, -1, num_kv_heads, head_dim)
        keys, values = (blocks.view(shape).transpose(1, 2) for blocks in self._gather(kv_cache, group.blocks))
        if self._slopes is not None:
            queries, keys, values = queries.float(), keys.float(), values.float()
        output = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=group.mask, scale=self.spec.scale
        )
        return output.to(query.dtype).reshape(num_rows, -1, head_dim)

    def _gather(self, kv_cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of some blocks, each [num_blocks, block_size, num_kv_heads, head_dim]."""
        raw, spec = as_bytes(kv_cache), self.spec
        keys, values = (raw[i].index_select(0, blocks).view(kv_cache.dtype) for i in range(2))
        return dequantize(keys, spec.k_scale, spec.dtype), dequantize(values, spec.v_scale, spec.dtype)

    def _prefill(self, tile: PrefillTile, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor) -> Tensor:
        """Returns the output of one tile, [last - first, num_heads, head_dim]."""
        if tile.block_table is None:
            first = tile.last - tile.num_keys
            keys, values = key[first : tile.last], value[first : tile.last]
        else:
            keys, values = (
                blocks.flatten(0, 1)[: tile.num_keys] for blocks in self._gather(kv_cache, tile.block_table)
            )
        num_kv_heads, head_dim = self.spec.num_kv_heads, self.spec.head_dim
        num_queries = tile.last - tile.first
        queries = query[tile.first : tile.last].reshape(num_queries, num_kv_heads, -1, head_dim)
        mask = self._mask(tile, query.device)
        if self._slopes is not None:
            queries, keys, values = queries.float(), keys.float(), values.float()
        shape = (num_kv_heads, queries.shape[2], tile.num_keys, head_dim)
        output = functional.scaled_dot_product_attention(
            queries.permute(1, 2, 0, 3),  # KV heads as the batch dimension: [num_kv_heads, group, queries, head_dim]
            keys.transpose(0, 1)[:, None].expand(shape),  # shared by the group, not copied
            values.transpose(0, 1)[:, None].expand(shape),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.spec.scale,
        )
        return output.to(query.dtype).permute(2, 0, 1, 3).reshape(num_queries, -1, head_dim)

    def _mask(self, tile: PrefillTile, device: torch.device) -> Tensor | None:
        """Returns the keys that each query of a tile attends to, bool [queries, keys]; None if square and causal.

        With ALiBi, the biases of the scores, float32 [num_kv_heads, query heads of a KV head, queries, keys]. The
        queries are the last positions of the keys.
        """
        num_queries = tile.last - tile.first
        if num_queries == tile.num_keys and tile.window is None and self._slopes is None:
            return None
        positions = torch.arange(tile.num_keys, device=device)
        own = positions[-num_queries:, None]
        mask = positions <= own
        if tile.window is not None:
            mask &= positions > own - tile.window
        if self._slopes is None:
            return mask
        return (self._slopes[..., None] * (positions - own)).masked_fill(~mask, float("-inf"))
