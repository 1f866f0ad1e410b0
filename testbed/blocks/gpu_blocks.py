"""GPU blocks to take and to give back: the pool, and the cached blocks that nothing references, as one supply."""

from __future__ import annotations

from array import array

from testbed.blocks.config import KVRules
from testbed.blocks.eviction import LRU, EvictionPolicy, LRUByLastStep
from testbed.blocks.pool import BlockPool
from testbed.blocks.prefix_cache import LonePrefix, PrefixCache
from testbed.blocks.swap_space import RELEASED


class GPUBlocks:
    """Every GPU block is free, cached and evictable, or referenced by tables; this moves it between the three.

    gives_back_singly: whether tables give back blocks out of their middle; then each of their blocks is counted, and
    else those alone that others may reference (see `BlockPool`).
    """

    def __init__(
        self, num_blocks: int, rules: KVRules, eviction: EvictionPolicy, *, gives_back_singly: bool = False
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(num_blocks, eviction)
        self.evictable = eviction
        # blocks that an allocation can have: the free ones, and the cached ones that nothing references
        self.num_free = num_blocks
        self.is_lru = type(eviction) is LRU  # not a class of a user's that is derived from it
        self.lends = self.is_lru and not gives_back_singly and rules.duplicates != "merged"
        self.is_one_queue = rules.free_order == "one_queue"
        # the step that last scheduled an owner of the block, as known when an owner released it
        self.last_steps = array("q", [-1]) * num_blocks if rules.lru_by == "last_step" else None

    def take(self, num_blocks: int) -> list[int]:
        """New blocks for one table; cached content is evicted for them where the pool is short."""
        pool = self.pool
        self.num_free -= num_blocks
        num_short = num_blocks - pool.num_free
        if num_short <= 0:
            blocks = pool.lend(num_blocks)
        else:
            blocks = self._evict_runs(num_short) if self.is_lru else self._evict(num_short)
            if num_short < num_blocks:
                blocks += pool.lend(num_blocks - num_short)
        if not self.lends:
            pool.claim(blocks)
        return blocks

    def _evict(self, num_blocks: int) -> list[int]:
        """So many cached blocks that nothing references, the last one evicted first; they hold nothing now."""
        evicted = []
        for _ in range(num_blocks):
            evicted.append(self.evictable.pop())
            self.cache.forget_all(evicted[-1:])
        evicted.reverse()
        return evicted

    def _evict_runs(self, num_blocks: int) -> list[int]:
        """The same, of blocks that were released together as many as there are."""
        lru, cache = self.evictable, self.cache
        assert isinstance(lru, LRU)
        evicted: list[int] = []
        while True:
            blocks, owner = lru.pop_run(num_blocks - len(evicted))
            if isinstance(owner, LonePrefix) and not owner.is_parted:
                if not owner.blocks:
                    del cache.lone[owner.key]
            else:
                cache.forget_all(blocks)
            evicted = blocks + evicted if evicted else blocks
            if len(evicted) == num_blocks:
                return evicted

    def take_each(self, nums: list[int]) -> list[int]:
        """The same blocks as `take` would give for each of these numbers, one after the other."""
        if sum(nums) <= self.pool.num_free:
            return self.take(sum(nums))
        blocks: list[int] = []
        left = [num for num in nums if num]
        left.reverse()
        while left and (self.pool.num_free or not self.is_lru):
            blocks += self.take(left.pop())
        if left:
            taken = self.take(sum(left))  # the last one was evicted first
            while left:
                num = left.pop()
                blocks += taken[-num:]
                del taken[-num:]
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
            self.pool.put_back([block])

    def release_all(self, table: list[int], lone: LonePrefix | None = None) -> None:
        """A whole table, deepest block first; in table order where the order of equals goes by block ids. The list is
        not the caller's any more.

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
        released = self.pool.give_back(table, is_lent=self.lends)
        self.num_free += len(released)
        entry_of = self.cache.entry_of
        if lone is not None:
            num_cached = lone.num_held
            # what lies behind it may be shared: slots ahead that nobody has written
            assert released is table or released[:num_cached] == table[:num_cached], "a lone prefix is shared"
            cached, uncached = released, released[num_cached:]
            del cached[num_cached:]
            lone.blocks = cached
        elif self.is_one_queue:
            cached, uncached = released, []
        else:
            cached = [block for block in released if entry_of[block] is not None]
            uncached = [block for block in released if entry_of[block] is None] if len(cached) < len(released) else []
        if self.is_one_queue:
            evictable.add_run(uncached)
        else:
            uncached.reverse()
            self.pool.put_back(uncached)
        evictable.add_run(cached, lone)

    def check_invariants(self, tables: list[list[int]]) -> None:
        """free + referenced + cached-and-unreferenced = total; counts equal the tables' references."""
        self.pool.check_invariants()
        self.cache.check_invariants()
        entry_of = self.cache.entry_of
        references = [0] * self.pool.num_blocks
        for table in tables:
            held = [block for block in table if block != RELEASED]
            assert len(set(held)) == len(held), "a table names a block twice"
            for block in held:
                references[block] += 1
        for block, (num, count) in enumerate(zip(references, self.pool.ref_counts, strict=True)):
            is_lent = self.lends and num == 1 and count == 0
            assert num == count or is_lent, "reference counts differ from the tables"
            assert not is_lent or entry_of[block] is None, "a block that others may find is not counted"
        num_referenced = sum(1 for count in references if count)
        assert self.num_free == self.pool.num_free + len(self.evictable)
        assert self.pool.num_free + num_referenced + len(self.evictable) == self.pool.num_blocks
        free = self.pool.free_blocks()
        assert all(entry_of[block] is None for block in free)
        assert self.is_one_queue or self.cache.num_cached_blocks >= len(self.evictable)
        if isinstance(self.evictable, LRU):  # each block is in one place
            places = [*free, *self.evictable.blocks()]
            assert not any(references[block] for block in places), "a referenced block is free or evictable"
            assert len(set(places)) == len(places), "a block is free or evictable twice"
