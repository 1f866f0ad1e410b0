"""Our Triton kernels (real/kernels) as a provider: any block size, head sizes up to 256, FP8 caches, ALiBi, windows.

Rows with one new token go to the decode kernel, the others to the prefill kernel; both read the cache, to which the
step's keys and values have been written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from real import kernels
from real.attention.interface import AttentionMetadata, AttentionSpec, KVSlots, StepAttention
from real.staging import send_array

if TYPE_CHECKING:
    from real.kernels.attend import Scoring, Tiling
    from real.kernels.parts import Parts

MAX_HEAD_DIM = 256
MAX_GROUP = 128  # query heads of a KV head: the rows of a prefill tile


def why_not(spec: AttentionSpec) -> str | None:
    """Why this provider cannot run here; None if it can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if spec.head_dim > MAX_HEAD_DIM:
        return f"its kernels take head sizes up to {MAX_HEAD_DIM}, the model's is {spec.head_dim}"
    if (group := spec.num_heads // spec.num_kv_heads) > MAX_GROUP:
        return f"its kernels take up to {MAX_GROUP} query heads a KV head, the model has {group}"
    if is_interpreted():
        return _why_not_interpreted(spec)
    return kernels.why_not(spec.device)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter; decided when they are imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def _why_not_interpreted(spec: AttentionSpec) -> str | None:
    if spec.device.type != "cpu":
        return f"TRITON_INTERPRET is set: kernels run on the CPU, the device is {spec.device.type}"
    if spec.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices wrongly; set backend.dtype=float32"
    return None


def only_by_name(spec: AttentionSpec) -> str | None:
    """Why `auto` does not take it although it can run."""
    return "it would run in Triton's interpreter, which is for tests" if is_interpreted() else None


class TritonAttention:
    """Paged attention by the kernels in real/kernels."""

    name = "triton"
    supports_graphs = True

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.scoring = scoring_of(spec)

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        rows = range(metadata.num_rows)
        decodes = [row for row in rows if metadata.query_lens[row] == 1]
        others = [row for row in rows if metadata.query_lens[row] > 1]
        return TritonStep(PagedRows(self.spec, self.scoring, metadata, decodes, others))


class TritonStep:
    """One step's attention; see StepAttention for the shapes."""

    def __init__(self, rows: PagedRows) -> None:
        self._rows = rows
        self.slots = rows.slots

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, *, is_stored: bool = False
    ) -> Tensor:
        if not is_stored:
            self._rows.store(key, value, kv_cache)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        self._rows.attend(query, kv_cache, output)
        return output


class Prefills(NamedTuple):
    tiles: Tensor  # int32 [num_tiles, 2], on the device
    tiling: Tiling


class PagedRows:
    """Some rows of a step, of which the kernels read everything from the cache. Also part of other providers' steps."""

    def __init__(
        self,
        spec: AttentionSpec,
        scoring: Scoring,
        metadata: AttentionMetadata,
        decodes: Sequence[int],
        others: Sequence[int],
    ) -> None:
        """decodes: rows of one query token; others: rows of more."""
        self._metadata = metadata
        self._scoring = scoring
        self.slots = KVSlots(metadata.slot_mapping, scoring.k_scale, scoring.v_scale)
        self._num_decodes = len(decodes)
        self._decodes: Tensor | None = None  # int32; None: all rows
        self._parts: Parts | None = None
        self._prefills: Prefills | None = None
        if decodes and len(decodes) != metadata.num_rows:
            self._decodes = send_array(np.array(decodes, dtype=np.int32), spec.device)
        if decodes:
            self._parts = _cut(spec, metadata, self._decodes, max(metadata.context_lens[row] for row in decodes))
        if others:
            self._prefills = _lay_out(spec, metadata, others)

    def store(self, key: Tensor, value: Tensor, kv_cache: Tensor) -> None:
        """Of the whole step."""
        from real.kernels.store import store_kv

        store_kv(key, value, kv_cache, *self.slots)

    def attend(self, query: Tensor, kv_cache: Tensor, output: Tensor) -> None:
        """Fills these rows' tokens of output."""
        from real.kernels.decode import paged_decode
        from real.kernels.prefill import paged_prefill

        metadata = self._metadata
        tables, lens = metadata.block_tables, metadata.context_lens_tensor
        if self._num_decodes:
            paged_decode(
                query, kv_cache, tables, lens, output, self._scoring, rows=self._decodes, parts=self._parts,
                query_starts=None if self._decodes is None else metadata.query_starts,
            )  # fmt: skip
        if self._prefills is not None:
            paged_prefill(
                query, kv_cache, tables, lens, metadata.query_starts, *self._prefills, output, self._scoring
            )  # fmt: skip


def _cut(spec: AttentionSpec, metadata: AttentionMetadata, rows: Tensor | None, max_context: int) -> Parts | None:
    from real.kernels.decode import num_programs
    from real.kernels.parts import plan_parts

    programs = num_programs(spec.num_heads // spec.num_kv_heads, spec.num_kv_heads)
    lens = metadata.context_lens_tensor
    return plan_parts(lens, rows, spec.sliding_window, programs=programs, max_context=max_context)


def _lay_out(spec: AttentionSpec, metadata: AttentionMetadata, rows: Sequence[int]) -> Prefills:
    from real.kernels.formats import capability
    from real.kernels.prefill import layout_tiles, tiling

    group = spec.num_heads // spec.num_kv_heads
    longest = max(metadata.query_lens[row] for row in rows)
    chosen = tiling(spec.head_dim, group, spec.dtype, longest, capability(spec.device))
    tiles = layout_tiles(rows, metadata.query_lens, metadata.context_lens, chosen.block_m // group)
    return Prefills(send_array(tiles, spec.device), chosen)


def scoring_of(spec: AttentionSpec) -> Scoring:
    """What the kernels need to know of a spec; puts the slopes onto the device."""
    from real.kernels.attend import Scoring

    slopes = spec.alibi_slopes
    on_device = None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=spec.device)
    return Scoring(spec.scale, spec.sliding_window, on_device, spec.k_scale, spec.v_scale)
