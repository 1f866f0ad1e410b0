"""The provider for CPUs: a C kernel computes decodes and reads KV blocks in place; prefills run as in the reference.

The reference gathers the blocks first, which takes longer than the attention itself. The kernel is compiled on first
use (real/kernels/host.py). If it cannot be compiled, `why_not` gives the reason, and `auto` takes the reference.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from real.attention.interface import AttentionMetadata, AttentionSpec, StepAttention
from real.attention.torch_provider import Decodes, TorchAttention
from real.kernels.host import library, why_no_library
from real.kernels.host_layers import turn_and_store

LANES = 16  # as in the kernel
_ENTRIES = {torch.float32: "decode_float32", torch.bfloat16: "decode_bfloat16"}


class _Decode(ctypes.Structure):
    """The struct of the same name in real/kernels/paged_decode.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "output")),
        *((name, ctypes.c_void_p) for name in ("tokens", "tables", "lengths", "slopes")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "dim", "block_size", "table_stride")),
        ("window", ctypes.c_int64), ("scale", ctypes.c_float),
    )  # fmt: skip


def why_not(spec: AttentionSpec) -> str | None:
    if spec.device.type != "cpu":
        return f"it is for CPUs, the device is {spec.device.type}"
    if spec.dtype not in _ENTRIES:
        return f"dtype is {str(spec.dtype).removeprefix('torch.')}, it computes float32 and bfloat16"
    if spec.cache_dtype != spec.dtype:
        return f"it reads no {spec.kv_dtype} cache"
    if spec.head_dim % LANES:
        return f"head size {spec.head_dim} is no multiple of {LANES}"
    return why_no_library()


class CpuAttention(TorchAttention):
    """The reference, except for decodes and for the work between a layer's projections and attention."""

    name = "cpu"

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        step = super().prepare(metadata)
        return step._replace(turn_and_store=partial(turn_and_store, slot_mapping=metadata.slot_mapping))

    def _decodes(self, metadata: AttentionMetadata, decodes: list[int], first_tokens: list[int]) -> Decodes:
        if not decodes:
            return super()._decodes(metadata, decodes, first_tokens)
        spec, slopes = self.spec, self._slopes
        tables, lengths = metadata.block_tables, metadata.context_lens_tensor
        if len(decodes) != metadata.num_rows:
            rows = torch.from_numpy(np.array(decodes, np.int64))
            tables, lengths = tables[rows], lengths[rows]
        tokens = torch.from_numpy(np.array([first_tokens[row] for row in decodes], np.int64))
        assert tables.dtype == lengths.dtype == torch.int32
        told = _Decode(
            tokens=tokens.data_ptr(), tables=tables.data_ptr(), lengths=lengths.data_ptr(),
            slopes=None if slopes is None else slopes.data_ptr(), rows=len(decodes), heads=spec.num_heads,
            kv_heads=spec.num_kv_heads, dim=spec.head_dim, block_size=spec.block_size, table_stride=tables.stride(0),
            window=spec.sliding_window or 0, scale=spec.scale,
        )  # fmt: skip
        kernel = getattr(library(), _ENTRIES[spec.dtype])
        return partial(_attend, kernel, told, (tables, lengths, tokens, slopes))


def _attend(
    kernel: Any, told: _Decode, held: tuple[Tensor | None, ...], query: Tensor, kv_cache: Tensor, output: Tensor
) -> None:
    """held: the tensors whose addresses `told` contains; they must stay alive until the kernel has run."""
    keys, values = kv_cache
    assert keys.is_contiguous()
    assert output.is_contiguous()
    query = query.contiguous()
    told.query, told.output, told.keys, told.values = (x.data_ptr() for x in (query, output, keys, values))
    kernel(ctypes.byref(told), torch.get_num_threads())
