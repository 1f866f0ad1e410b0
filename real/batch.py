"""A plan's rows as flat arrays on the host. Reads only the rows; knows no device and no model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from real.block_tables import HostTables, NewBlocks
from real.config import EngineOptions
from testbed.core.plan import ScheduledSequence


class FlatBatch(NamedTuple):
    """Rows one after the other, each with its new tokens."""

    token_ids: np.ndarray  # int64 [num_tokens]
    positions: np.ndarray  # int64 [num_tokens]
    slots: np.ndarray  # int64 [num_tokens], slot of each token's key and value: block * block_size + offset
    query_lens: np.ndarray  # int64 [num_rows], new tokens
    context_lens: np.ndarray  # int64 [num_rows], positions after the step
    table_rows: np.ndarray  # int64 [num_rows], index of each row's block table among the device's tables
    new_blocks: NewBlocks  # of all tables
    max_blocks: int  # the most blocks of a row's context
    placeholders: tuple[tuple[int, int], ...] = ()  # (index of a token that the step in flight samples, its sequence)

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token."""
        return self.num_tokens == self.num_rows


def flatten(
    rows: Sequence[ScheduledSequence], options: EngineOptions, vocab_size: int, tables: HostTables
) -> FlatBatch:
    """Flattens the rows in their order, and updates `tables` with theirs."""
    starts = np.array([row.start for row in rows])  # [num_rows]
    query_lens = np.array([row.num_tokens for row in rows])
    token_ids = np.fromiter(chain.from_iterable([row.tokens for row in rows]), dtype=np.int64)  # [num_tokens]
    assert len(token_ids) == query_lens.sum(), "a row's tokens are as many as it says"
    placeholders: tuple[tuple[int, int], ...] = ()
    if token_ids.min() < 0:
        ends = np.cumsum(query_lens).tolist()
        awaiting = [(end - 1, row.seq_id) for end, row in zip(ends, rows, strict=True) if row.awaits_token]
        token_ids[[place for place, _ in awaiting]] = 0
        placeholders = tuple(awaiting)
    assert 0 <= token_ids.min() <= token_ids.max() < vocab_size, "every token is in the model's vocabulary"
    context_lens = starts + query_lens
    _check_windows(rows, starts, options)
    table_rows, new_blocks = tables.update(rows)
    if len(token_ids) == len(rows):
        table_of_token, positions = table_rows, starts
    else:
        before = np.cumsum(query_lens) - query_lens  # tokens of the rows before each
        positions = np.arange(len(token_ids)) + np.repeat(starts - before, query_lens)  # [num_tokens]
        table_of_token = np.repeat(table_rows, query_lens)
    blocks, offsets = np.divmod(positions, options.block_size)
    slots = tables.blocks[table_of_token, blocks].astype(np.int64) * options.block_size + offsets
    max_blocks = -(-int(context_lens.max()) // options.block_size)
    return FlatBatch(
        token_ids, positions, slots, query_lens, context_lens, table_rows, new_blocks, max_blocks, placeholders
    )


def cumulative(lengths: np.ndarray) -> np.ndarray:
    """Returns cumulative sums: [n] -> int32 [n + 1], starting with 0."""
    sums = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=sums[1:])
    return sums


def _check_windows(rows: Sequence[ScheduledSequence], starts: np.ndarray, options: EngineOptions) -> None:
    """Asserts that each row's table still has the block of the first position to which its tokens attend."""
    window = options.sliding_window
    firsts = [0] * len(rows)
    if window is not None:
        firsts = (np.maximum(0, starts + 1 - window) // options.block_size).tolist()
    named = [row.block_table[first] for row, first in zip(rows, firsts, strict=True)]
    assert min(named) >= 0, "a row names the blocks of its window"
