"""Allocation and release of GPU blocks: the pool's free blocks and the cached, unreferenced ones as one supply."""

from __future__ import annotations

from testbed.blocks.config import KVRules
from testbed.blocks.eviction import Evictor
from testbed.blocks.keys import KeySource
from testbed.blocks.kv_sequence import RELEASED
from testbed.blocks.pool import BlockPool
from testbed.blocks.prefix_cache import PrefixCache


class GPUBlocks:
    """Moves GPU blocks between three states: free, evictable (cached and unreferenced), and referenced by tables."""

    def __init__(self, num_blocks: int, rules: KVRules, evictable: Evictor, source: KeySource | None) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(num_blocks, source, is_newest_found=rules.duplicates == "replaced")
        self.evictable = evictable
        # blocks that can be allocated: the free ones and the evictable ones
        self.num_free = num_blocks
        self._is_one_queue = rules.free_order == "one_queue"
        # by block: the step that last scheduled an owner, noted when that owner released the block
        self._last_steps = [-1] * num_blocks if rules.lru_by == "last_step" else []

    def take(self) -> int:
        """Returns a block with one reference; evicts cached content if no block is free."""
        self.num_free -= 1
        if self.pool.num_free:
            return self.pool.allocate()
        block = self.evictable.pop()
        self.cache.forget(block)
        self.pool.revive(block)
        return block

    def reference(self, block: int) -> None:
        """Adds a reference to a block with content."""
        if self.pool.ref_counts[block]:
            self.pool.share(block)
        else:
            self.evictable.remove(block)
            self.pool.revive(block)
            self.num_free -= 1

    def release(self, block: int, depth: int) -> None:
        """Drops a reference. A block without references is evictable if it has content (with `free_order=one_queue` in
        any case), else free. depth: the number of blocks before it in its table."""
        if not self.pool.drop(block):
            return
        self.num_free += 1
        last_step = -1
        if self._last_steps:
            last_step, self._last_steps[block] = self._last_steps[block], -1
        if self.cache.content_of[block] is None and not self._is_one_queue:
            self.pool.put_back(block)
            return
        self.evictable.add(block, depth, last_step)

    def release_table(self, table: list[int], last_step: int = -1) -> None:
        """Releases a whole table, the deepest block first. last_step: the step that last scheduled its sequence."""
        for depth in range(len(table) - 1, -1, -1):
            block = table[depth]
            if block != RELEASED:
                if self._last_steps and last_step >= 0:
                    self._last_steps[block] = last_step
                self.release(block, depth)

    def empty(self) -> None:
        """Makes every block free and without content. No block may be referenced."""
        while len(self.evictable):
            block = self.evictable.pop()
            self.cache.forget(block)
            self.pool.put_back(block)
        assert self.pool.num_free == self.pool.num_blocks, "the blocks are emptied, and some are in use"

    def check_invariants(self, tables: list[list[int]]) -> None:
        """free + referenced + cached-and-unreferenced = total; counts equal the tables' references."""
        num_evictable = len(self.evictable)
        self.pool.check_invariants(tables, num_evictable)
        self.cache.check_invariants()
        assert self.num_free == self.pool.num_free + num_evictable
        assert all(self.cache.content_of[block] is None for block in self.pool.free)
        assert self._is_one_queue or self.cache.num_cached_blocks >= num_evictable
