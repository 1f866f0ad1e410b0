"""The block pool: fixed-size KV blocks by id, with reference counts. Every operation is O(1); misuse raises."""

from __future__ import annotations

from librt.vecs import vec
from mypy_extensions import i32

from testbed.blocks.kv_sequence import RELEASED

Pair = tuple[int, int]  # (source, destination) blocks


class BlockPool:
    """Blocks 0 … num_blocks - 1. A block is free, referenced, or kept unreferenced outside the pool.

    `allocate` and `drop` change reference counts; `put_back` returns a block of count 0 to the free list. They are
    separate so that a prefix cache can keep unreferenced blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0
        self.num_blocks = num_blocks
        self.ref_counts: vec[i32] = vec[i32]([0] * num_blocks)
        self.free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest id is handed out first
        self.num_repeats = 0  # references beyond the first one of each block

    @property
    def num_free(self) -> int:
        return len(self.free)

    def allocate(self) -> int:
        """Returns a free block, with count 1. Over-allocation raises."""
        assert self.free, "no block is free"
        block = self.free.pop()
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Adds a reference to a referenced block. Use after free raises."""
        count = self.ref_counts[block]
        assert count > 0, "a block is shared that nobody references"
        self.ref_counts[block] = count + 1
        self.num_repeats += 1

    def revive(self, block: int) -> None:
        """Sets the first reference to a block that was kept unreferenced."""
        assert self.ref_counts[block] == 0, "a block is revived that is referenced"
        self.ref_counts[block] = 1

    def drop(self, block: int) -> bool:
        """Drops a reference; returns True if it was the last. Double free raises."""
        count = self.ref_counts[block] - 1
        assert count >= 0, "a block is freed twice"
        self.ref_counts[block] = count
        self.num_repeats -= count > 0
        return count == 0

    def put_back(self, block: int) -> None:
        assert self.ref_counts[block] == 0, "a referenced block is put back"
        self.free.append(block)

    def check_invariants(self, tables: list[list[int]], num_kept: int) -> None:
        """tables: all tables that reference blocks. num_kept: blocks kept unreferenced outside the pool."""
        references = [0] * self.num_blocks
        for table in tables:
            held = [block for block in table if block != RELEASED]
            assert len(set(held)) == len(held), "a table names a block twice"
            for block in held:
                references[block] += 1
        assert references == list(self.ref_counts), "reference counts differ from the tables"
        assert self.num_repeats == sum(references) - sum(map(bool, references)), "references are miscounted"
        for block in self.free:
            assert references[block] >= 0, "a block is free twice"
            assert references[block] == 0, "a free block is referenced"
            references[block] = -1
        assert sum(map(bool, references)) + num_kept == self.num_blocks, "a block is lost"
