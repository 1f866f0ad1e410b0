"""Block tables of recently computed sequences, on the host and on the device. A plan has each table whole; blocks that
the device already has are not sent again.

Each table of a plan is compared with what was sent, block by block. If it has only grown, its new blocks are sent. Any
other change sends the whole table: a copy on write, a swap, a recompute, or an equal id in another run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from real.staging import send_array
from testbed.core.plan import ScheduledSequence

RELEASED = 0  # entry for blocks that a sliding window has passed: nothing is read from them


class NewBlocks(NamedTuple):
    """Table entries that the device does not have yet."""

    places: np.ndarray  # int64 [n], indices into all tables, flattened
    blocks: np.ndarray  # int32 [n]


class HostTables:
    """The tables on the host. blocks: int32 [capacity, width], a row for each sequence. Both are at least 1, and grow.

    Entries after a table's last block keep earlier values: existing blocks, or 0.
    """

    def __init__(self, capacity: int, width: int) -> None:
        self.blocks = np.zeros((capacity, width), dtype=np.int32)
        self._known: list[list[int]] = [[] for _ in self.blocks]  # each row's table in the last plan that had it
        self._places: dict[int, int] = {}  # by sequence
        self._free = list(range(len(self.blocks)))

    def update(self, rows: Sequence[ScheduledSequence]) -> tuple[np.ndarray, NewBlocks]:
        """Returns the index of each row's table, int64 [num_rows], and the new entries. Rows can repeat a sequence."""
        known, find = self._known, self._places.get
        found: list[int] = []
        changed: list[tuple[int, int, int]] = []  # (table, first new block, end of the new blocks)
        for row in rows:
            place = find(row.seq_id)
            if place is None:
                place = self._take_place(row.seq_id, rows)
            table = row.block_table
            if known[place] != table:
                changed.append((place, *self._learn(place, table)))
            found.append(place)
        return np.array(found, dtype=np.int64), self._new_blocks(changed)

    def forget(self) -> None:
        """Makes the next plans send whole tables, as the device may not have what was prepared last."""
        self._known = [[] for _ in self._known]

    def _take_place(self, seq_id: int, rows: Sequence[ScheduledSequence]) -> int:
        """Assigns a table to a sequence. If none is free, frees those of all sequences that are not in these rows."""
        if not self._free:
            kept = {row.seq_id for row in rows}
            gone = [other for other in self._places if other not in kept]
            self._free = [self._places.pop(other) for other in gone]
        if not self._free:
            self._grow(2 * len(self.blocks), self.blocks.shape[1])
        place = self._places[seq_id] = self._free.pop()
        self._known[place] = []
        return place

    def _grow(self, capacity: int, width: int) -> None:
        before, (num_rows, num_blocks) = self.blocks, self.blocks.shape
        self.blocks = np.zeros((capacity, width), dtype=np.int32)
        self.blocks[:num_rows, :num_blocks] = before
        self._known += [[] for _ in range(num_rows, capacity)]
        self._free += range(num_rows, capacity)

    def _learn(self, place: int, table: Sequence[int]) -> tuple[int, int]:
        """Stores a table; returns (first, end) of the blocks that are new."""
        table = list(table)
        if len(table) > self.blocks.shape[1]:
            self._grow(len(self.blocks), max(len(table), 2 * self.blocks.shape[1]))
        known, self._known[place] = self._known[place], table
        first = len(known) if table[: len(known)] == known else 0
        new = np.array(table[first:], dtype=np.int32)
        np.maximum(new, RELEASED, out=self.blocks[place, first : len(table)])
        return first, len(table)

    def _new_blocks(self, changed: list[tuple[int, int, int]]) -> NewBlocks:
        if not changed:
            return NewBlocks(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32))
        width = self.blocks.shape[1]
        places = np.concatenate(
            [np.arange(place * width + first, place * width + end) for place, first, end in changed]
        )
        return NewBlocks(places, self.blocks.reshape(-1)[places])


class DeviceTables:
    """The tables on the device: a copy of HostTables.blocks."""

    def __init__(self, host: HostTables, device: torch.device) -> None:
        self._host, self._device = host, device
        self._blocks = self._copy_of_all()

    @torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
    def _copy_of_all(self) -> Tensor:
        return send_array(self._host.blocks.copy(), self._device)

    def gather(self, out: Tensor, rows: Tensor, places: Tensor, blocks: Tensor) -> None:
        """Writes new blocks, then fills `out` int32 [num_rows, num_blocks] with the tables at `rows`.

        All tensors are on the device; does not wait. rows: int64 [num_rows]; places, blocks: as in NewBlocks.
        """
        if self._blocks.shape != self._host.blocks.shape:
            self._blocks = self._copy_of_all()
        elif len(places):
            self._blocks.view(-1).index_copy_(0, places, blocks)
        torch.index_select(self._blocks[:, : out.shape[1]], 0, rows, out=out)
