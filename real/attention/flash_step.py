"""A step of attention by a library's FlashAttention-2 (Dao 2023), with our Triton kernels for rows that it cannot take.

Its paged calls need a block size that is a multiple of 256 and a cache in half precision. If both are given, it
computes the rows that follow cached positions; otherwise our kernels do. Rows without cached positions (most prompts)
attend to the step's own keys and values by a plain varlen call, at any block size.

Its launches depend on which rows are prompts, which the host does not know in a captured step. So our kernels compute
all rows of captured steps with prompts. The code that all providers with FlashAttention share, FlashAttention-3
included, is here as well.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from real.attention import triton_provider
from real.attention.interface import (
    Attend,
    AttentionMetadata,
    AttentionSpec,
    StepAttention,
    as_stored,
    store_kv,
)
from real.attention.triton_provider import PagedRows, Takes, TritonStep, scoring_of, stored_by_kernels
from real.kernels import why_no_gpu
from real.staging import send_array

if TYPE_CHECKING:
    from real.kernels.attend import Scoring

PAGE = 256  # tokens
MAX_HEAD_DIM = 256
HALF = (torch.float16, torch.bfloat16)
ALL = slice(None)


class Options(NamedTuple):
    """Options of all calls of a step, which are causal and aligned to the end. window: how many tokens (to the left, to
    the right) a query attends to, itself not counted; -1: no bound."""

    scale: float
    window: tuple[int, int]
    slopes: Tensor | None  # ALiBi, float32 [num_heads]


class StepPart(NamedTuple):
    """Rows of a step that are computed in one call."""

    tokens: slice | Tensor  # indices of their tokens in the flat batch; ALL: they are the whole batch
    query_starts: Tensor  # int32 [rows + 1], cumulative
    context_starts: Tensor  # int32 [rows + 1], cumulative
    max_query_len: int
    max_context_len: int
    context_lens: Tensor  # int32 [rows]
    block_tables: Tensor  # int32 [rows, max blocks]


class Varlen(Protocol):
    """Computes rows of any length, [num_tokens, num_heads, head_dim]. keys, values: the part's own, [num_tokens,
    num_kv_heads, head_dim]; with is_paged, those of the cache."""

    def __call__(
        self, part: StepPart, query: Tensor, keys: Tensor, values: Tensor, options: Options, *, is_paged: bool
    ) -> Tensor: ...


# (part of rows with one token each, query [rows, num_heads, head_dim], KV memory, options) -> output, shape of query
Decode = Callable[[StepPart, Tensor, Tensor, Options], Tensor]


def why_not_here(spec: AttentionSpec) -> str | None:
    """Why no FlashAttention can run on this device or for this spec; None if nothing is against it."""
    if (reason := why_no_gpu(spec.device)) is not None:
        return reason
    if spec.dtype not in HALF:
        return f"it needs float16 or bfloat16, the dtype is {str(spec.dtype).removeprefix('torch.')}"
    if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 8:
        return f"it needs a head size of at most {MAX_HEAD_DIM} and a multiple of 8, the model's is {spec.head_dim}"
    return None


def why_not_loaded(module: str, package: str, load: Callable[[], object]) -> str | None:
    """Why a package's module cannot be imported; None if it can. The first step shows whether it has what is called."""
    if importlib.util.find_spec(module) is None:
        return f"the package {package} is not installed"
    try:
        load()
    except Exception as error:  # noqa: BLE001  (a binary for another torch or CUDA: whatever it raises is told)
        told = " ".join(str(error).split())
        return f"the installed {package} cannot be imported ({type(error).__name__}: {told}); install it for this torch"
    return None


def takes_pages(spec: AttentionSpec) -> bool:
    """Whether FlashAttention-2 can read a cache of this format and block size."""
    return spec.block_size % PAGE == 0 and spec.kv_dtype == "auto"


class FlashProvider:
    """A library's FlashAttention as a provider. step: creates the attention of a step."""

    def __init__(self, name: str, spec: AttentionSpec, step: MakeStep) -> None:
        self.name = name
        self.spec = spec
        self.slopes = spec.slopes_on_device()
        self.scoring: Scoring | None = None  # for our kernels; None if they cannot run
        self._step = step
        if triton_provider.why_not(spec) is None:
            self.scoring = scoring_of(spec)

    @property
    def supports_graphs(self) -> bool:
        """Whether our kernels can run: only our store kernel skips slots below 0, which padding tokens have."""
        return self.scoring is not None

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        scoring = self.scoring
        if scoring is None:
            return StepAttention(self._step(self, metadata), partial(store_kv, slot_mapping=metadata.slot_mapping))
        is_ours = metadata.are_bounds and max(metadata.query_lens) > 1
        step = TritonStep(self.spec, scoring, metadata) if is_ours else self._step(self, metadata)
        return stored_by_kernels(self.spec, metadata, step)

    def window(self, metadata: AttentionMetadata) -> int | None:
        """Returns the sliding window; None if it excludes no position of the step."""
        window = self.spec.sliding_window
        return None if window is None or window >= max(metadata.context_lens) else window


MakeStep = Callable[[FlashProvider, AttentionMetadata], Attend]


class FlashStep:
    """One step's attention. decode: computes decodes; None leaves them to our kernels."""

    def __init__(
        self, provider: FlashProvider, metadata: AttentionMetadata, *, varlen: Varlen, decode: Decode | None = None
    ) -> None:
        spec, scoring, window = provider.spec, provider.scoring, provider.window(metadata)
        self._spec, self._varlen, self._decode = spec, varlen, decode
        self._options = Options(spec.scale, (-1, 0) if window is None else (window - 1, 0), provider.slopes)
        lens = list(zip(metadata.query_lens, metadata.context_lens, strict=True))
        self._fresh = _part(metadata, [row for row, (num, context) in enumerate(lens) if num > 1 and num == context])
        self._cached = self._decodes = self._paged = None
        if takes_pages(spec):
            self._cached = _part(metadata, [row for row, (num, context) in enumerate(lens) if 1 < num < context])
            if decode is not None:
                self._decodes = _part(metadata, [row for row, (num, _) in enumerate(lens) if num == 1])
                return
        assert scoring is not None, "why_not asks for our kernels"
        self._paged = PagedRows(spec, scoring, metadata, Takes.DECODES if takes_pages(spec) else Takes.CACHED)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor) -> Tensor:
        decode, varlen, options = self._decode, self._varlen, self._options
        if self._decodes is not None and decode is not None and self._decodes.tokens is ALL:  # no other rows
            return decode(self._decodes, query, kv_cache, options)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if self._paged is not None:
            self._paged.attend(query, kv_cache, output)
        if self._fresh is not None:
            key, value = as_stored(key, value, kv_cache.dtype, self._spec.k_scale, self._spec.v_scale)
            tokens = self._fresh.tokens
            output[tokens] = varlen(
                self._fresh, query[tokens], key[tokens], value[tokens], options, is_paged=False
            )  # fmt: skip
        if self._cached is not None:
            tokens = self._cached.tokens
            output[tokens] = varlen(self._cached, query[tokens], kv_cache[0], kv_cache[1], options, is_paged=True)
        if self._decodes is not None and decode is not None:
            tokens = self._decodes.tokens
            output[tokens] = decode(self._decodes, query[tokens], kv_cache, options)
        return output


def _part(metadata: AttentionMetadata, rows: Sequence[int]) -> StepPart | None:
    """Returns these rows as a part; None if there are none. For the whole batch nothing is sent to the device."""
    if not rows:
        return None
    query_lens, context_lens = ([lens[row] for row in rows] for lens in (metadata.query_lens, metadata.context_lens))
    longest = max(query_lens), max(context_lens)
    if len(rows) == metadata.num_rows:
        return StepPart(
            ALL, metadata.query_starts, metadata.context_starts, *longest,
            metadata.context_lens_tensor, metadata.block_tables,
        )  # fmt: skip
    device = metadata.block_tables.device
    query_starts, context_starts = (
        send_array(np.array([0, *accumulate(lens)], dtype=np.int32), device) for lens in (query_lens, context_lens)
    )
    first_tokens = [0, *accumulate(metadata.query_lens)]
    if rows[-1] - rows[0] == len(rows) - 1:  # adjacent rows: views, no copies
        tokens: slice | Tensor = slice(first_tokens[rows[0]], first_tokens[rows[-1] + 1])
        chosen: slice | Tensor = slice(rows[0], rows[-1] + 1)
    else:
        spans = [np.arange(first_tokens[row], first_tokens[row + 1]) for row in rows]
        tokens, chosen = send_array(np.concatenate(spans), device), send_array(np.array(rows), device)
    own_lens, own_tables = metadata.context_lens_tensor[chosen], metadata.block_tables[chosen]
    return StepPart(tokens, query_starts, context_starts, *longest, own_lens, own_tables)
