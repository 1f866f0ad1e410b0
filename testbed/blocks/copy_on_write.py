"""Copy-on-write: members of a group share blocks until one of them writes into a block that others hold too.

Owns the copies of the step being planned. A device makes them after its swaps, so their sources must stay intact.
"""

from __future__ import annotations

from testbed.blocks.gpu_blocks import GPUBlocks
from testbed.blocks.kv_sequence import KVSequence
from testbed.blocks.pool import Pair


class CopyOnWrite:
    """pairs: the copies of the step, as (source, destination) blocks in the order decided."""

    def __init__(self, gpu: GPUBlocks, block_size: int) -> None:
        self.pairs: tuple[Pair, ...] = ()
        self._gpu, self._block_size = gpu, block_size

    def take(self) -> tuple[Pair, ...]:
        """Returns the copies of the decided step and clears them."""
        pairs, self.pairs = self.pairs, ()
        return pairs

    def num_needed(self, unit: tuple[KVSequence, ...]) -> int:
        """Returns how many blocks the next writes of these sequences need for copies."""
        num_sharing: dict[int, int] = {}  # by block to be written: how many sequences still share it
        num_copies = 0
        for seq in unit:
            block = self._shared_block(seq)
            if block is not None:
                num_left = num_sharing.get(block, self._gpu.pool.ref_counts[block])
                num_copies += num_left > 1  # the last sequence that shares it writes in place
                num_sharing[block] = num_left - 1
        return num_copies

    def write(self, seq: KVSequence) -> None:
        """Prepares the next write of a sequence: replaces a shared block by a copy of its own."""
        block = self._shared_block(seq)
        if block is not None:
            self._gpu.pool.drop(block)
            copy = self._gpu.take()
            seq.block_table[seq.num_computed_tokens // self._block_size] = copy
            self.pairs += ((block, copy),)

    def _shared_block(self, seq: KVSequence) -> int | None:
        """Returns the partly filled block that the sequence writes next, if it is shared. Published blocks are full."""
        index = seq.num_computed_tokens // self._block_size
        if index >= len(seq.block_table):
            return None
        block = seq.block_table[index]
        is_shared = self._gpu.pool.ref_counts[block] > 1 and self._gpu.cache.content_of[block] is None
        return block if is_shared else None

    def take_back(self, tables: list[list[int]]) -> dict[int, int]:
        """Cancels this step's copies into blocks of these tables, which are given up; returns {block: its source}."""
        if not self.pairs:
            return {}
        given_up = {block for table in tables for block in table}
        origins = {copy: source for source, copy in self.pairs if copy in given_up}
        self.pairs = tuple([pair for pair in self.pairs if pair[1] not in origins])
        return origins

    def unmoved_blocks(self) -> list[int]:
        """Returns the free blocks of this step's copies, which come after swap-ins: these must not take them."""
        counts = self._gpu.pool.ref_counts
        return list(dict.fromkeys([block for pair in self.pairs for block in pair if not counts[block]]))
