"""Steps replayed as CUDA graphs, which are captured once in a few shapes. A step runs in the smallest shape that holds
it. Steps of decodes only have shapes by number of rows; all other steps have shapes by number of tokens.

A graph reads and writes the same memory at each replay. So each shape has its own inputs on the device, which a step
overwrites in one copy. Padding rows and tokens write to the cache's scratch block.
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
from real.batch import FlatBatch, cumulative
from real.cache_engine import CacheEngine
from real.config import EngineOptions
from real.models.interface import CausalLM
from real.staging import Staging

Computation = Callable[[], Tensor]  # on fixed memory; its result is in the same memory each time
Capture = Callable[[Computation], Computation]  # returns the replay; called from the largest shape to the smallest


class CudaCapture:
    """Captures on the current device; all graphs share one pool of memory, as only one runs at a time."""

    def __init__(self) -> None:
        gc.collect()  # frees the memory of engines that are no longer used
        self._stream = torch.cuda.Stream()  # a single one, as cuBLAS keeps memory for each stream
        self.begin_anew()

    def begin_anew(self) -> None:
        """Must be called after all graphs so far were released: torch adds no more graphs to their pool."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Computation) -> Computation:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # loads kernels and chooses algorithms, which a capture must not do
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
    """Disables Python's garbage collector: it could free a graph, a kernel or pinned memory of an engine that is no
    longer used, which breaks a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphShape(NamedTuple):
    """The most tokens and rows that a captured step holds. is_decode: every row has exactly one token."""

    num_tokens: int
    num_rows: int
    is_decode: bool


def captured_sizes(largest: int) -> list[int]:
    """Returns the sizes of decode shapes: 1, 2, 4, then multiples of 8, up to `largest`, which is included."""
    sizes = [size for size in (1, 2, 4, *range(8, largest + 1, 8)) if size < largest]
    return [*sizes, largest]


def captured_token_counts(largest: int) -> list[int]:
    """Returns the token counts of other shapes: multiples of 16, from 128 on of 64, from 512 on of 128, up to
    `largest`, which is included. So padding costs each GEMM at most one more tile of rows."""
    counts = [*range(16, 128, 16), *range(128, 512, 64), *range(512, largest + 1, 128)]
    return [*(count for count in counts if count < largest), largest]


def captured_shapes(max_decodes: int, max_tokens: int, max_num_seqs: int) -> list[GraphShape]:
    """Returns all shapes, largest first. max_tokens: for steps that are not only decodes; below 2: none of those."""
    shapes = [GraphShape(size, size, True) for size in captured_sizes(max_decodes)]
    if max_tokens > 1:
        shapes += [GraphShape(count, min(count, max_num_seqs), False) for count in captured_token_counts(max_tokens)]
    return sorted(shapes, reverse=True)


class Captured:
    """A graph and its fixed inputs, whose place on the device stays the same from send to send.

    token_ids: int64 [num_tokens], of the loaded batch; they may be overwritten.
    tables: int32 [num_rows, max_blocks] on the device, shared with the other shapes. Only the part that a batch uses is
    written. Padding decodes read one position of an arbitrary block and write to the scratch block; their output is not
    used. Padding rows of another step have no token.
    """

    def __init__(self, shape: GraphShape, tables: Tensor, scratch_slot: int) -> None:
        self.shape = shape
        self.replay: Computation  # -> final hidden states [num_tokens, hidden]; set after the capture
        self.tables = tables
        num_tokens, num_rows, is_decode = shape
        self._padding_len = int(is_decode)  # tokens, and positions, of a padding row
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
        self._staging = Staging(tables.device, least_bytes=0)
        tensors = self._staging.send(self._arrays)
        self.token_ids, self.positions, self._slots, self._context_lens, *self._starts = tensors

    def metadata(self, max_model_len: int) -> AttentionMetadata:
        """Returns metadata with bounds: on the host every row has the greatest possible length; the device reads the
        actual lengths at each replay."""
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
        """Overwrites all inputs except the tables with a batch, padded to the shape. Returns the memory to which the
        batch's tables must be written, int32 [num_rows, max blocks of a row]. Does not wait."""
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
        self._staging.send(self._arrays)
        return self.tables[:num_rows, : batch.max_blocks]


class StepGraphs:
    """The captured steps of one model over one KV cache. shapes: largest first. capture: CudaCapture on a GPU."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionProvider,
        cache: CacheEngine,
        options: EngineOptions,
        shapes: list[GraphShape],
        capture: Capture,
    ) -> None:
        self._model = model
        self._attention = attention
        self._caches = cache.gpu
        self._max_model_len = options.max_model_len
        self._most_tokens = shapes[0].num_tokens
        self._max_blocks = -(-options.max_model_len // options.block_size)
        scratch_slot = cache.scratch_block * options.block_size
        size, device = (max(shape.num_rows for shape in shapes), self._max_blocks), cache.gpu.whole.device
        with torch.inference_mode(False):  # so that it can be written to outside of inference mode too
            tables = torch.full(size, cache.scratch_block, dtype=torch.int32, device=device)
        self._hidden: Tensor | None = None  # [most tokens, hidden], the result of every graph
        self._captured: dict[bool, list[Captured]] = {True: [], False: []}  # by is_decode, the smallest first
        for shape in shapes:  # the largest first: the smaller ones fit into its memory
            captured = Captured(shape, tables[: shape.num_rows], scratch_slot)
            captured.replay = capture(partial(self._forward, captured))
            self._captured[shape.is_decode].insert(0, captured)

    def _forward(self, captured: Captured) -> Tensor:
        """Runs a forward pass and copies its result to memory that all shapes share. Otherwise each graph would hold
        memory of the pool for its result."""
        attention = self._attention.prepare(captured.metadata(self._max_model_len))
        hidden = self._model.hidden_states(captured.token_ids, captured.positions, self._caches, attention)
        if self._hidden is None:  # at the first run, which is before any capture
            self._hidden = hidden.new_empty((self._most_tokens, *hidden.shape[1:]))
        return self._hidden[: captured.shape.num_tokens].copy_(hidden)

    @property
    def largest(self) -> tuple[int, int]:
        """The tokens of the largest graph of decodes only, and of other steps; 0: there is none."""
        most = [own[-1].shape.num_tokens if own else 0 for own in (self._captured[True], self._captured[False])]
        return most[0], most[1]

    def find(self, batch: FlatBatch) -> Captured | None:
        """Returns the smallest graph that holds the batch; None if it has too many tokens or rows, if a row is too
        long, or if steps of its kind are not captured."""
        captured = self._captured[batch.is_decode]
        place = bisect_left(captured, batch.num_tokens, key=lambda one: one.shape.num_tokens)
        if place == len(captured) or batch.max_blocks > self._max_blocks:
            return None
        # only a composition of one's own has too many rows, which is refused after the step
        return captured[place] if batch.num_rows <= captured[place].shape.num_rows else None

    def replay(self, captured: Captured) -> Tensor:
        """Returns final hidden states [num_tokens, hidden] of the loaded batch; those of padding are undefined. A graph
        cannot wait for each layer's swaps, so it starts after the swaps of all layers."""
        self._caches.wait()
        return captured.replay()
