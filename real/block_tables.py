"""The block tables of the sequences that were computed lately, on the host and on the device: a plan says each table
whole, and what the device has of it is not sent again.

The plan alone decides: a table is compared with what was sent of it, block by block. One that has only grown gets its
new blocks; any other is sent anew: after a copy on write, a swap, a recompute, or for another run's sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from real.staging import send_array
from testbed.core.plan import ScheduledSequence

RELEASED = 0  # stands for the blocks that a sliding window left behind: nothing is read from them


class NewBlocks(NamedTuple):
    """What the device does not have yet."""

    places: np.ndarray  # int64 [n], among all tables, one after the other
    blocks: np.ndarray  # int32 [n]


class HostTables:
    """blocks: int32 [capacity, width], a row for each sequence. Both grow with what plans ask for.

    Behind a table's last block stands what was there before: blocks that exist, or 0.
    """

    def __init__(self, capacity: int, width: int) -> None:
        self.blocks = np.zeros((max(capacity, 1), max(width, 1)), dtype=np.int32)
        self._known: list[list[int]] = [[] for _ in self.blocks]  # what a plan last said of each row
        self._places: dict[int, int] = {}  # by sequence
        self._free = list(range(len(self.blocks)))

    def update(self, rows: Sequence[ScheduledSequence]) -> tuple[np.ndarray, NewBlocks]:
        """Where each row's table lies, int64 [num_rows], and what is new. A sequence may stand in several rows."""
        known, find = self._known, self._places.get
        found: list[int] = []
        changed: list[tuple[int, int, int]] = []  # (place, first and behind the last of the new blocks)
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
        """What was said of tables may not have come to the device: the next plans send them anew."""
        self._known = [[] for _ in self._known]

    def _take_place(self, seq_id: int, rows: Sequence[ScheduledSequence]) -> int:
        """Where there is no room, all that these rows do not compute are forgotten."""
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
        """(first, behind the last) of the blocks that were not known."""
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
    """The same on the device. `blocks` are HostTables'."""

    def __init__(self, host: HostTables, device: torch.device) -> None:
        self._host, self._device = host, device
        self._blocks = self._copy_of_all()

    @torch.inference_mode(False)  # ordinary memory: it may be written to anywhere
    def _copy_of_all(self) -> Tensor:
        return send_array(self._host.blocks.copy(), self._device)

    def gather(self, out: Tensor, rows: Tensor, places: Tensor, blocks: Tensor) -> None:
        """Takes in new blocks, then fills `out` int32 [num_rows, num_blocks] with the tables at `rows`.

        All on the device, behind what it is doing. rows: int64 [num_rows]; places, blocks: as in NewBlocks.
        """
        if self._blocks.shape != self._host.blocks.shape:
            self._blocks = self._copy_of_all()
        elif len(places):
            self._blocks.view(-1).index_copy_(0, places, blocks)
        torch.index_select(self._blocks[:, : out.shape[1]], 0, rows, out=out)
