"""The block manager: block tables of sequences, admission against the watermark, growth, prefix caching, release.

It owns every table and every reference. A sequence is known to it by id, tokens and computed count only.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from testbed.blocks.config import KVRules, check_pool_sizes
from testbed.blocks.eviction import EvictionPolicy
from testbed.blocks.keys import KeySource
from testbed.blocks.pool import BlockPool
from testbed.blocks.prefix_cache import CacheEntry, PrefixCache
from testbed.sequence import Sequence


class Verdict(Enum):
    """May a prompt be admitted: now, later, or never (it can never fit beside the watermark)?"""

    OK = auto()
    LATER = auto()
    NEVER = auto()


class PrefixHit(NamedTuple):
    """A cached prefix. num_unreferenced: how many of its blocks count as free until the hit takes them."""

    num_tokens: int
    blocks: list[int]
    num_unreferenced: int


NO_HIT = PrefixHit(0, [], 0)


class _Chain:
    """Keys of a sequence's full blocks, and how many of its blocks are published (`entry` is the last one's)."""

    __slots__ = ("contents", "entry", "is_broken", "keys", "num_published")

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.contents: list[bytes] = []
        self.num_published = 0
        self.entry: CacheEntry | None = None
        self.is_broken = False  # a key collision: what follows cannot be cached


class BlockManager:
    """Paged KV memory for sequences.

    num_cpu_blocks is the size of the swap pool. watermark: share of the GPU blocks that admissions leave free.
    key_source None: no prefix caching. Raises ConfigError for a pool that is larger than can be managed.
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        watermark: float,
        rules: KVRules,
        eviction: EvictionPolicy,
        key_source: KeySource | None,
    ) -> None:
        check_pool_sizes(num_gpu_blocks, num_cpu_blocks)
        self.block_size = block_size
        self.num_gpu_blocks = num_gpu_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self.watermark_blocks = int(watermark * (num_gpu_blocks + rules.watermark_extra_blocks))
        self.rules = rules
        self.num_queried_tokens = 0  # of first admissions
        self.num_hit_tokens = 0
        self._pool = BlockPool(num_gpu_blocks)
        self._cache = PrefixCache(num_gpu_blocks, eviction)
        self._evictable = eviction
        self._keys = key_source
        self._tables: dict[int, list[int]] = {}
        self._chains: dict[int, _Chain] = {}
        self.publishes_at_allocation = rules.hits_visible == "allocation"

    # --- state ---

    @property
    def num_free_blocks(self) -> int:
        """GPU blocks that an allocation can have: the free ones, and the cached ones that nothing references."""
        return self._pool.num_free + len(self._evictable)

    @property
    def num_free_cpu_blocks(self) -> int:
        return self.num_cpu_blocks

    def table(self, seq_id: int) -> list[int]:
        """Logical block i of the sequence is physical block `table[i]`."""
        return self._tables[seq_id]

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- admission ---

    def lookup(self, seq: Sequence) -> PrefixHit:
        """The longest cached prefix of all known tokens but the last: at least one token is always computed."""
        if self._keys is None:
            return NO_HIT
        max_blocks = (len(seq.tokens) - 1) // self.block_size
        chain = self._chain(seq, max_blocks)
        entries = self._cache.match(chain.keys, chain.contents, max_blocks)
        if not entries:
            return NO_HIT
        blocks = [entry.blocks[0] for entry in entries]
        counts = self._pool.ref_counts
        return PrefixHit(len(blocks) * self.block_size, blocks, sum(1 for block in blocks if not counts[block]))

    def can_admit(self, seq: Sequence, num_tokens: int, hit: PrefixHit, *, is_idle: bool) -> Verdict:
        """Whether blocks for the sequence's first `num_tokens` tokens leave the watermark free."""
        watermark = self.watermark_blocks
        least_watermark = watermark if self.rules.watermark_when_idle else 0
        if self.num_gpu_blocks - self.num_blocks_for(len(seq.tokens)) < least_watermark:
            return Verdict.NEVER
        if is_idle:
            watermark = least_watermark
        if self.rules.allocate == "whole" or self.rules.full_length_must_fit:
            num_tokens = len(seq.tokens)
        needed = self.num_blocks_for(num_tokens) - len(hit.blocks)
        available = self.num_free_blocks - hit.num_unreferenced
        return Verdict.OK if available - needed >= watermark else Verdict.LATER

    def admit(self, seq: Sequence, num_tokens: int, hit: PrefixHit) -> None:
        """Gives the sequence a table: the hit's blocks, and new ones up to its first `num_tokens` tokens."""
        assert seq.seq_id not in self._tables, f"{seq} has a table already"
        if self.rules.allocate == "whole":
            num_tokens = len(seq.tokens)
        counts = self._pool.ref_counts
        for block in hit.blocks:
            if counts[block]:
                self._pool.share(block)
            else:
                self._evictable.remove(block)
                self._pool.revive(block)
        table = list(hit.blocks)
        self._tables[seq.seq_id] = table
        table += self._take(self.num_blocks_for(num_tokens) - len(table))
        seq.num_slots = len(table) * self.block_size
        if self._keys is not None:
            chain = self._chains[seq.seq_id]
            chain.num_published = len(hit.blocks)
            chain.entry = self._cache.entry_of[table[chain.num_published - 1]] if chain.num_published else None
            chain.is_broken = False
            if seq.num_cached_tokens is None:
                self.num_queried_tokens += len(seq.tokens)
                self.num_hit_tokens += hit.num_tokens
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = hit.num_tokens

    # --- growth, publication, release ---

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Room for the sequence's first `num_tokens` tokens; False, and nothing changed, if there is not enough."""
        missing = num_tokens - seq.num_slots
        if missing <= 0:
            return True
        num_blocks = self.num_blocks_for(missing)
        if num_blocks > self.num_free_blocks:
            return False
        self._tables[seq.seq_id] += self._take(num_blocks)
        seq.num_slots += num_blocks * self.block_size
        return True

    def scheduled(self, seq: Sequence, num_tokens: int) -> None:
        """The first `num_tokens` tokens will be computed when this step ends; some systems let others hit them now."""
        if self.publishes_at_allocation:
            self.publish(seq, num_tokens)

    def withdraw(self, seq: Sequence, num_tokens: int) -> None:
        """Takes `scheduled` back: only the first `num_tokens` tokens are computed, the rest may not be hit."""
        if self._keys is None:
            return
        chain, table = self._chains[seq.seq_id], self._tables[seq.seq_id]
        num_full = num_tokens // self.block_size
        for index in range(chain.num_published - 1, num_full - 1, -1):
            assert self._pool.ref_counts[table[index]] == 1, f"{seq} is withdrawn, but this step relies on its tokens"
            self._cache.forget(table[index])
            chain.num_published = index
            chain.entry = self._cache.entry_of[table[index - 1]] if index else None

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """The full blocks of the first `num_tokens` tokens may be hit from now on."""
        if self._keys is None:
            return
        num_full = num_tokens // self.block_size
        chain = self._chains[seq.seq_id]
        if num_full <= chain.num_published or chain.is_broken:
            return
        self._chain(seq, num_full)
        table = self._tables[seq.seq_id]
        for index in range(chain.num_published, num_full):
            entry = self._cache.publish(table[index], chain.keys[index], chain.contents[index], chain.entry)
            if entry is None:
                chain.is_broken = True
                return
            chain.entry = entry
            chain.num_published = index + 1

    def free(self, seq: Sequence) -> None:
        """Releases the table, deepest block first; cached blocks stay, evictable. The sequence may come back."""
        cached = self._cache.entry_of
        for block in reversed(self._tables.pop(seq.seq_id)):
            if self._pool.drop(block):
                if cached[block] is None:
                    self._pool.put_back(block)
                else:
                    self._evictable.add(block, 0, 0)
        seq.num_slots = 0

    def forget(self, seq: Sequence) -> None:
        """The sequence will not come back."""
        assert seq.seq_id not in self._tables, f"{seq} still has a table"
        self._chains.pop(seq.seq_id, None)

    # --- inside ---

    def _take(self, num_blocks: int) -> list[int]:
        pool = self._pool
        short = num_blocks - pool.num_free
        while short > 0:
            pool.put_back(self._cache.evict())
            short -= 1
        return pool.allocate(num_blocks)

    def _chain(self, seq: Sequence, num_blocks: int) -> _Chain:
        chain = self._chains.get(seq.seq_id)
        if chain is None:
            chain = self._chains[seq.seq_id] = _Chain()
        if len(chain.keys) < num_blocks:
            assert self._keys is not None
            self._keys.extend(chain.keys, chain.contents, seq.tokens, num_blocks, seq.request.cache_salt)
        return chain

    def check_invariants(self) -> None:
        """free + referenced + cached-and-unreferenced = total; counts equal the tables' references."""
        self._pool.check_invariants()
        self._cache.check_invariants()
        references = [0] * self.num_gpu_blocks
        for table in self._tables.values():
            assert len(set(table)) == len(table), "a table names a block twice"
            for block in table:
                references[block] += 1
        assert references == self._pool.ref_counts, "reference counts differ from the tables"
        num_referenced = sum(1 for count in references if count)
        assert self._pool.num_free + num_referenced + len(self._evictable) == self.num_gpu_blocks
        assert all(self._cache.entry_of[block] is None for block in self._pool.free_blocks())
        assert self._cache.num_cached_blocks >= len(self._evictable)
