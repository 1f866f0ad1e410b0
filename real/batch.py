"""A plan's rows as flat arrays on the host. Reads the rows alone; knows no device and no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from testbed.core.plan import ScheduledSequence
from testbed.errors import RequestError


class FlatBatch(NamedTuple):
    """Rows one after the other, each with its new tokens."""

    token_ids: np.ndarray  # int64 [num_tokens]
    positions: np.ndarray  # int64 [num_tokens]
    slots: np.ndarray  # int64 [num_tokens], where each token's key and value go: block * block_size + offset
    query_lens: np.ndarray  # int64 [num_rows], new tokens
    context_lens: np.ndarray  # int64 [num_rows], positions known after the step
    block_tables: np.ndarray  # int32 [num_rows, max blocks of a row]
    placeholders: tuple[tuple[int, int], ...] = ()  # (place among the tokens, sequence): the step in flight draws it

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token."""
        return len(self.token_ids) == len(self.query_lens)


class Layout(NamedTuple):
    """What the arrays of any batch depend on besides its rows."""

    block_size: int
    vocab_size: int
    sliding_window: int | None = None


def flatten(rows: Sequence[ScheduledSequence], layout: Layout) -> FlatBatch:
    """The rows in their order. Raises RequestError for a token id outside the vocabulary."""
    starts = np.array([row.start for row in rows])  # [num_rows]
    query_lens = np.array([row.num_tokens for row in rows])
    token_ids = np.array([token for row in rows for token in row.tokens], dtype=np.int64)  # [num_tokens]
    assert len(token_ids) == query_lens.sum(), "a row's tokens are as many as it says"
    placeholders: tuple[tuple[int, int], ...] = ()
    if token_ids.min() < 0:
        ends = np.cumsum(query_lens).tolist()
        awaiting = [(end - 1, row.seq_id) for end, row in zip(ends, rows, strict=True) if row.awaits_token]
        token_ids[[place for place, _ in awaiting]] = 0
        placeholders = tuple(awaiting)
    _check_tokens(token_ids, rows, layout.vocab_size)
    context_lens = starts + query_lens
    tables = _block_tables(rows, starts, context_lens, layout)
    if len(token_ids) == len(rows):
        row_of_token, positions = np.arange(len(rows)), starts
    else:
        row_of_token = np.repeat(np.arange(len(rows)), query_lens)  # [num_tokens]
        before = np.cumsum(query_lens) - query_lens  # tokens of the rows before each
        positions = np.arange(len(token_ids)) + (starts - before)[row_of_token]
    blocks, offsets = np.divmod(positions, layout.block_size)
    slots = tables[row_of_token, blocks].astype(np.int64) * layout.block_size + offsets
    return FlatBatch(token_ids, positions, slots, query_lens, context_lens, tables, placeholders)


def cumulative(lengths: np.ndarray) -> np.ndarray:
    """[n] -> int32 [n + 1], starting with 0."""
    sums = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=sums[1:])
    return sums


def _block_tables(
    rows: Sequence[ScheduledSequence], starts: np.ndarray, context_lens: np.ndarray, layout: Layout
) -> np.ndarray:
    """The blocks that hold each row's context, int32 [num_rows, max blocks of a row], padded with 0.

    Also 0 are the blocks that a sliding window left behind: nothing is read from them.
    """
    num_blocks = -(-context_lens // layout.block_size)  # [num_rows]
    tables = np.zeros((len(rows), int(num_blocks.max())), dtype=np.int32)
    for table, row, num in zip(tables, rows, num_blocks.tolist(), strict=True):
        blocks = row.block_table
        table[:num] = blocks if len(blocks) == num else blocks[:num]
    if tables.min() < 0:
        is_released = tables < 0
        outside = _num_blocks_outside_window(starts, layout)
        is_read = np.arange(tables.shape[1]) >= outside[:, None]
        assert not (is_released & is_read).any(), "a row names the blocks of its window"
        tables[is_released] = 0
    return tables


def _num_blocks_outside_window(positions: np.ndarray, layout: Layout) -> np.ndarray:
    """How many of the first blocks no token from these positions on looks at."""
    if layout.sliding_window is None:
        return np.zeros_like(positions)
    first_attended: np.ndarray = np.maximum(0, positions + 1 - layout.sliding_window)
    return first_attended // layout.block_size


def _check_tokens(token_ids: np.ndarray, rows: Sequence[ScheduledSequence], vocab_size: int) -> None:
    if token_ids.min() >= 0 and token_ids.max() < vocab_size:
        return
    for row in rows:
        for offset, token in enumerate(row.tokens):
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"sequence {row.seq_id} has token id {token} at position {row.start + offset}; "
                    f"the model's vocabulary has {vocab_size} tokens, from 0 on"
                )
