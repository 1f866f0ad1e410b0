"""GPU blocks to take and to give back: the pool, and the cached blocks that nothing references, as one supply."""

from __future__ import annotations

from array import array
from itertools import chain

from testbed.blocks.config import KVRules
from testbed.blocks.eviction import LRU, EvictionPolicy, LRUByLastStep
from testbed.blocks.pool import BlockPool
from testbed.blocks.prefix_cache import LonePrefix, PrefixCache
from testbed.blocks.swap_space import RELEASED


class GPUBlocks:
    """Every GPU block is free, cached and evictable, or referenced by tables; this moves it between the three."""

    def __init__(self, num_blocks: int, rules: KVRules, eviction: EvictionPolicy) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(num_blocks, eviction)
        self.evictable = eviction
        # blocks that an allocation can have: the free ones, and the cached ones that nothing references
        self.num_free = num_blocks
        self.is_lru = type(eviction) is LRU  # not a class of a user's that is derived from it
        self.is_one_queue = rules.free_order == "one_queue"
        # the step that last scheduled an owner of the block, as known when an owner released it
        self.last_steps = array("q", [-1]) * num_blocks if rules.lru_by == "last_step" else None

    def take(self, num_blocks: int) -> list[int]:
        """New blocks, each with one reference; cached content is evicted for them where the pool is short."""
        pool, evictable = self.pool, self.evictable
        num_short = num_blocks - pool.num_free
        self.num_free -= num_blocks
        if num_short <= 0:
            return pool.allocate(num_blocks)
        if self.is_lru:
            assert isinstance(evictable, LRU)
            evicted = self._forget(evictable.pop_runs(num_short))
        else:
            evicted = []
            for _ in range(num_short):
                evicted.append(evictable.pop())
                self.cache.forget_all(evicted[-1:])
        evicted.reverse()
        pool.claim(evicted)
        return evicted if num_short == num_blocks else evicted + pool.allocate(num_blocks - num_short)

    def _forget(self, runs: list[tuple[list[int], object]]) -> list[int]:
        """The blocks of these runs, which no longer hold what they hold."""
        cache = self.cache
        for blocks, owner in runs:
            if isinstance(owner, LonePrefix) and not owner.is_parted:
                cache.shorten_lone(owner, len(blocks))
            else:
                cache.forget_all(blocks)
        return runs[0][0] if len(runs) == 1 else list(chain.from_iterable([blocks for blocks, _ in runs]))

    def take_each(self, nums: list[int]) -> list[int]:
        """The same blocks as `take` would give for each of these numbers, one after the other."""
        pool, total = self.pool, sum(nums)
        if total <= pool.num_free:
            return self.take(total)
        if pool.num_free or not self.is_lru:
            return [block for num in nums for block in self.take(num)]
        taken = self.take(total)[::-1]  # in the order evicted
        blocks: list[int] = []
        for num in nums:
            blocks += taken[len(blocks) : len(blocks) + num][::-1]
        return blocks

    def reference(self, block: int) -> None:
        """One more reference to a block with content."""
        if self.pool.ref_counts[block]:
            self.pool.share(block)
        else:
            self.evictable.remove(block)
            self.pool.revive(block)
            self.num_free -= 1

    def release(self, block: int, depth: int) -> None:
        """One reference less; without any, the block is evictable if it has content, else free."""
        if not self.pool.drop(block):
            return
        self.num_free += 1
        if self.cache.entry_of[block] is not None or self.is_one_queue:
            last_step = -1
            if self.last_steps is not None:
                last_step, self.last_steps[block] = self.last_steps[block], -1
            self.evictable.add(block, depth, last_step)
        else:
            self.pool.put_back(block)

    def release_all(self, table: list[int], lone: LonePrefix | None = None) -> None:
        """A whole table, deepest block first; in table order where the order of equals goes by block ids.

        lone: the prefix that its first blocks hold, if no others do.
        """
        evictable = self.evictable
        if not self.is_lru or table[:1] == [RELEASED]:
            is_by_id = isinstance(evictable, LRUByLastStep)
            for index in range(len(table)) if is_by_id else range(len(table) - 1, -1, -1):
                if table[index] != RELEASED:
                    self.release(table[index], index)
            return
        assert isinstance(evictable, LRU)
        released = self.pool.drop_all(table[::-1])
        self.num_free += len(released)
        if lone is not None:
            num_rest = len(released) - lone.num_blocks
            cached, uncached = released[num_rest:], released[:num_rest]
            # what lies behind it may be shared: slots ahead that nobody has written
            is_alone = len(released) == len(table) or cached == table[: lone.num_blocks][::-1]
            assert is_alone, "a lone prefix is shared"
        else:
            entry_of = self.cache.entry_of
            cached = released if self.is_one_queue else [block for block in released if entry_of[block] is not None]
            uncached = []
            if len(cached) < len(released):
                uncached = [block for block in released if entry_of[block] is None]
        if self.is_one_queue:
            evictable.add_all(uncached)
        else:
            for block in uncached:
                self.pool.put_back(block)
        evictable.add_all(cached, lone)

    def check_invariants(self, tables: list[list[int]]) -> None:
        """free + referenced + cached-and-unreferenced = total; counts equal the tables' references."""
        self.pool.check_invariants()
        self.cache.check_invariants()
        references = [0] * self.pool.num_blocks
        for table in tables:
            held = [block for block in table if block != RELEASED]
            assert len(set(held)) == len(held), "a table names a block twice"
            for block in held:
                references[block] += 1
        assert references == self.pool.ref_counts, "reference counts differ from the tables"
        num_referenced = sum(1 for count in references if count)
        assert self.num_free == self.pool.num_free + len(self.evictable)
        assert self.pool.num_free + num_referenced + len(self.evictable) == self.pool.num_blocks
        assert all(self.cache.entry_of[block] is None for block in self.pool.free_blocks())
        assert self.is_one_queue or self.cache.num_cached_blocks >= len(self.evictable)
