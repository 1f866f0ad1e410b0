"""The interface between a model's layers and the providers of attention over paged KV blocks.

The provider gets a step's metadata once (`prepare`). Every layer then calls the result with its own projections and KV
memory. The call stores the new keys and values first. Then every token attends to the positions of its own sequence up
to itself: all of them, or the last `sliding_window`, itself included.

KV memory of a layer: [2 (key, value), num_blocks, block_size, num_kv_heads, head_dim].

**FP8.** An FP8 cache holds key / k_scale and value / v_scale, clamped to the format's range and rounded to nearest
even. Every token attends to the stored values, those of its own step included. So results do not depend on how a prompt
is cut into chunks.

**CUDA graphs.** A step is captured once and replayed with other lengths. The metadata of such a step has `are_bounds`:
its tuples are upper bounds for each row. The bound of new tokens is one in a step of decodes, and the tokens of the
whole step otherwise. A provider with `supports_graphs` promises for such a step: `prepare` and the call do not wait,
copy nothing from the host, and choose shapes, launches and memory only from the tuples and the tensors' shapes. The
actual lengths are read on the device. So the call can be replayed after all tensors of the metadata and the projections
have been overwritten, as long as no row exceeds its bounds.

*Padding.* Rows that pad a batch of decodes have context length 0 (or read some existing block) and slot -1 (or a slot
that is never read). Their output is finite if the values that they read are. Rows that pad another step have no query
tokens and no context. The tokens that pad it come after those of all rows and have such slots too; their output is
undefined. For a slot below 0 nothing is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from real.layers.norm import rms_norm
from real.layers.rotary import rotate

FP8_FORMATS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def cache_format(kv_dtype: str | None, dtype: torch.dtype) -> torch.dtype:
    """Returns the format of the KV memory; for auto or None, that of the model."""
    return dtype if kv_dtype in (None, "auto") else FP8_FORMATS[kv_dtype]


class AttentionSpec(NamedTuple):
    """What does not change from step to step: heads, scale of the scores, block size, device, number formats.

    sliding_window: the token at position p attends to p - sliding_window + 1 … p; None: to 0 … p. kv_dtype: the format
    of the KV memory, a key of FP8_FORMATS, or auto: that of the model. k_scale, v_scale: scales of an FP8 cache, see
    above. alibi_slopes: one per head (Press et al. 2022): slope * (position of the key - position of the query) is
    added to a score.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    block_size: int
    device: torch.device
    dtype: torch.dtype
    sliding_window: int | None = None
    kv_dtype: str = "auto"
    k_scale: float = 1.0
    v_scale: float = 1.0
    alibi_slopes: tuple[float, ...] | None = None

    @property
    def cache_dtype(self) -> torch.dtype:
        """The format of the KV memory."""
        return cache_format(self.kv_dtype, self.dtype)

    def slopes_on_device(self) -> Tensor | None:
        """Returns the ALiBi slopes, float32 [num_heads]; None without ALiBi."""
        slopes = self.alibi_slopes
        return None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=self.device)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One flat batch: row i is a sequence with query_lens[i] new tokens, the last of its context_lens[i] positions.

    The tensors are on the device. The tuples are the same lengths on the host, so that no provider waits for a copy.
    All entries of `block_tables` are existing blocks. Entries after a row's last block have no meaning. Nor do entries
    wholly before the window of the row's first new token: such a block may belong to another sequence by now.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    query_starts: Tensor  # int32 [num_rows + 1], cumulative query_lens
    context_starts: Tensor  # int32 [num_rows + 1], cumulative context_lens
    context_lens_tensor: Tensor  # int32 [num_rows]
    slot_mapping: Tensor  # int64 [num_tokens], slot of each token's key and value: block * block_size + offset
    block_tables: Tensor  # int32 [num_rows, max blocks of a row]
    are_bounds: bool = False  # whether the tuples are upper bounds instead of the actual lengths

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.slot_mapping)


def metadata_of(rows: Sequence[tuple[int, int]], slot_mapping: Tensor, block_tables: Tensor) -> AttentionMetadata:
    """Returns the metadata of a step that serves no request. rows: (new tokens, context) each; the tensors of slots and
    tables are on the device."""
    query_lens, context_lens = zip(*rows, strict=True)
    query_starts, context_starts, lengths = (
        torch.tensor(numbers, dtype=torch.int32, device=block_tables.device)
        for numbers in ([0, *accumulate(query_lens)], [0, *accumulate(context_lens)], context_lens)
    )
    return AttentionMetadata(
        query_lens, context_lens, query_starts, context_starts, lengths, slot_mapping, block_tables
    )


class HeadNorm(NamedTuple):
    """RMSNorm of each query and key head: weights [head_dim], and epsilon."""

    query_weight: Tensor
    key_weight: Tensor
    eps: float


# (query, key, value, norm, (cos, sin), KV memory): normalises and rotates heads in place, stores keys and values
TurnAndStore = Callable[[Tensor, Tensor, Tensor, HeadNorm | None, tuple[Tensor, Tensor], Tensor], None]


# (query, key, value, KV memory) -> output, once key and value are stored
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class StepAttention(NamedTuple):
    """Attention of one step, called once by every layer.

    query [num_tokens, num_heads, head_dim]; key, value [num_tokens, num_kv_heads, head_dim];
    kv_cache [2, num_blocks, block_size, num_kv_heads, head_dim].
    """

    attend: Attend
    store: Callable[[Tensor, Tensor, Tensor], None]  # (key, value, KV memory): by slot
    turn_and_store: TurnAndStore | None = None  # fuses the work between a layer's projections and `attend`

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        rotation: tuple[Tensor, Tensor] | None = None,
        norm: HeadNorm | None = None,
    ) -> Tensor:
        """Normalises the heads of queries and keys, rotates them by (cos, sin), stores keys and values, and attends.
        The result has the shape of query and is valid until the next call."""
        if rotation is not None and self.turn_and_store is not None:
            self.turn_and_store(query, key, value, norm, rotation, kv_cache)
            return self.attend(query, key, value, kv_cache)
        if norm is not None:
            query, key = rms_norm(query, norm.query_weight, norm.eps), rms_norm(key, norm.key_weight, norm.eps)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        self.store(key, value, kv_cache)
        return self.attend(query, key, value, kv_cache)


class AttentionProvider(Protocol):
    """One implementation of attention."""

    @property
    def name(self) -> str: ...

    @property
    def supports_graphs(self) -> bool:
        """Whether a step can be captured; the module's docstring states what that promises."""
        ...

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        """Prepares once per step what every layer needs: index tensors, tiling, workspaces."""
        ...


def quantize(x: Tensor, scale: float, fp8: torch.dtype) -> Tensor:
    """Returns x / scale, clamped to the range of the format."""
    limit = torch.finfo(fp8).max
    return (x.float() * (1.0 / scale)).clamp(-limit, limit).to(fp8)


def dequantize(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Returns values read from an FP8 cache in the model's format; values of another cache stay as they are."""
    return x if x.dtype == dtype else (x.float() * scale).to(dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """Views FP8 as bytes, which torch can gather and scatter."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def store_kv(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    """Writes each token's key and value, [num_tokens, num_kv_heads, head_dim], into its slot, which is at least 0."""
    if kv_cache.dtype != key.dtype:
        key, value = quantize(key, k_scale, kv_cache.dtype), quantize(value, v_scale, kv_cache.dtype)
    keys, values = as_bytes(kv_cache).flatten(1, 2).unbind(0)  # [num_blocks * block_size, num_kv_heads, head_dim]
    keys.index_copy_(0, slot_mapping, as_bytes(key))
    values.index_copy_(0, slot_mapping, as_bytes(value))


def as_stored(
    key: Tensor, value: Tensor, cache_dtype: torch.dtype, k_scale: float, v_scale: float
) -> tuple[Tensor, Tensor]:
    """Returns key and value as they would be read back from the cache."""
    if cache_dtype == key.dtype:
        return key, value
    return (
        dequantize(quantize(key, k_scale, cache_dtype), k_scale, key.dtype),
        dequantize(quantize(value, v_scale, cache_dtype), v_scale, value.dtype),
    )
