"""FlashAttention-2 over paged KV (Dao 2023), through the flash-attn package.

Its paged calls want a block size that is a multiple of 256 and a cache in half precision. Where these are given,
decodes go through flash_attn_with_kvcache and rows that follow cached positions through flash_attn_varlen_func with a
block table; elsewhere our Triton kernels take both. Rows without cached positions (most prompts) attend to the step's
own keys and values by a plain varlen call, at any block size.

A sliding window is its `window_size`, (tokens to the left, to the right) of a query, itself not counted.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from real.attention import triton_provider
from real.attention.interface import (
    AttentionMetadata,
    AttentionSpec,
    KVSlots,
    StepAttention,
    as_stored,
    store_kv,
)
from real.attention.triton_provider import PagedRows, scoring_of
from real.staging import send_array

PAGE = 256  # tokens
MIN_CAPABILITY = (8, 0)
ALL = slice(None)


def why_not(spec: AttentionSpec) -> str | None:
    """Why this provider cannot run here; None if it can."""
    if spec.device.type != "cuda":
        return f"it needs CUDA, the device is {spec.device.type}"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"it needs float16 or bfloat16, the dtype is {str(spec.dtype).removeprefix('torch.')}"
    if spec.head_dim > 256 or spec.head_dim % 8:
        return f"it needs a head size of at most 256 and a multiple of 8, the model's is {spec.head_dim}"
    if (found := torch.cuda.get_device_capability(spec.device)) < MIN_CAPABILITY:
        return f"it needs compute capability 8.0 or later, the GPU's is {found[0]}.{found[1]}"
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    try:
        package = importlib.import_module("flash_attn")
    except Exception as error:  # noqa: BLE001  (a binary for another torch or CUDA: whatever it raises is told)
        told = " ".join(str(error).split())
        return (
            f"the installed flash-attn cannot be imported ({type(error).__name__}: {told}); install it for this torch"
        )
    if not takes_pages(spec) and (reason := triton_provider.why_not(spec)) is not None:
        return f"the Triton kernels would take its paged calls ({_why_no_pages(spec)}), and: {reason}"
    return _why_too_old(package, spec)


def _why_too_old(package: ModuleType, spec: AttentionSpec) -> str | None:
    """Which of the arguments that the steps of such a spec hand over a function of the package does not take."""
    functions = ["flash_attn_varlen_func"]
    asked = []
    if takes_pages(spec):
        functions.append("flash_attn_with_kvcache")
        asked.append(("block_table", "2.5", f"cache.block_size is {spec.block_size}"))
    if spec.sliding_window is not None:
        asked.append(("window_size", "2.3", f"cache.sliding_window is {spec.sliding_window}"))
    if spec.alibi_slopes is not None:
        asked.append(("alibi_slopes", "2.4", "the model has ALiBi slopes"))
    for name in functions:
        function = getattr(package, name, None)
        if function is None:
            return f"the installed flash-attn has no {name}; install 2.8"
        known = inspect.signature(function).parameters
        for option, since, why in asked:
            if option not in known:
                return f"the installed flash-attn's {name} takes no {option} (it came with {since}), and {why}"
    return None


def takes_pages(spec: AttentionSpec) -> bool:
    """Whether flash-attn itself reads such a cache."""
    return spec.block_size % PAGE == 0 and spec.kv_dtype == "auto"


def _why_no_pages(spec: AttentionSpec) -> str:
    if spec.kv_dtype != "auto":
        return f"it reads no {spec.kv_dtype} cache"
    return f"cache.block_size is {spec.block_size}, no multiple of {PAGE}"


class FlashAttention:
    """flash-attn's calls where they can be made, our Triton kernels for the rest."""

    name = "flash_attn"

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.has_triton = triton_provider.why_not(spec) is None
        self.scoring = scoring_of(spec) if self.has_triton else None
        self.slopes: Tensor | None = None
        if spec.alibi_slopes is not None:
            self.slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=spec.device)

    @property
    def supports_graphs(self) -> bool:
        """Slots below 0 are left out by our own kernel alone."""
        return self.has_triton

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        return FlashStep(self, metadata)


class Part(NamedTuple):
    """Rows of a step that are computed in one call."""

    tokens: slice | Tensor  # where their tokens lie in the flat batch; ALL: they are the batch
    query_starts: Tensor  # int32 [rows + 1], cumulative
    context_starts: Tensor  # int32 [rows + 1], cumulative
    max_query_len: int
    max_context_len: int
    context_lens: Tensor  # int32 [rows]
    block_tables: Tensor  # int32 [rows, max blocks]


class FlashStep:
    """One step's attention; see StepAttention for the shapes."""

    def __init__(self, provider: FlashAttention, metadata: AttentionMetadata) -> None:
        spec = self._spec = provider.spec
        self._metadata = metadata
        self._options: dict[str, Any] = {"softmax_scale": spec.scale, "causal": True}  # aligned to the end
        if spec.sliding_window is not None and spec.sliding_window < max(metadata.context_lens):
            self._options["window_size"] = (spec.sliding_window - 1, 0)
        if provider.slopes is not None:
            self._options["alibi_slopes"] = provider.slopes
        lens = list(zip(metadata.query_lens, metadata.context_lens, strict=True))
        decodes = [row for row, (num, _) in enumerate(lens) if num == 1]
        fresh = [row for row, (num, context) in enumerate(lens) if num > 1 and num == context]
        cached = [row for row, (num, context) in enumerate(lens) if 1 < num < context]
        self._fresh = _part(metadata, fresh)
        self._decodes = self._cached = None
        self._paged: PagedRows | None = None  # by our kernels
        if provider.scoring is not None:
            rest = ([], []) if takes_pages(spec) else (decodes, cached)
            self._paged = PagedRows(spec, provider.scoring, metadata, *rest)
        if takes_pages(spec):
            self._decodes, self._cached = _part(metadata, decodes), _part(metadata, cached)

    @property
    def slots(self) -> KVSlots | None:
        return None if self._paged is None else self._paged.slots

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, *, is_stored: bool = False
    ) -> Tensor:
        if self._paged is None:
            store_kv(key, value, kv_cache, self._metadata.slot_mapping)
        elif not is_stored:
            self._paged.store(key, value, kv_cache)
        if self._decodes is not None and self._decodes.tokens is ALL:  # nothing to put together
            return self._decode(self._decodes, query, kv_cache)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if self._paged is not None:
            self._paged.attend(query, kv_cache, output)
        if self._fresh is not None:
            key, value = as_stored(key, value, kv_cache.dtype, self._spec.k_scale, self._spec.v_scale)
            tokens = self._fresh.tokens
            output[tokens] = self._varlen(self._fresh, query[tokens], key[tokens], value[tokens], None)
        if self._cached is not None:
            tokens, tables = self._cached.tokens, self._cached.block_tables
            output[tokens] = self._varlen(self._cached, query[tokens], kv_cache[0], kv_cache[1], tables)
        if self._decodes is not None:
            tokens = self._decodes.tokens
            output[tokens] = self._decode(self._decodes, query[tokens], kv_cache)
        return output

    def _varlen(self, part: Part, query: Tensor, keys: Tensor, values: Tensor, tables: Tensor | None) -> Tensor:
        """keys, values: the part's own, [num_tokens, num_kv_heads, head_dim], or with tables those of the cache."""
        from flash_attn import flash_attn_varlen_func

        paging = {} if tables is None else {"block_table": tables}
        output: Tensor = flash_attn_varlen_func(
            query,
            keys,
            values,
            cu_seqlens_q=part.query_starts,
            cu_seqlens_k=part.context_starts,
            max_seqlen_q=part.max_query_len,
            max_seqlen_k=part.max_context_len,
            **paging,
            **self._options,
        )
        return output

    def _decode(self, part: Part, query: Tensor, kv_cache: Tensor) -> Tensor:
        from flash_attn import flash_attn_with_kvcache

        output: Tensor = flash_attn_with_kvcache(
            query[:, None],  # [rows, 1, num_heads, head_dim]
            kv_cache[0],
            kv_cache[1],
            cache_seqlens=part.context_lens,
            block_table=part.block_tables,
            **self._options,
        )
        return output[:, 0]


def _part(metadata: AttentionMetadata, rows: Sequence[int]) -> Part | None:
    """None without rows. For the whole batch nothing is sent to the device."""
    if not rows:
        return None
    query_lens, context_lens = ([lens[row] for row in rows] for lens in (metadata.query_lens, metadata.context_lens))
    longest = max(query_lens), max(context_lens)
    if len(rows) == metadata.num_rows:
        return Part(
            ALL, metadata.query_starts, metadata.context_starts, *longest,
            metadata.context_lens_tensor, metadata.block_tables,
        )  # fmt: skip
    device = metadata.block_tables.device
    query_starts, context_starts = (
        send_array(np.array([0, *accumulate(lens)], dtype=np.int32), device) for lens in (query_lens, context_lens)
    )
    first_tokens = [0, *accumulate(metadata.query_lens)]
    if rows[-1] - rows[0] == len(rows) - 1:  # side by side: views, no copies
        tokens: slice | Tensor = slice(first_tokens[rows[0]], first_tokens[rows[-1] + 1])
        chosen: slice | Tensor = slice(rows[0], rows[-1] + 1)
    else:
        spans = [np.arange(first_tokens[row], first_tokens[row + 1]) for row in rows]
        tokens, chosen = send_array(np.concatenate(spans), device), send_array(np.array(rows), device)
    own_lens, own_tables = metadata.context_lens_tensor[chosen], metadata.block_tables[chosen]
    return Part(tokens, query_starts, context_starts, *longest, own_lens, own_tables)
