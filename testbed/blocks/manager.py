"""The block manager: block tables of sequences, admission against the watermark, growth, copy-on-write, prefix caching,
swap, release.

It owns every table and every reference. A sequence is known to it by id, tokens and counts only; sequences that are
scheduled together (`Sequence.together`) are admitted, grown and moved together.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple

from testbed.blocks.config import KVRules, check_pool_sizes
from testbed.blocks.eviction import LRU, EvictionPolicy
from testbed.blocks.keys import KeySource
from testbed.blocks.pool import BlockPool
from testbed.blocks.prefix_cache import CacheEntry, PrefixCache
from testbed.blocks.swap_space import RELEASED, Content, SwapSpace
from testbed.errors import ConfigError
from testbed.sequence import Sequence


class Verdict(Enum):
    """May it be admitted, or swapped: now, later, or never?"""

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

    __slots__ = ("contents", "entry", "frozen", "is_broken", "keys", "num_published")

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.contents: list[bytes] = []
        self.num_published = 0
        self.entry: CacheEntry | None = None
        self.is_broken = False  # a key collision: what follows cannot be cached
        self.frozen: int | None = None  # the hit in tokens that was found first, where the rules keep it

    def copy(self) -> _Chain:
        twin = _Chain()
        twin.keys, twin.contents = self.keys[:], self.contents[:]
        twin.num_published, twin.entry, twin.is_broken = self.num_published, self.entry, self.is_broken
        return twin


class BlockManager:
    """Paged KV memory for sequences.

    num_cpu_blocks is the size of the swap pool. watermark: share of the GPU blocks that admissions leave free.
    key_source None: no prefix caching. isolate_tenants: the tenant is part of the keys, beside a request's salt. lookahead_slots: extra slots that a decoding sequence reserves (speculative
    decoding). sliding_window: tokens that attention looks back at; blocks wholly outside are released; None: all.
    Raises ConfigError for a pool that is larger than can be managed.
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
        isolate_tenants: bool = False,
        lookahead_slots: int = 0,
        sliding_window: int | None = None,
    ) -> None:
        check_pool_sizes(num_gpu_blocks, num_cpu_blocks)
        _check_goes_together(rules, block_size, lookahead_slots, sliding_window)
        self.block_size = block_size
        self.num_gpu_blocks = num_gpu_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self.watermark_blocks = int(watermark * (num_gpu_blocks + rules.watermark_extra_blocks))
        self.rules = rules
        self.isolate_tenants = isolate_tenants
        self.lookahead_slots = lookahead_slots
        self.sliding_window = sliding_window
        self.num_queried_tokens = 0  # of first admissions
        self.num_hit_tokens = 0
        self.copies: list[
            tuple[int, int]
        ] = []  # copies-on-write that the step being planned needs; the step takes them
        self._pool = BlockPool(num_gpu_blocks)
        self._cache = PrefixCache(num_gpu_blocks, eviction)
        self._evictable = eviction
        self._counts_hits = type(eviction) is not LRU
        self._keys = key_source
        self._tables: dict[int, list[int]] = {}
        self._chains: dict[int, _Chain] = {}
        self._is_one_queue = rules.free_order == "one_queue"
        self._is_merged = rules.duplicates == "merged" and key_source is not None
        self._is_newest_found = rules.duplicates == "replaced"
        self._fresh: list[CacheEntry] = []  # allocated for their content by the step being planned
        # the step that last scheduled an owner of the block, as known when an owner released it
        self._last_steps = array("q", [-1]) * num_gpu_blocks if rules.lru_by == "last_step" else None
        self._swap = SwapSpace(num_cpu_blocks, by_content=self._is_merged)
        self.publishes_at_allocation = rules.hits_visible != "commit"

    # --- state ---

    @property
    def num_free_blocks(self) -> int:
        """GPU blocks that an allocation can have: the free ones, and the cached ones that nothing references."""
        return self._pool.num_free + len(self._evictable)

    @property
    def num_free_cpu_blocks(self) -> int:
        return self._swap.num_free

    @property
    def is_plain(self) -> bool:
        """Whether a decoding sequence needs nothing but a new block at each border, whoever comes first."""
        return not (self._is_merged or self.lookahead_slots or self.sliding_window or self._last_steps is not None)

    @property
    def caches_prefixes(self) -> bool:
        return self._keys is not None

    def table(self, seq_id: int) -> list[int]:
        """Logical block i of the sequence is physical block `table[i]`."""
        return self._tables[seq_id]

    def cpu_table(self, seq_id: int) -> list[int]:
        """The same of a swapped-out sequence, in the CPU pool."""
        return self._swap.tables[seq_id]

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_held_blocks(self, seq: Sequence) -> int:
        """Distinct GPU blocks of the sequence and those scheduled together with it."""
        if seq.siblings is None:
            return sum(1 for block in self._tables[seq.seq_id] if block != RELEASED)
        return len(dict.fromkeys(b for one in seq.siblings for b in self._tables[one.seq_id] if b != RELEASED))

    # --- admission ---

    def lookup(self, seq: Sequence) -> PrefixHit:
        """The longest cached prefix of all known tokens but the last: at least one token is always computed."""
        if self._keys is None:
            return NO_HIT
        num_tokens = seq.num_tokens
        is_capped = self.rules.hit_cap == "last_block"
        max_blocks = (num_tokens - 1 if is_capped else num_tokens) // self.block_size
        chain = self._chain(seq, max_blocks)
        if self.rules.hits_frozen:
            if chain.frozen is None:
                chain.frozen = self._num_computed_blocks(chain, max_blocks) * self.block_size
            return PrefixHit(min(chain.frozen, num_tokens - 1), [], 0)
        entries = self._cache.match(chain.keys, chain.contents, max_blocks)
        if not entries:
            return NO_HIT
        blocks = [entry.blocks[0] for entry in entries]
        counts = self._pool.ref_counts
        num_hit = min(len(blocks) * self.block_size, num_tokens - 1)
        return PrefixHit(num_hit, blocks, sum([1 for block in blocks if not counts[block]]))

    def _num_computed_blocks(self, chain: _Chain, max_blocks: int) -> int:
        """Blocks of the prefix that an earlier step has made, by bisection: a block is taken to be there if a deeper is."""
        entries, counts = self._cache, self._pool.ref_counts
        parents: list[CacheEntry | None] = [None]
        for index in range(max_blocks):  # entries of a prefix outlive their blocks while deeper ones exist
            entry = entries.standing(chain.keys[index], chain.contents[index], parents[-1])
            if entry is None:
                break
            parents.append(entry)
        known = parents[1:]

        def is_missing(index: int) -> bool:
            entry = known[index] if index < len(known) else None
            return entry is None or not entry.blocks or not (entry.is_computed or not counts[entry.blocks[0]])

        return bisect_left(range(max_blocks), True, key=is_missing)

    def never_fits(self, seq: Sequence) -> bool:
        """Whether the known tokens and the watermark exceed the pool itself."""
        least = self.watermark_blocks if self.rules.watermark_when_idle else 0
        return self.num_gpu_blocks - self._num_held_at_most(seq.num_tokens) < least

    def never_fits_reason(self, seq: Sequence) -> str:
        return (
            f"{seq.num_tokens} tokens need {self._num_held_at_most(seq.num_tokens)} KV blocks beside a watermark of "
            f"{self.watermark_blocks}, and the pool has {self.num_gpu_blocks}"
        )

    def can_admit(self, seq: Sequence, num_tokens: int, hit: PrefixHit, *, is_idle: bool) -> Verdict:
        """Whether blocks for the sequence's first `num_tokens` tokens leave the watermark free."""
        if self.never_fits(seq):
            return Verdict.NEVER
        rules = self.rules
        watermark = self.watermark_blocks
        if (is_idle and not rules.watermark_when_idle) or (seq.num_preemptions and not rules.watermark_for_resumed):
            watermark = 0
        needed = self.num_blocks_for(seq.num_tokens if rules.allocate == "whole" else num_tokens)
        if rules.full_length_must_fit:
            needed = max(needed, self._num_held_at_most(seq.num_tokens))
        available = self.num_free_blocks
        if rules.admission_counts_hits:
            needed -= len(hit.blocks)
            available -= hit.num_unreferenced
        return Verdict.OK if available - needed >= watermark else Verdict.LATER

    def admit(self, seq: Sequence, num_tokens: int, hit: PrefixHit) -> None:
        """Gives the sequence a table: the hit's blocks, and new ones up to its first `num_tokens` tokens."""
        assert seq.seq_id not in self._tables, f"{seq} has a table already"
        if self.rules.allocate == "whole":
            num_tokens = seq.num_tokens
        table = self._tables[seq.seq_id] = []
        if self._is_merged:
            self._fill_by_content(seq, table, num_tokens)
        else:
            for block in hit.blocks:
                self._reference(block)
            table += hit.blocks
            table += self._take(self.num_blocks_for(num_tokens) - len(table))
            if self._keys is not None:
                chain = self._chains[seq.seq_id]
                chain.num_published = len(hit.blocks)
                chain.entry = self._cache.entry_of[table[chain.num_published - 1]] if chain.num_published else None
                chain.is_broken = False
                if self._counts_hits:
                    for block in hit.blocks:
                        self._evictable.hit(block)
        seq.num_slots = len(table) * self.block_size
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = hit.num_tokens
            if self._keys is not None:
                self.num_queried_tokens += seq.num_tokens
                self.num_hit_tokens += hit.num_tokens

    # --- growth and copy-on-write ---

    def can_grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether the next `num_tokens` tokens of a running sequence, and of those with it, get blocks now."""
        if self.rules.growth_test == "one_per_sequence":
            if seq.is_prefilling and seq.num_slots >= seq.num_tokens:  # its blocks are there: the next one is wanted
                return self.num_free_blocks >= (seq.num_tokens % self.block_size > 0)
            if self.num_free_blocks < len(seq.together):
                return False
        shared: dict[int, int] = {}  # shared blocks that would be copied, with the references that remain
        needed = sum(self._num_missing(one, num_tokens, shared) for one in seq.together)
        return needed <= self.num_free_blocks

    def _num_missing(self, seq: Sequence, num_tokens: int, shared: dict[int, int]) -> int:
        missing = self.num_blocks_for(self._num_wanted(seq, num_tokens)) - len(self._tables[seq.seq_id])
        block = self._shared_block(seq)
        if block is None:
            return max(0, missing)
        left = shared.setdefault(block, self._pool.ref_counts[block])
        shared[block] = left - 1
        return max(0, missing) + (left > 1)  # the last of those who share it writes in place

    def _num_wanted(self, seq: Sequence, num_tokens: int) -> int:
        lookahead = 0 if seq.is_prefilling else self.lookahead_slots
        return seq.num_computed_tokens + num_tokens + lookahead

    def _shared_block(self, seq: Sequence) -> int | None:
        """The partly filled block that the sequence writes next, if others hold it too. Published blocks are full."""
        if seq.group is None:
            return None
        index = seq.num_computed_tokens // self.block_size
        table = self._tables[seq.seq_id]
        if index >= len(table):
            return None
        block = table[index]
        return block if self._pool.ref_counts[block] > 1 and self._cache.entry_of[block] is None else None

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Slots for the next `num_tokens` tokens of one sequence; copies a shared block that it would write into."""
        block = self._shared_block(seq)
        if block is not None:
            self._pool.drop(block)
            (copy,) = self._take(1)
            self._tables[seq.seq_id][seq.num_computed_tokens // self.block_size] = copy
            self.copies.append((block, copy))
        missing = self._num_wanted(seq, num_tokens) - seq.num_slots
        if missing > 0:
            num_blocks = self.num_blocks_for(missing)
            self._tables[seq.seq_id] += self._take(num_blocks)
            seq.num_slots += num_blocks * self.block_size

    def grow_each(self, seqs: list[Sequence]) -> None:
        """One more block for each of these sequences, in order; there are enough."""
        tables, block_size = self._tables, self.block_size
        for seq, block in zip(seqs, self._take(len(seqs)), strict=True):
            tables[seq.seq_id].append(block)
            seq.num_slots += block_size

    def release_outside_window(self, seq: Sequence) -> None:
        """Gives back the blocks that no later token of the sequence looks at."""
        assert self.sliding_window is not None
        table = self._tables[seq.seq_id]
        index = max(0, seq.num_computed_tokens + 1 - self.sliding_window) // self.block_size - 1
        while index >= 0 and table[index] != RELEASED:
            self._release(table[index], index)
            table[index] = RELEASED
            index -= 1
            if seq.seq_id in self._chains:  # a hit needs the whole prefix: what comes after a hole is not cached
                self._chains[seq.seq_id].is_broken = True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares every block of its parent; nothing is allocated."""
        table = self._tables[parent.seq_id]
        for block in table:
            if block != RELEASED:
                self._pool.share(block)
        self._tables[child.seq_id] = table[:]
        child.num_slots = parent.num_slots
        if parent.seq_id in self._chains:
            self._chains[child.seq_id] = self._chains[parent.seq_id].copy()

    # --- publication ---

    def scheduled(self, seq: Sequence, num_tokens: int) -> None:
        """The first `num_tokens` tokens will be computed when this step ends; some systems let others hit them now."""
        if self.publishes_at_allocation:
            self.publish(seq, num_tokens)

    def planned(self) -> None:
        """The step is decided: what it allocated for its content counts as computed for the next one."""
        for entry in self._fresh:
            entry.is_computed = True
        self._fresh = []
        self._swap.planned()

    def withdraw(self, seq: Sequence, num_tokens: int) -> None:
        """Takes `scheduled` back: only the first `num_tokens` tokens are computed, the rest may not be hit."""
        if self._keys is None or self._is_merged:
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
        table, cache = self._tables[seq.seq_id], self._cache
        for index in range(chain.num_published, num_full):
            entry = cache.entry_of[table[index]]
            if entry is None:
                if self._is_merged:
                    entry = self._merge(table, index, chain)
                else:
                    entry = cache.publish(
                        table[index], chain.keys[index], chain.contents[index], chain.entry,
                        is_newest_found=self._is_newest_found,
                    )  # fmt: skip
            if entry is None:
                chain.is_broken = True
                return
            chain.entry = entry
            chain.num_published = index + 1

    def publish_each(self, seqs: list[Sequence], num_more: int) -> None:
        """The last of the first `num_computed_tokens + num_more` tokens has filled a block of each of these sequences."""
        if self._keys is None or self._is_merged or self._is_newest_found:
            for seq in seqs:
                self.publish(seq, seq.num_computed_tokens + num_more)
            return
        chains, tables, cache, next_key = self._chains, self._tables, self._cache, self._keys.next
        entries, entry_of = cache.entries, cache.entry_of
        for seq in seqs:
            table, chain = tables[seq.seq_id], chains[seq.seq_id]
            index = len(table) - 1  # without lookahead the block that is filled is the last one
            parent = chain.entry
            if chain.num_published == index and parent is not None and not chain.is_broken:
                # keys of the chain are left as they are: they are made up for if the sequence is looked up again
                key, content = next_key(parent.key, seq.tokens, index)
                if key not in entries:
                    entry = entries[key] = entry_of[table[index]] = chain.entry = CacheEntry(key, content, parent)
                    entry.blocks.append(table[index])
                    parent.num_children += 1
                    cache.num_cached_blocks += 1
                    chain.num_published = index + 1
                    continue
            self.publish(seq, seq.num_computed_tokens + num_more)

    def _fill_by_content(self, seq: Sequence, table: list[int], num_tokens: int) -> None:
        """A table whose full blocks are, one after the other, those that hold the content already, or new ones for it."""
        num_full = num_tokens // self.block_size
        chain = self._chain(seq, num_full)
        chain.num_published, chain.entry, chain.is_broken = 0, None, False
        for index in range(num_full):
            found = None
            if not chain.is_broken:
                found = self._cache.find(chain.keys[index], chain.contents[index], chain.entry)
            if found is not None:
                block = found.blocks[0]
                self._reference(block)
                self._evictable.hit(block)
            else:
                (block,) = self._take(1)
                if not chain.is_broken:
                    found = self._publish_fresh(block, index, chain)
            table.append(block)
            if found is None:
                chain.is_broken = True
            else:
                chain.entry, chain.num_published = found, index + 1
        if num_full * self.block_size < num_tokens:
            table += self._take(1)

    def _merge(self, table: list[int], index: int, chain: _Chain) -> CacheEntry | None:
        """A block that has become full: another with its content takes its place in the table, or it is published."""
        found = self._cache.find(chain.keys[index], chain.contents[index], chain.entry)
        if found is None:
            return self._publish_fresh(table[index], index, chain)
        self._release(table[index], index)
        table[index] = found.blocks[0]
        self._reference(table[index])
        return found

    def _publish_fresh(self, block: int, index: int, chain: _Chain) -> CacheEntry | None:
        entry = self._cache.publish(block, chain.keys[index], chain.contents[index], chain.entry)
        if entry is not None:
            entry.is_computed = False
            self._fresh.append(entry)
        return entry

    # --- swap ---

    def can_swap_out(self, seq: Sequence) -> Verdict:
        """Whether the CPU pool takes the sequence and those with it. NEVER: it is smaller than what they hold."""
        if self.rules.swap_test == "all_blocks":
            num_blocks = self.num_held_blocks(seq)
        else:
            full = [self._full_contents(one) for one in seq.together]
            num_blocks = sum(1 + len(one) - self._swap.num_held(one) for one in full)
        if num_blocks > self.num_cpu_blocks:
            return Verdict.NEVER
        return Verdict.OK if num_blocks <= self._swap.num_free else Verdict.LATER

    def swap_out(self, seq: Sequence) -> list[tuple[int, int]]:
        """Moves the blocks of the sequence and those with it to the CPU; the (GPU, CPU) pairs to copy."""
        seqs = seq.together
        contents = {one.seq_id: self._full_contents(one) for one in seqs} if self._is_merged else {}
        tables = {one.seq_id: self._tables.pop(one.seq_id) for one in seqs}
        origins = self._take_back_copies(tables.values())
        for table in tables.values():
            self._release_all(table)
        for one in seqs:
            one.num_slots = 0
        return [(origins.get(gpu, gpu), cpu) for gpu, cpu in self._swap.put(tables, contents)]

    def can_swap_in(self, seq: Sequence) -> Verdict:
        """Whether the blocks of a swapped-out sequence, and one more for each to grow, leave the watermark free."""
        seqs = seq.together
        if self.rules.swap_test == "all_blocks":
            tables = [self._swap.tables[one.seq_id] for one in seqs]
            num_blocks = len(dict.fromkeys(block for table in tables for block in table if block != RELEASED))
            num_blocks += max(len(seqs), self._num_growing(seqs, tables))
        else:
            num_blocks = sum(len(contents) - self._num_on_gpu(contents) for contents in map(self._full_contents, seqs))
            num_blocks += len(seqs)
        watermark = self.watermark_blocks if self.rules.watermark_for_swapped_in else 0
        if num_blocks + watermark > self.num_gpu_blocks:
            return Verdict.NEVER
        return Verdict.OK if self.num_free_blocks - num_blocks >= watermark else Verdict.LATER

    def _num_growing(self, seqs: list[Sequence], tables: list[list[int]]) -> int:
        """Blocks that the next token of each takes: new ones, and copies of a block that several would write into."""
        num_new = 0
        writers: dict[int, int] = {}
        for one, table in zip(seqs, tables, strict=True):
            num_new += max(0, self.num_blocks_for(self._num_wanted(one, 1)) - len(table))
            index = one.num_computed_tokens // self.block_size
            if index < len(table):
                writers[table[index]] = writers.get(table[index], 0) + 1
        return num_new + sum(writers.values()) - len(writers)

    def swap_in(self, seq: Sequence) -> list[tuple[int, int]]:
        """Moves the blocks of the sequence and those with it back to the GPU; the (CPU, GPU) pairs to copy."""
        moved: dict[int, int] = {}
        for one in seq.together:
            table = self._tables[one.seq_id] = []
            chain = self._chains.get(one.seq_id)
            if chain is not None:
                chain.num_published, chain.entry, chain.is_broken = 0, None, False
            num_full = len(self._full_contents(one)) if self._is_merged else 0
            for index, cpu_block in enumerate(self._swap.drop(one.seq_id)):
                if cpu_block == RELEASED:
                    block = RELEASED
                elif cpu_block in moved:
                    self._pool.share(moved[cpu_block])
                    block = moved[cpu_block]
                else:
                    (block,) = self._take(1) if index >= num_full else self._by_content(one, index)
                    moved[cpu_block] = block
                table.append(block)
                if index < num_full:
                    self.publish(one, (index + 1) * self.block_size)
            one.num_slots = len(table) * self.block_size
            if chain is not None and RELEASED in table[:1]:
                chain.is_broken = True
        return list(moved.items())

    def _by_content(self, seq: Sequence, index: int) -> list[int]:
        """The block that holds the content of the sequence's block `index` on the GPU, or a new one."""
        chain = self._chains[seq.seq_id]
        found = None
        if not chain.is_broken:
            found = self._cache.find(chain.keys[index], chain.contents[index], chain.entry)
        if found is None:
            return self._take(1)
        self._reference(found.blocks[0])
        return [found.blocks[0]]

    def _full_contents(self, seq: Sequence) -> list[Content]:
        """Keys and contents of the full blocks that hold computed tokens; without caching the keys are of no meaning."""
        num_full = seq.num_computed_tokens // self.block_size
        if self._keys is None:
            return [(0, b"")] * num_full
        chain = self._chain(seq, num_full)
        return list(zip(chain.keys[:num_full], chain.contents[:num_full], strict=True))

    def _num_on_gpu(self, contents: list[Content]) -> int:
        """How many of these full blocks others reference on the GPU, where a swap in takes those."""
        if not self._is_merged:
            return 0
        keys, values = [key for key, _ in contents], [value for _, value in contents]
        counts = self._pool.ref_counts
        return sum(1 for entry in self._cache.match(keys, values, len(keys)) if counts[entry.blocks[0]])

    # --- release ---

    def free(self, seq: Sequence, *, is_planning: bool = False) -> None:
        """Releases the table of one sequence, wherever it lies; cached blocks stay, evictable. It may come back.

        is_planning: within a step that is being decided, which `planned` ends.
        """
        table = self._tables.pop(seq.seq_id, None)
        if table is None:
            self._swap.drop(seq.seq_id)
            if not is_planning:
                self._swap.planned()
        else:
            if self._last_steps is not None and seq.last_step >= 0:
                for block in table:
                    self._last_steps[block] = seq.last_step
            self._take_back_copies([table])
            self._release_all(table)
        seq.num_slots = 0
        chain = self._chains.get(seq.seq_id)
        if chain is not None:
            chain.frozen = None

    def _take_back_copies(self, tables: Iterable[list[int]]) -> dict[int, int]:
        """Copies of this step into blocks that are given up now are not made; by such a block, the one it would copy."""
        if not self.copies:
            return {}
        given_up = dict.fromkeys(block for table in tables for block in table)
        origins = {copy: source for source, copy in self.copies if copy in given_up}
        self.copies = [pair for pair in self.copies if pair[1] not in origins]
        return origins

    def forget(self, seq: Sequence) -> None:
        """The sequence will not come back."""
        assert seq.seq_id not in self._tables, f"{seq} still has a table"
        self._chains.pop(seq.seq_id, None)

    # --- inside ---

    def _num_held_at_most(self, num_tokens: int) -> int:
        """Blocks that so many tokens of one sequence hold at a time, if it computes them in small chunks."""
        num_blocks = self.num_blocks_for(num_tokens)
        if self.sliding_window is not None and self.rules.allocate == "chunk":
            num_blocks = min(num_blocks, self.num_blocks_for(self.sliding_window) + 2)
        return num_blocks

    def _reference(self, block: int) -> None:
        """One more reference to a block with content."""
        if self._pool.ref_counts[block]:
            self._pool.share(block)
        else:
            self._evictable.remove(block)
            self._pool.revive(block)

    def _release_all(self, table: list[int]) -> None:
        """Deepest block first; where content is merged, in table order, as the order of equals goes by block ids."""
        evictable = self._evictable
        if not isinstance(evictable, LRU) or self._is_merged or self.sliding_window is not None:
            for index in range(len(table)) if self._is_merged else range(len(table) - 1, -1, -1):
                if table[index] != RELEASED:
                    self._release(table[index], index)
            return
        counts, entry_of, is_one_queue = self._pool.ref_counts, self._cache.entry_of, self._is_one_queue
        cached: list[int] = []
        for block in reversed(table):
            if counts[block] != 1:
                self._pool.drop(block)
                continue
            counts[block] = 0
            if is_one_queue or entry_of[block] is not None:
                cached.append(block)
            else:
                self._pool.put_back(block)
        evictable.add_all(cached)

    def _release(self, block: int, depth: int) -> None:
        if not self._pool.drop(block):
            return
        if self._cache.entry_of[block] is not None or self._is_one_queue:
            last_step = -1
            if self._last_steps is not None:
                last_step, self._last_steps[block] = self._last_steps[block], -1
            self._evictable.add(block, depth, last_step)
        else:
            self._pool.put_back(block)

    def _take(self, num_blocks: int) -> list[int]:
        pool = self._pool
        for _ in range(num_blocks - pool.num_free):
            block = self._evictable.pop()
            if self._cache.entry_of[block] is not None:
                self._cache.forget(block)
            pool.put_back(block)
        return pool.allocate(num_blocks)

    def _chain(self, seq: Sequence, num_blocks: int) -> _Chain:
        chain = self._chains.get(seq.seq_id)
        if chain is None:
            chain = self._chains[seq.seq_id] = _Chain()
        if len(chain.keys) < num_blocks:
            assert self._keys is not None
            salt = seq.request.cache_salt
            if self.isolate_tenants:
                salt = f"{len(salt)}:{salt}{seq.request.tenant or ''}"
            self._keys.extend(chain.keys, chain.contents, seq.tokens, num_blocks, salt)
        return chain

    def check_invariants(self) -> None:
        """free + referenced + cached-and-unreferenced = total; counts equal the tables' references."""
        self._pool.check_invariants()
        self._cache.check_invariants()
        self._swap.check_invariants()
        assert not self._tables.keys() & self._swap.tables.keys(), "a sequence is on both sides"
        references = [0] * self.num_gpu_blocks
        for table in self._tables.values():
            held = [block for block in table if block != RELEASED]
            assert len(set(held)) == len(held), "a table names a block twice"
            for block in held:
                references[block] += 1
        assert references == self._pool.ref_counts, "reference counts differ from the tables"
        num_referenced = sum(1 for count in references if count)
        assert self._pool.num_free + num_referenced + len(self._evictable) == self.num_gpu_blocks
        assert all(self._cache.entry_of[block] is None for block in self._pool.free_blocks())
        num_cached = self._cache.num_cached_blocks
        assert self._is_one_queue or num_cached >= len(self._evictable)


def _check_goes_together(rules: KVRules, block_size: int, lookahead_slots: int, sliding_window: int | None) -> None:
    """Raises ConfigError for options that the rules of a mirrored system do not know."""
    if lookahead_slots and (rules.growth_test != "exact" or rules.swap_test != "all_blocks"):
        raise ConfigError(
            f"scheduler.lookahead_slots is {lookahead_slots}, which scheduler.kv_rules.growth_test={rules.growth_test} and "
            f"swap_test={rules.swap_test} do not count; set it to 0, or the rules to exact and all_blocks"
        )
    if sliding_window is not None and rules.duplicates != "listed":
        raise ConfigError(
            f"cache.sliding_window={sliding_window} releases blocks that scheduler.kv_rules.duplicates={rules.duplicates} "
            "would still name; set it to null, or choose another preset"
        )
