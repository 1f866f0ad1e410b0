"""Our Triton kernels (real/kernels) as a provider: any block size, head sizes up to 256, FP8 caches, ALiBi, windows.

Rows with one new token are computed by the decode kernel, others by the prefill kernel. Both read the cache, to which
the step's keys and values have been written. The kernels determine on the device which rows they compute.
"""

from __future__ import annotations

import os
from enum import IntEnum
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from real import kernels
from real.attention.interface import Attend, AttentionMetadata, AttentionSpec, StepAttention

if TYPE_CHECKING:
    from real.kernels.attend import Scoring, Tiling
    from real.kernels.parts import Parts

MAX_HEAD_DIM = 256
MAX_GROUP = 128  # query heads of a KV head: at most the rows of a prefill tile


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
    """Whether kernels run in Triton's interpreter; Triton decides it when they are imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def _why_not_interpreted(spec: AttentionSpec) -> str | None:
    if spec.device.type != "cpu":
        return f"TRITON_INTERPRET is set: kernels run on the CPU, the device is {spec.device.type}"
    if spec.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices wrongly; set backend.dtype=float32"
    return None


def only_by_name() -> str | None:
    """Why `auto` does not take this provider although it can run; None if it does."""
    return "it would run in Triton's interpreter, which is for tests" if is_interpreted() else None


class TritonAttention:
    """Paged attention by the Triton kernels in real/kernels."""

    name = "triton"
    supports_graphs = True

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.scoring = scoring_of(spec)

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        return stored_by_kernels(self.spec, metadata, TritonStep(self.spec, self.scoring, metadata))


def stored_by_kernels(spec: AttentionSpec, metadata: AttentionMetadata, attend: Attend) -> StepAttention:
    """Returns a step whose keys and values are stored by our kernels. attend: its attention."""
    from real.kernels.heads import turn_and_store
    from real.kernels.store import store_kv

    where: dict[str, Any] = {"slot_mapping": metadata.slot_mapping, "k_scale": spec.k_scale, "v_scale": spec.v_scale}
    return StepAttention(attend, partial(store_kv, **where), partial(turn_and_store, **where))


class TritonStep:
    """One step's attention, by our kernels only."""

    def __init__(self, spec: AttentionSpec, scoring: Scoring, metadata: AttentionMetadata) -> None:
        self._rows = PagedRows(spec, scoring, metadata)
        self._may_have_padding = metadata.are_bounds and max(metadata.query_lens) > 1
        self._output: Tensor | None = None  # reused by all layers, which run one after the other

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor) -> Tensor:
        if self._output is None:  # no kernel writes the output of padding tokens
            create = torch.zeros_like if self._may_have_padding else torch.empty_like
            self._output = create(query, memory_format=torch.contiguous_format)
        self._rows.attend(query, kv_cache, self._output)
        return self._output


class Prefills(NamedTuple):
    tiles: Tensor  # int32 [num_tiles, 2], on the device
    tiling: Tiling


class Takes(IntEnum):
    """Which rows of a step are computed by our kernels."""

    DECODES = 1
    CACHED = 2  # decodes, and rows of several tokens that follow cached positions
    EVERYTHING = 3


class PagedRows:
    """Rows of a step that our kernels compute; they read all keys and values from the cache. Other providers use it
    too."""

    def __init__(
        self, spec: AttentionSpec, scoring: Scoring, metadata: AttentionMetadata, takes: Takes = Takes.EVERYTHING
    ) -> None:
        self._metadata = metadata
        self._scoring = scoring
        lens = list(zip(metadata.query_lens, metadata.context_lens, strict=True))
        others = [
            num for num, context in lens if num > 1 and takes >= (Takes.EVERYTHING if num == context else Takes.CACHED)
        ]
        if metadata.are_bounds:  # any row can have a single new token
            decodes = [context for _, context in lens]
        else:
            decodes = [context for num, context in lens if num == 1]
        is_mixed = max(metadata.query_lens) > 1
        self._query_starts = metadata.query_starts if is_mixed else None
        self._parts: Parts | None = None
        self._prefills: Prefills | None = None
        self._has_decodes = bool(decodes)
        if decodes:
            from real.kernels.decode import num_programs
            from real.kernels.parts import plan_parts

            self._parts = plan_parts(
                metadata.context_lens_tensor, self._query_starts, spec.sliding_window,
                programs=num_programs(spec.num_heads // spec.num_kv_heads, spec.num_kv_heads),
                max_context=max(decodes), num_decodes=1 if is_mixed and metadata.are_bounds else len(decodes),
            )  # fmt: skip
        if others:
            self._prefills = _lay_out(spec, metadata, others, skips_fresh=takes < Takes.EVERYTHING)

    def attend(self, query: Tensor, kv_cache: Tensor, output: Tensor) -> None:
        """Writes the output of these rows' tokens."""
        from real.kernels.decode import paged_decode
        from real.kernels.prefill import paged_prefill

        metadata = self._metadata
        tables, lens = metadata.block_tables, metadata.context_lens_tensor
        if self._has_decodes:
            paged_decode(
                query, kv_cache, tables, lens, output, self._scoring,
                query_starts=self._query_starts, parts=self._parts,
            )  # fmt: skip
        if self._prefills is not None:
            paged_prefill(
                query, kv_cache, tables, lens, metadata.query_starts, *self._prefills, output, self._scoring
            )  # fmt: skip


def _lay_out(spec: AttentionSpec, metadata: AttentionMetadata, query_lens: list[int], *, skips_fresh: bool) -> Prefills:
    """Cuts rows into tiles for the prefill kernel. query_lens: new tokens of the rows that are cut."""
    from real.kernels.formats import capability
    from real.kernels.prefill import lay_out_tiles, most_tiles, tiling

    group = spec.num_heads // spec.num_kv_heads
    chosen = tiling(spec.head_dim, group, spec.dtype, max(query_lens), capability(spec.device))
    per_tile = chosen.block_m // group
    if metadata.are_bounds:
        num_tiles = most_tiles(metadata.num_tokens, metadata.num_rows, per_tile)
    else:
        num_tiles = sum(-(-num // per_tile) for num in query_lens)
    tiles = lay_out_tiles(
        metadata.query_starts, metadata.context_lens_tensor, num_tiles, per_tile, skips_fresh=skips_fresh
    )  # fmt: skip
    return Prefills(tiles, chosen)


def scoring_of(spec: AttentionSpec) -> Scoring:
    """Returns what the kernels need of a spec; copies the slopes to the device."""
    from real.kernels.attend import Scoring

    return Scoring(spec.scale, spec.sliding_window, spec.slopes_on_device(), spec.k_scale, spec.v_scale)
