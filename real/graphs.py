"""Steps replayed as CUDA graphs: captured once in a few shapes, a step runs in the smallest that holds it. Steps of
decodes alone have shapes of their own, by their rows; all others, by their tokens.

A graph reads and writes the same memory at each replay. So each shape has its own inputs on the device, which a step
overwrites in one copy; rows and tokens that only pad it write to the cache's scratch block.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from real.attention.interface import AttentionMetadata, AttentionProvider
from real.batch import BatchLimits, FlatBatch, cumulative
from real.cache_engine import CacheEngine
from real.models.interface import CausalLM
from real.staging import layout, twofold_memory, views, write

Work = Callable[[], Tensor]  # on fixed memory; its result lies in the same place each time
Capture = Callable[[Work], Work]  # gives what is launched at once; called from the largest shape to the smallest


class CudaCapture:
    """Captures on the current device; all graphs share one pool of memory, as only one runs at a time."""

    def __init__(self) -> None:
        gc.collect()  # engines that are gone hold memory until then
        self._stream = torch.cuda.Stream()  # one: cuBLAS keeps memory for each
        self.begin_anew()

    def begin_anew(self) -> None:
        """To be called when all graphs so far were let go of: torch takes no more into the pool that they had."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # loads kernels and picks algorithms, which a capture must not do
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with _without_collections(), torch.cuda.graph(graph, pool=self._pool, stream=stream):
            result = work()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@contextmanager
def _without_collections() -> Iterator[None]:
    """What Python's collector would find meanwhile may be a graph, a kernel or pinned memory of an engine that is gone;
    to free one breaks a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphShape(NamedTuple):
    """Of a captured step: the most tokens and rows that it holds. is_decode: each row has one token, and no other."""

    num_tokens: int
    num_rows: int
    is_decode: bool


def captured_sizes(largest: int) -> list[int]:
    """Of decodes: 1, 2, 4, then multiples of 8, up to the largest batch, which is itself captured."""
    sizes = [size for size in (1, 2, 4, *range(8, largest + 1, 8)) if size < largest]
    return [*sizes, largest]


def captured_token_counts(largest: int) -> list[int]:
    """Of other steps: up to the largest, which is itself captured, in steps of 16, from 128 on of 64, from 512 on of
    128: so that padding costs the products at most a tile of rows."""
    counts = [*range(16, 128, 16), *range(128, 512, 64), *range(512, largest + 1, 128)]
    return [*(count for count in counts if count < largest), largest]


def captured_shapes(max_decodes: int, max_tokens: int, max_num_seqs: int) -> list[GraphShape]:
    """The largest first. max_tokens: of steps that are not decodes alone; below 2: none of them is captured."""
    shapes = [GraphShape(size, size, True) for size in captured_sizes(max_decodes)]
    if max_tokens > 1:
        shapes += [GraphShape(count, min(count, max_num_seqs), False) for count in captured_token_counts(max_tokens)]
    return sorted(shapes, reverse=True)


class Captured:
    """A graph and its fixed memory: pinned on the host, twofold as in Staging, its twin on the device.

    token_ids: int64 [num_tokens], of what was loaded; they may be overwritten.
    tables: int32 [num_rows, max_blocks] on the device, shared with the other shapes. Only what a batch uses of it is to
    be written: decodes that pad read one position of some block, which means nothing, and write to the scratch block;
    rows that pad another step have no token.
    """

    def __init__(self, shape: GraphShape, tables: Tensor, scratch_slot: int) -> None:
        self.shape = shape
        self.replay: Work  # -> final hidden states [num_tokens, hidden]; set once it is captured
        self.tables = tables
        num_tokens, num_rows, is_decode = shape
        self._padding_len = int(is_decode)  # tokens, and positions, of a row that pads
        self._scratch_slot = scratch_slot
        lens = np.full(num_rows, self._padding_len, dtype=np.int32)
        self._arrays: list[np.ndarray] = [
            np.zeros(num_tokens, dtype=np.int64),  # token ids
            np.zeros(num_tokens, dtype=np.int64),  # positions
            np.full(num_tokens, scratch_slot, dtype=np.int64),  # slots
            lens,  # context lengths
            cumulative(lens),  # of query lengths
            cumulative(lens),  # of context lengths
        ]
        self._offsets, total = layout(self._arrays)
        self._hosts, self._twin = twofold_memory(total, tables.device)
        self._send()
        tensors = views(self._arrays, self._offsets, self._twin)
        self.token_ids, self.positions, self._slots, self._context_lens, *self._starts = tensors

    def metadata(self, max_model_len: int) -> AttentionMetadata:
        """For the host every row is as long as a row can be; how long it is, the device reads at each replay."""
        num_tokens, num_rows, is_decode = self.shape
        query_starts, context_starts = self._starts
        return AttentionMetadata(
            query_lens=(1 if is_decode else num_tokens,) * num_rows,
            context_lens=(max_model_len,) * num_rows,
            query_starts=query_starts,
            context_starts=context_starts,
            context_lens_tensor=self._context_lens,
            slot_mapping=self._slots,
            block_tables=self.tables,
            are_bounds=True,
        )

    def load(self, batch: FlatBatch) -> Tensor:
        """Overwrites all but the tables with a batch that the shape holds, padded; returns where the batch's tables are
        to be written, int32 [num_rows, max blocks of a row]. Waits for nothing."""
        token_ids, positions, slots, context_lens, query_starts, context_starts = self._arrays
        num_tokens, num_rows = batch.num_tokens, batch.num_rows
        token_ids[:num_tokens], token_ids[num_tokens:] = batch.token_ids, 0
        positions[:num_tokens], positions[num_tokens:] = batch.positions, 0
        slots[:num_tokens], slots[num_tokens:] = batch.slots, self._scratch_slot
        context_lens[:num_rows], context_lens[num_rows:] = batch.context_lens, self._padding_len
        np.cumsum(context_lens, out=context_starts[1:])
        if not self.shape.is_decode:  # else row i is token i
            np.cumsum(batch.query_lens, out=query_starts[1 : num_rows + 1])
            query_starts[num_rows + 1 :] = num_tokens
        self._send()
        return self.tables[:num_rows, : batch.max_blocks]

    def _send(self) -> None:
        self._hosts.reverse()
        write(self._arrays, self._offsets, self._hosts[0].numpy())
        self._twin.copy_(self._hosts[0], non_blocking=True)


class StepGraphs:
    """The captured steps of one model over one KV cache. shapes: the largest first. capture: CudaCapture on a GPU."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionProvider,
        cache: CacheEngine,
        limits: BatchLimits,
        shapes: list[GraphShape],
        capture: Capture,
    ) -> None:
        self._model = model
        self._attention = attention
        self._caches = cache.gpu
        self._max_model_len = limits.max_model_len
        self._most_tokens = shapes[0].num_tokens
        self._max_blocks = -(-limits.max_model_len // limits.block_size)
        scratch_slot = cache.scratch_block * limits.block_size
        size, device = (max(shape.num_rows for shape in shapes), self._max_blocks), cache.gpu.whole.device
        with torch.inference_mode(False):  # ordinary memory: it may be written to anywhere
            tables = torch.full(size, cache.scratch_block, dtype=torch.int32, device=device)
        self._hidden: Tensor | None = None  # [most tokens, hidden], where every graph leaves its result
        self._captured: dict[bool, list[Captured]] = {True: [], False: []}  # by is_decode, the smallest first
        for shape in shapes:  # the largest first: the smaller ones fit into its memory
            captured = Captured(shape, tables[: shape.num_rows], scratch_slot)
            captured.replay = capture(partial(self._forward, captured))
            self._captured[shape.is_decode].insert(0, captured)

    def _forward(self, captured: Captured) -> Tensor:
        """Into memory that all shapes share: a graph that kept its own result would take room in the pool for good."""
        attention = self._attention.prepare(captured.metadata(self._max_model_len))
        hidden = self._model.hidden_states(captured.token_ids, captured.positions, self._caches, attention)
        if self._hidden is None:  # work runs once before it is captured
            self._hidden = hidden.new_empty((self._most_tokens, *hidden.shape[1:]))
        return self._hidden[: captured.shape.num_tokens].copy_(hidden)

    @property
    def largest(self) -> tuple[int, int]:
        """Tokens of the largest graph of decodes alone, and of other steps; 0: there is none."""
        most = [own[-1].shape.num_tokens if own else 0 for own in (self._captured[True], self._captured[False])]
        return most[0], most[1]

    def find(self, batch: FlatBatch) -> Captured | None:
        """The smallest graph that the batch runs in; None: it has too many tokens, a row is too long, or steps of its
        kind are not captured."""
        captured = self._captured[batch.is_decode]
        place = bisect_left(captured, batch.num_tokens, key=lambda one: one.shape.num_tokens)
        if place == len(captured) or batch.max_blocks > self._max_blocks:
            return None
        return captured[place] if batch.num_rows <= captured[place].shape.num_rows else None

    def replay(self, captured: Captured) -> Tensor:
        """Final hidden states [num_tokens, hidden] of what was loaded; those behind the batch mean nothing. The graph
        knows no layer's event: it starts when the swaps of all layers are over."""
        self._caches.wait()
        return captured.replay()
