"""Turns a plan into tensors and runs the model over them. Reads the plan alone; remembers nothing between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from real.attention.interface import AttentionMetadata, AttentionProvider
from real.beams import BeamInputs, beam_inputs
from real.device import Placement
from real.models.interface import CausalLM
from real.sampler import SamplingInputs, further_inputs, sampling_inputs
from testbed.errors import RequestError
from testbed.plan import ScheduledSequence


class StepInputs(NamedTuple):
    """What the device needs for one forward pass."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    attention: AttentionMetadata
    sample_tokens: Tensor  # int64 [num_samples], where the last tokens of the rows that sample lie
    sampling: SamplingInputs | None  # the random ones among the rows' first draws
    further: SamplingInputs | None = None  # the random draws after the first, where samples of one prompt part
    beams: BeamInputs | None = None


class ModelRunner:
    """A model, its attention provider, and the layout of its batches."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionProvider,
        placement: Placement,
        *,
        block_size: int,
        vocab_size: int,
        seed: int,
        sliding_window: int | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self._device = placement.device
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._seed = seed
        self._sliding_window = sliding_window

    def prepare(self, rows: Sequence[ScheduledSequence]) -> StepInputs:
        """Flat inputs of the rows, in their order; copies to a GPU are pinned and not waited for.

        Raises RequestError for a token id outside the vocabulary.
        """
        token_ids = np.array([token for row in rows for token in row.tokens], dtype=np.int64)  # [num_tokens]
        self._check_tokens(token_ids, rows)
        starts = np.array([row.start for row in rows])  # [num_rows]
        query_lens = np.array([row.num_tokens for row in rows])
        assert len(token_ids) == query_lens.sum(), "a row's tokens are as many as it says"
        query_starts = _cumulative(query_lens)  # [num_rows + 1]
        context_lens = starts + query_lens
        row_of_token = np.repeat(np.arange(len(rows)), query_lens)  # [num_tokens]
        positions = np.arange(len(token_ids)) - (query_starts[:-1] - starts)[row_of_token]
        block_tables = self._block_tables(rows, starts, context_lens)  # [num_rows, max_blocks]
        blocks, offsets = positions // self._block_size, positions % self._block_size
        slots = block_tables[row_of_token, blocks].astype(np.int64) * self._block_size + offsets
        sampled = [row for row in rows if row.samples]
        samples = np.array([row.samples for row in rows])
        metadata = AttentionMetadata(
            query_lens=tuple(query_lens.tolist()),
            context_lens=tuple(context_lens.tolist()),
            query_starts=self._send(query_starts.astype(np.int32)),
            context_starts=self._send(_cumulative(context_lens).astype(np.int32)),
            context_lens_tensor=self._send(context_lens.astype(np.int32)),
            slot_mapping=self._send(slots),
            block_tables=self._send(block_tables),
        )
        beams = beam_inputs(sampled)
        return StepInputs(
            self._send(token_ids),
            self._send(positions),
            metadata,
            self._send(query_starts[1:][samples] - 1),
            self._send_draws(sampling_inputs(sampled, self._seed)),
            self._send_draws(further_inputs(sampled, self._seed)),
            None if beams is None else beams._replace(rows=self._send_tensor(beams.rows)),
        )

    def logits(self, inputs: StepInputs, kv_caches: Sequence[Tensor]) -> Tensor:
        """One forward pass: float32 logits of the rows that sample, [num_samples, vocab]."""
        step_attention = self.attention.prepare(inputs.attention)
        hidden = self.model.hidden_states(inputs.token_ids, inputs.positions, kv_caches, step_attention)
        return self.model.logits(hidden.index_select(0, inputs.sample_tokens))

    def _block_tables(
        self, rows: Sequence[ScheduledSequence], starts: np.ndarray, context_lens: np.ndarray
    ) -> np.ndarray:
        """The blocks that hold each row's context, int32 [num_rows, max_blocks], padded with 0.

        Also 0 are the blocks that a sliding window left behind: nothing is read from them.
        """
        num_blocks = -(-context_lens // self._block_size)  # [num_rows]
        flat = [block for row, num in zip(rows, num_blocks.tolist(), strict=True) for block in row.block_table[:num]]
        tables = np.zeros((len(rows), int(num_blocks.max())), dtype=np.int32)
        indices = np.arange(tables.shape[1])
        tables[indices < num_blocks[:, None]] = flat
        if tables.min() < 0:
            is_released = tables < 0
            outside = self._num_blocks_outside_window(starts)
            assert not (is_released & (indices >= outside[:, None])).any(), "a row names the blocks of its window"
            tables[is_released] = 0
        return tables

    def _num_blocks_outside_window(self, positions: np.ndarray) -> np.ndarray:
        """How many of the first blocks no token from these positions on looks at."""
        if self._sliding_window is None:
            return np.zeros_like(positions)
        first_attended: np.ndarray = np.maximum(0, positions + 1 - self._sliding_window)
        return first_attended // self._block_size

    def _check_tokens(self, token_ids: np.ndarray, rows: Sequence[ScheduledSequence]) -> None:
        if token_ids.min() >= 0 and token_ids.max() < self._vocab_size:
            return
        for row in rows:
            for offset, token in enumerate(row.tokens):
                if not 0 <= token < self._vocab_size:
                    raise RequestError(
                        f"sequence {row.seq_id} has token id {token} at position {row.start + offset}; "
                        f"the model's vocabulary has {self._vocab_size} tokens, from 0 on"
                    )

    def _send_draws(self, draws: SamplingInputs | None) -> SamplingInputs | None:
        return None if draws is None else SamplingInputs(*(self._send_tensor(tensor) for tensor in draws))

    def _send(self, array: np.ndarray) -> Tensor:
        return self._send_tensor(torch.from_numpy(array))

    def _send_tensor(self, tensor: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _cumulative(lengths: np.ndarray) -> np.ndarray:
    """[n] -> [n + 1], starting with 0."""
    return np.concatenate(([0], np.cumsum(lengths)))
