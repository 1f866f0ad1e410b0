"""The way of sampling's inputs to the device. While a batch stays the same, only the keys of its draws are new.

The plan alone decides: rows are compared with those of the step before in all that their inputs depend on. Where these
depend on more (on what was said before, how long an output is, the tokens of a prompt), they are made at each step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from real.sampling.inputs import SampleInputs, Source, sample_inputs, sent
from real.sampling.noise import draw_keys
from real.staging import Staging
from testbed.core.plan import ScheduledSequence

Batch = tuple[list[object], ...]


class SampleFeed:
    """What it returns may be read by what is launched until it is asked again."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self._source = source
        self._staging, self._key_staging = Staging(device), Staging(device)
        # a batch whose inputs the next step may have too: on the host, and on the device without keys
        self._kept: tuple[Batch, SampleInputs, SampleInputs] | None = None

    def inputs(self, rows: Sequence[ScheduledSequence]) -> SampleInputs:
        """`sample_inputs` on the device; does not wait. Raises RequestError as that does."""
        batch = _batch_of(rows)
        if self._kept is not None and batch == self._kept[0]:
            _, host, there = self._kept
            return self._with_keys(there, _new_keys(host, rows))
        self._kept = None  # where the next line raises, nothing is known
        host = sample_inputs(rows, self._source)
        keys = [group.keys.numpy() for group in host.groups if group.keys is not None]
        keyless = host._replace(groups=tuple([group._replace(keys=None) for group in host.groups]))
        there = sent(keyless, self._staging.send)
        if all(_is_constant(row) for row in rows):
            self._kept = batch, host, there
        return self._with_keys(there, keys)

    def _with_keys(self, there: SampleInputs, keys: list[np.ndarray]) -> SampleInputs:
        if not keys:
            return there
        tensors = iter(self._key_staging.send(keys))
        groups = [group if group.streams is None else group._replace(keys=next(tensors)) for group in there.groups]
        return there._replace(groups=tuple(groups))


def _batch_of(rows: Sequence[ScheduledSequence]) -> Batch:
    """All of the rows that their inputs depend on, if they are constant, but for the positions."""
    return (
        [row.seq_id for row in rows],
        [row.samples for row in rows],
        [row.sampling for row in rows],
        [row.num_samples for row in rows],
        [row.group_id for row in rows],
        [row.forced for row in rows],
    )


def _is_constant(row: ScheduledSequence) -> bool:
    """Whether the row's inputs depend on nothing else."""
    sampling = row.sampling
    return not (sampling.needs_history or sampling.min_tokens or sampling.beam_width)


def _new_keys(inputs: SampleInputs, rows: Sequence[ScheduledSequence]) -> list[np.ndarray]:
    """For the positions of these rows, of each group that draws at random."""
    random = [(group.streams, group.rows.numpy()) for group in inputs.groups if group.streams is not None]
    if not random:
        return []
    positions = np.array([row.start + row.num_tokens for row in rows if row.samples])
    return [draw_keys(streams, positions[numbers]) for streams, numbers in random]
