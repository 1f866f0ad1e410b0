"""Merged content: equal prefixes share their blocks (KV rule `duplicates=merged`), as in vLLM 0.8.5 V0.

A table is filled with the blocks that already hold its content. A block that becomes full is replaced by an existing
block of equal content. A block can be found from its allocation on, although it is computed only when the step runs.
"""

from __future__ import annotations

from bisect import bisect_left

from testbed.blocks.chain import CacheEntry, Chain
from testbed.blocks.gpu_blocks import GPUBlocks
from testbed.blocks.keys import KeySource


class MergedContent:
    """Finds or allocates the only block of a content. Changes the tables that it is given, and no others."""

    def __init__(self, gpu: GPUBlocks, source: KeySource) -> None:
        self._gpu = gpu
        self._cache = gpu.cache
        self._source = source
        self._fresh: list[CacheEntry] = []  # allocated for their content by the step being planned

    def fill(self, table: list[int], chain: Chain, num_tokens: int) -> None:
        """Fills an empty table with the blocks that hold the content of its full blocks, or else with new blocks."""
        num_full = num_tokens // self._source.block_size
        chain.make_keys(self._source, num_full)
        chain.start(0, None)
        for index in range(num_full):
            found = self._find(index, chain)
            if found is not None:
                block = found.blocks[0]
                self._gpu.reference(block)
                self._gpu.evictable.hit(block)
            else:
                block = self._gpu.take()
                if not chain.is_broken:
                    found = self._publish(block, index, chain)
            table.append(block)
            if found is None:
                chain.is_broken = True
            else:
                chain.entry, chain.num_published = found, index + 1
        if num_full * self._source.block_size < num_tokens:
            table.append(self._gpu.take())

    def block_of(self, chain: Chain, index: int) -> int | None:
        """Returns the GPU block that holds the content of the chain's block `index`, now referenced, or None."""
        found = self._find(index, chain)
        if found is None:
            return None
        self._gpu.reference(found.blocks[0])
        return found.blocks[0]

    def publish_next(self, chain: Chain, table: list[int]) -> bool:
        """Handles the chain's next block, which is now full: replaces it in the table by a block of equal content, or
        publishes it. Returns False if a different content has its key."""
        index = chain.num_published
        chain.make_keys(self._source, index + 1)
        entry = self._cache.entry(table[index])
        if entry is None:
            entry = self._find(index, chain)
            if entry is None:
                entry = self._publish(table[index], index, chain)
            else:
                self._gpu.release(table[index], index)
                table[index] = entry.blocks[0]
                self._gpu.reference(table[index])
        if entry is None:
            return False
        chain.entry, chain.num_published = entry, index + 1
        return True

    def planned(self) -> None:
        """Ends the planning of a step: blocks allocated for their content count as computed in later steps."""
        for entry in self._fresh:
            entry.is_computed = True
        self._fresh = []

    def num_computed_blocks(self, chain: Chain, max_blocks: int) -> int:
        """Returns how many leading blocks earlier steps computed; by bisection, assuming no gaps between them."""
        counts = self._gpu.pool.ref_counts
        parents: list[CacheEntry | None] = [None]
        for index in range(max_blocks):  # entries of a prefix outlive their blocks while deeper ones exist
            entry = self._cache.standing(chain, index, parents[-1])
            if entry is None:
                break
            parents.append(entry)
        known = parents[1:]

        def is_missing(index: int) -> bool:
            entry = known[index] if index < len(known) else None
            return entry is None or not entry.blocks or not (entry.is_computed or not counts[entry.blocks[0]])

        return bisect_left(range(max_blocks), True, key=is_missing)

    def num_referenced(self, chain: Chain, num_blocks: int) -> int:
        """Returns how many of the first `num_blocks` blocks others reference on the GPU; a swap-in reuses these."""
        counts = self._gpu.pool.ref_counts
        return sum([1 for entry in self._cache.match(chain, num_blocks) if counts[entry.blocks[0]]])

    def _find(self, index: int, chain: Chain) -> CacheEntry | None:
        return None if chain.is_broken else self._cache.find(chain, index, chain.entry)

    def _publish(self, block: int, index: int, chain: Chain) -> CacheEntry | None:
        entry = self._cache.publish(block, chain, index, chain.entry)
        if entry is not None:
            entry.is_computed = False
            self._fresh.append(entry)
        return entry
