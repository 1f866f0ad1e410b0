"""Decode steps replayed as CUDA graphs: captured once at a few batch sizes, a batch runs in the smallest that holds it.

A graph reads and writes the same memory at each replay. So each size has its own inputs on the device, which a step
overwrites in one copy; rows that only pad the batch read and write the cache's scratch block.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from real.attention.interface import AttentionMetadata, AttentionProvider
from real.batch import FlatBatch, cumulative
from real.cache_engine import LayerCaches
from real.models.interface import CausalLM
from real.staging import layout, twofold_memory, views, write

Work = Callable[[], Tensor]  # on fixed memory; its result lies in the same place each time


class Capture(Protocol):
    """Turns work into something that is launched at once. Called from the largest to the smallest."""

    def __call__(self, work: Work) -> Work: ...


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


def call_again(work: Work) -> Work:
    """Captures nothing: the work is done anew. For devices without graphs; the results are the same."""
    return work


def captured_sizes(largest: int) -> list[int]:
    """1, 2, 4, then multiples of 8, up to the largest batch, which is itself captured."""
    sizes = [size for size in (1, 2, 4, *range(8, largest + 1, 8)) if size < largest]
    return [*sizes, largest]


class GraphInputs:
    """The fixed memory of one batch size: pinned on the host, twofold as in Staging, its twin on the device.

    tables: int32 [size, max_blocks] on the device, shared with the other sizes. Only what a batch uses of it is to be
    written: rows that pad read one position of some block, which means nothing, and write to the scratch block.
    """

    def __init__(self, size: int, tables: Tensor, scratch_slot: int) -> None:
        self.size = size
        self.tables = tables
        self._scratch_slot = scratch_slot
        self._arrays: list[np.ndarray] = [
            np.zeros(size, dtype=np.int64),  # token ids
            np.zeros(size, dtype=np.int64),  # positions
            np.full(size, scratch_slot, dtype=np.int64),  # slots
            np.ones(size, dtype=np.int32),  # context lengths
            np.arange(size + 1, dtype=np.int32),  # cumulative query lengths
            np.arange(size + 1, dtype=np.int32),  # cumulative context lengths
        ]
        self._offsets, total = layout(self._arrays)
        self._hosts, self._twin = twofold_memory(total, tables.device)
        self._send()
        tensors = views(self._arrays, self._offsets, self._twin)
        self.token_ids, self.positions, self._slots, self._context_lens, *self._starts = tensors

    def metadata(self, max_model_len: int) -> AttentionMetadata:
        """For the host every row is as long as a row can be; how long it is, the device reads at each replay."""
        query_starts, context_starts = self._starts
        return AttentionMetadata(
            query_lens=(1,) * self.size,
            context_lens=(max_model_len,) * self.size,
            query_starts=query_starts,
            context_starts=context_starts,
            context_lens_tensor=self._context_lens,
            slot_mapping=self._slots,
            block_tables=self.tables,
        )

    def load(self, batch: FlatBatch) -> None:
        """Overwrites all but the tables with a batch of at most `size` decodes, padded. Waits for nothing."""
        num = batch.num_rows
        columns = (
            (batch.token_ids, 0),
            (batch.positions, 0),
            (batch.slots, self._scratch_slot),
            (batch.context_lens, 1),
        )
        for array, (values, padding) in zip(self._arrays, columns, strict=False):
            array[:num], array[num:] = values, padding
        self._arrays[-1] = cumulative(self._arrays[3])
        self._send()

    def _send(self) -> None:
        self._hosts.reverse()
        write(self._arrays, self._offsets, self._hosts[0].numpy())
        self._twin.copy_(self._hosts[0], non_blocking=True)


class Captured(NamedTuple):
    inputs: GraphInputs
    replay: Work  # -> final hidden states [size, hidden]


class DecodeGraphs:
    """The captured decode steps of one model over one KV cache.

    sizes: batch sizes, ascending. max_model_len: the longest context of any row. capture: how; CudaCapture on a GPU.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionProvider,
        caches: LayerCaches,
        *,
        sizes: list[int],
        block_size: int,
        max_model_len: int,
        scratch_block: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        self._model = model
        self._attention = attention
        self._caches = caches
        self._max_model_len = max_model_len
        self._sizes = sizes
        max_blocks = -(-max_model_len // block_size)
        with torch.inference_mode(False):  # ordinary memory: it may be written to anywhere
            tables = torch.full((sizes[-1], max_blocks), scratch_block, dtype=torch.int32, device=device)
        self._hidden: Tensor | None = None  # [largest size, hidden], where every graph leaves its result
        self._max_blocks = max_blocks
        self._captured: dict[int, Captured] = {}
        for size in reversed(sizes):  # the largest first: the smaller ones fit into its memory
            inputs = GraphInputs(size, tables[:size], scratch_block * block_size)
            self._captured[size] = Captured(inputs, capture(partial(self._forward, inputs)))

    def _forward(self, inputs: GraphInputs) -> Tensor:
        """Into memory that all sizes share: a graph that kept its own result would take room in the pool for good."""
        attention = self._attention.prepare(inputs.metadata(self._max_model_len))
        hidden = self._model.hidden_states(inputs.token_ids, inputs.positions, self._caches, attention)
        if self._hidden is None:  # work runs once before it is captured
            self._hidden = hidden.new_empty((self._sizes[-1], *hidden.shape[1:]))
        return self._hidden[: inputs.size].copy_(hidden)

    def holds(self, batch: FlatBatch) -> bool:
        """Whether the batch runs in a graph: decodes only, not too many, none too long."""
        is_short = batch.max_blocks <= self._max_blocks
        return batch.is_decode and is_short and batch.num_rows <= self._sizes[-1]

    def load(self, batch: FlatBatch) -> tuple[int, Tensor]:
        """Sends a batch that `holds`; returns the size that it runs in, and where its block tables are to be written,
        int32 [num_rows, max blocks of a row]. Does not wait."""
        size = self._sizes[bisect_left(self._sizes, batch.num_rows)]
        inputs = self._captured[size].inputs
        inputs.load(batch)
        return size, inputs.tables[: batch.num_rows, : batch.max_blocks]

    def token_ids(self, size: int) -> Tensor:
        """The tokens of what was loaded, int64 [size]; they may be overwritten."""
        return self._captured[size].inputs.token_ids

    def replay(self, size: int) -> Tensor:
        """Final hidden states [size, hidden] of what was loaded; the rows behind the batch mean nothing."""
        self._caches.wait()
        return self._captured[size].replay()
