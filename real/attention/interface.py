"""The seam between a model's layers and whatever computes attention over paged KV blocks.

A step's metadata is handed to the provider once (`prepare`); the result is then called by every layer with that layer's
projections and KV memory. It stores the new keys and values first, then lets every token attend to its own sequence's
positions up to itself: all of them, or the last `sliding_window`, itself included.

KV memory of a layer: [2 (key, value), num_blocks, block_size, num_kv_heads, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class AttentionSpec(NamedTuple):
    """What does not change from step to step: the heads, the scale of the scores, the paging, the placement.

    sliding_window: the token at position p attends to p - sliding_window + 1 … p; None: to 0 … p.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    block_size: int
    device: torch.device
    dtype: torch.dtype
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One flat batch: row i is a sequence with query_lens[i] new tokens, the last of its context_lens[i] positions.

    The tensors lie on the device, the tuples are the same facts for the host, so that no provider waits for a copy.
    Entries of `block_tables` are blocks that exist. Those behind a row's last block are 0 and mean nothing; so do those
    that lie wholly outside the window of the row's first new token: others may have such a block by now.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    query_starts: Tensor  # int32 [num_rows + 1], cumulative query_lens
    context_starts: Tensor  # int32 [num_rows + 1], cumulative context_lens
    context_lens_tensor: Tensor  # int32 [num_rows]
    slot_mapping: Tensor  # int64 [num_tokens], where each token's key and value go: block * block_size + offset
    block_tables: Tensor  # int32 [num_rows, max blocks of a row]

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)


class StepAttention(Protocol):
    """Attention of one step, called once by every layer."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor) -> Tensor:
        """Stores key and value by slot, attends.

        query [num_tokens, num_heads, head_dim]; key, value [num_tokens, num_kv_heads, head_dim];
        kv_cache [2, num_blocks, block_size, num_kv_heads, head_dim]; returns the shape of query.
        """
        ...


class AttentionProvider(Protocol):
    """One implementation of attention."""

    @property
    def name(self) -> str: ...

    @property
    def supports_graphs(self) -> bool:
        """Whether a step of decodes can be captured: launches depend on the batch size and on what the host tuples of
        the metadata say (the most that a row can have); what differs from replay to replay is read on the device."""
        ...

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        """Does once a step what every layer needs: index tensors, tiling, workspaces."""
        ...


def store_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes each token's key and value, [num_tokens, num_kv_heads, head_dim], into its slot."""
    keys, values = kv_cache.flatten(1, 2).unbind(0)  # [num_blocks * block_size, num_kv_heads, head_dim]
    keys.index_copy_(0, slot_mapping, key)
    values.index_copy_(0, slot_mapping, value)
