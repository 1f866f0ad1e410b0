"""Turns a plan into tensors and runs the model over them. Of earlier steps it keeps only two things: the tokens that
the last step sampled, for plans that were made before these were known, and the block tables that the device has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from real.attention.interface import AttentionMetadata, AttentionProvider
from real.batch import FlatBatch, cumulative, flatten
from real.block_tables import DeviceTables, HostTables
from real.config import EngineOptions
from real.device import Placement
from real.graphs import Captured, StepGraphs
from real.models.interface import CausalLM
from real.sampling.feed import SampleFeed
from real.sampling.inputs import SampleInputs, Source
from real.sampling.sampler import Drawn, launch
from real.staging import Staging, send_array
from testbed.core.plan import ScheduledSequence
from testbed.specs.model import ModelSpec


class EagerInputs(NamedTuple):
    """The inputs of a forward pass that is launched kernel by kernel."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    attention: AttentionMetadata


class StepInputs(NamedTuple):
    """The inputs of one forward pass and its sampling."""

    forward: EagerInputs | Captured  # a captured step has its inputs loaded
    sample_tokens: Tensor  # int64 [num_samples], indices of the last tokens of the rows that sample
    sampling: SampleInputs
    sampled: tuple[int, ...]  # the sequences of the rows that sample, in order
    placeholders: tuple[tuple[int, int], ...]  # (index of a token that the previous step sampled, its sequence)


class ModelRunner:
    """A model, its attention provider, and the options of its engine. graphs: captured steps; None until captured."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionProvider,
        placement: Placement,
        spec: ModelSpec,
        options: EngineOptions,
    ) -> None:
        self.model, self.attention = model, attention
        self.placement, self.spec, self.options = placement, spec, options
        self.graphs: StepGraphs | None = None
        self._tables = HostTables(options.max_num_seqs, -(-options.max_model_len // options.block_size))
        self._device_tables = DeviceTables(self._tables, placement.device)
        self._samples = SampleFeed(Source(spec.vocab_size, options.seed, spec.eos_token_id), placement.device)
        self._newest: tuple[dict[int, int], Tensor] | None = None  # (sequence -> index, tokens) of the last step
        self._staging = Staging(placement.device)

    def prepare(self, rows: Sequence[ScheduledSequence]) -> StepInputs:
        """Returns the flat inputs of the rows, in their order. Copies to a GPU are pinned and asynchronous."""
        try:
            return self._prepared(rows)
        except BaseException:
            self._tables.forget()
            raise

    def _prepared(self, rows: Sequence[ScheduledSequence]) -> StepInputs:
        batch = flatten(rows, self.options, self.spec.vocab_size, self._tables)
        samples = np.array([row.samples for row in rows])
        sample_tokens = np.cumsum(batch.query_lens)[samples] - 1
        forward: EagerInputs | Captured
        captured = None if self.graphs is None else self.graphs.find(batch)
        if captured is not None:
            fed = [sample_tokens, batch.table_rows, *batch.new_blocks]
            sample_tokens_tensor, *tables = self._staging.send(fed)
            self._device_tables.gather(captured.load(batch), *tables)
            forward = captured
        else:
            forward, sample_tokens_tensor = self._send_eager(batch, sample_tokens)
        sampling = self._samples.inputs(rows)
        sampled = tuple([row.seq_id for row in rows if row.samples])
        return StepInputs(forward, sample_tokens_tensor, sampling, sampled, batch.placeholders)

    def hidden_states(self, inputs: StepInputs, kv_caches: Iterable[Tensor]) -> Tensor:
        """Runs one forward pass; returns the final hidden states of all tokens, [at least num_tokens, hidden]."""
        if inputs.placeholders:
            self._fill_in(inputs)
        if isinstance(inputs.forward, Captured):
            assert self.graphs is not None
            return self.graphs.replay(inputs.forward)
        token_ids, positions, metadata = inputs.forward
        return self.model.hidden_states(token_ids, positions, kv_caches, self.attention.prepare(metadata))

    def token_logits(self, hidden: Tensor, places: Tensor) -> Tensor:
        """Returns float32 logits [m, vocab] at `places` int64 [m] of the final hidden states [num_tokens, hidden]."""
        return self.model.logits(hidden.index_select(0, places))

    def draw(self, hidden: Tensor, logits: Tensor, inputs: StepInputs) -> Drawn:
        """Launches sampling and scoring, given the `hidden_states` and the `token_logits` of the rows that sample."""
        drawn = launch(logits, inputs.sampling, partial(self.token_logits, hidden))
        self._newest = {seq_id: place for place, seq_id in enumerate(inputs.sampled)}, drawn.newest
        return drawn

    def _fill_in(self, inputs: StepInputs) -> None:
        """Replaces the plan's placeholders by the tokens that the previous step sampled, without waiting for them."""
        assert self._newest is not None, "a plan has placeholders, and nothing was drawn"
        places, token_ids = self._newest
        wanted = [place for place, _ in inputs.placeholders]
        drawn = [places[seq_id] for _, seq_id in inputs.placeholders]
        targets, sources = send_array(np.array([wanted, drawn]), token_ids.device)
        inputs.forward.token_ids.index_copy_(0, targets, token_ids.index_select(0, sources))

    def _send_eager(self, batch: FlatBatch, sample_tokens: np.ndarray) -> tuple[EagerInputs, Tensor]:
        token_ids, positions, slots, query_starts, context_starts, context_lens, samples, *fed = self._staging.send(
            [
                batch.token_ids,
                batch.positions,
                batch.slots,
                cumulative(batch.query_lens),
                cumulative(batch.context_lens),
                batch.context_lens.astype(np.int32),
                sample_tokens,
                batch.table_rows,
                *batch.new_blocks,
            ]
        )
        tables = context_lens.new_empty((batch.num_rows, batch.max_blocks))
        self._device_tables.gather(tables, *fed)
        metadata = AttentionMetadata(
            query_lens=tuple(batch.query_lens.tolist()),
            context_lens=tuple(batch.context_lens.tolist()),
            query_starts=query_starts,
            context_starts=context_starts,
            context_lens_tensor=context_lens,
            slot_mapping=slots,
            block_tables=tables,
        )
        return EagerInputs(token_ids, positions, metadata), samples
