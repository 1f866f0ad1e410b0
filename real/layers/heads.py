"""What a layer does to queries and keys before attention: RMSNorm of each head, where a model has it, and rotation."""

from __future__ import annotations

from torch import Tensor

from real.attention.interface import KVSlots
from real.layers.norm import RMSNorm
from real.layers.rotary import rotate

Norms = tuple[RMSNorm, RMSNorm]  # of queries, of keys
Rotation = tuple[Tensor, Tensor]  # cos and sin, [num_tokens, 1, head_dim / 2]


def turned_heads(query: Tensor, key: Tensor, norms: Norms | None, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Query and key, [num_tokens, heads, head_dim], normalised and turned."""
    if norms is not None:
        query, key = norms[0](query), norms[1](key)
    return rotate(query, *rotation), rotate(key, *rotation)


def turn_and_store_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    norms: Norms | None,
    rotation: Rotation,
    kv_cache: Tensor,
    slots: KVSlots,
) -> None:
    """The same in place, and key and value stored: one launch, where our kernels can run. See turn_and_store."""
    from real.kernels.heads import HeadNorm, turn_and_store

    norm = None if norms is None else HeadNorm(norms[0].weight, norms[1].weight, norms[0].eps)
    turn_and_store(query, key, value, norm, rotation, kv_cache, *slots)
