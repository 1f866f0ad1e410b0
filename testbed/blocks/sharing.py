"""Prefix caching as sequences see it: the keys of their blocks, what of them can be hit, and when it is published.

Works on the block tables of the manager; where content is merged it puts one block in the place of another there.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from testbed.blocks.config import KVRules
from testbed.blocks.eviction import LRU, LRUByLastStep
from testbed.blocks.gpu_blocks import GPUBlocks
from testbed.blocks.keys import KeySource, TokenKeys
from testbed.blocks.prefix_cache import CacheEntry, LonePrefix
from testbed.blocks.swap_space import Content
from testbed.sequence import Sequence


class PrefixHit(NamedTuple):
    """A cached prefix. num_unreferenced: how many of its blocks count as free until the hit takes them."""

    num_tokens: int
    blocks: list[int]
    num_unreferenced: int


NO_HIT = PrefixHit(0, [], 0)


class _Chain:
    """Keys of a sequence's full blocks, and how many of its blocks are published (`entry` is the last one's, or they
    are a lone prefix together)."""

    __slots__ = ("contents", "entry", "frozen", "is_broken", "keys", "lone", "num_published")

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.contents: list[bytes] = []
        self.num_published = 0
        self.entry: CacheEntry | None = None
        self.lone: LonePrefix | None = None
        self.is_broken = False  # a key collision: what follows cannot be cached
        self.frozen: int | None = None  # the hit in tokens that was found first, where the rules keep it

    def start(self, num_published: int, entry: CacheEntry | None) -> None:
        self.num_published, self.entry, self.is_broken = num_published, entry, False
        self.lone = None

    def copy(self) -> _Chain:
        twin = _Chain()
        twin.keys, twin.contents = self.keys[:], self.contents[:]
        twin.num_published, twin.entry, twin.is_broken = self.num_published, self.entry, self.is_broken
        return twin


class PrefixSharing:
    """Chains of sequences over one prefix cache. keys None: no prefix caching, and every method does nothing.

    isolate_tenants: the tenant is part of the keys, beside a request's salt.
    """

    def __init__(
        self,
        gpu: GPUBlocks,
        tables: dict[int, list[int]],
        keys: KeySource | None,
        *,
        block_size: int,
        rules: KVRules,
        isolate_tenants: bool,
        sliding_window: int | None = None,
    ) -> None:
        self.num_queried_tokens = 0  # of first admissions
        self.num_hit_tokens = 0
        self.is_merged = gpu.is_merged and keys is not None
        self._gpu = gpu
        self._cache = gpu.cache
        self._tables = tables
        self._keys = keys
        self._block_size = block_size
        self._rules = rules
        self._isolate_tenants = isolate_tenants
        self._is_newest_found = rules.duplicates == "replaced"
        self._counts_hits = type(gpu.evictable) not in (LRU, LRUByLastStep)
        # what goes by the order of LRU, one block a content; keys that may collide by design are all kept
        self._keeps_lone = (
            gpu.is_lru and rules.duplicates == "listed" and sliding_window is None and type(keys) is TokenKeys
        )
        self._chains: dict[int, _Chain] = {}
        self._fresh: list[CacheEntry] = []  # allocated for their content by the step being planned

    # --- hits ---

    def lookup(self, seq: Sequence) -> PrefixHit:
        """The longest cached prefix of all known tokens but the last: at least one token is always computed.

        None for a request that wants something of each of its prompt's tokens: it computes them all.
        """
        if self._keys is None:
            return NO_HIT
        num_tokens = seq.num_tokens
        is_capped = self._rules.hit_cap == "last_block"
        max_blocks = (num_tokens - 1 if is_capped else num_tokens) // self._block_size
        chain = self._chain(seq, min(1, max_blocks))
        if seq.prompt_logprobs is not None:
            return NO_HIT
        if self._keeps_lone and not (max_blocks and self._is_known(chain.keys[0])):
            return NO_HIT
        self._chain(seq, max_blocks)
        if self._rules.hits_frozen:
            if chain.frozen is None:
                chain.frozen = self._num_computed_blocks(chain, max_blocks) * self._block_size
            return PrefixHit(min(chain.frozen, num_tokens - 1), [], 0)
        entries = self._cache.match(chain.keys, chain.contents, max_blocks)
        if not entries:
            return NO_HIT
        blocks = [entry.blocks[0] for entry in entries]
        counts = self._gpu.pool.ref_counts
        num_hit = min(len(blocks) * self._block_size, num_tokens - 1)
        return PrefixHit(num_hit, blocks, sum([1 for block in blocks if not counts[block]]))

    def _num_computed_blocks(self, chain: _Chain, max_blocks: int) -> int:
        """Blocks of the prefix that an earlier step has made, by bisection: where a deeper one is, so are others."""
        entries, counts = self._cache, self._gpu.pool.ref_counts
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

    def count(self, seq: Sequence, num_hit: int) -> None:
        """Notes the hit of a sequence's first admission."""
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = num_hit
            if self._keys is not None:
                self.num_queried_tokens += seq.num_tokens
                self.num_hit_tokens += num_hit

    def adopt(self, seq: Sequence, hit: PrefixHit) -> list[int]:
        """The beginning of a table: the hit's blocks, referenced."""
        for block in hit.blocks:
            self._gpu.reference(block)
        if self._keys is not None:
            chain = self._chains[seq.seq_id]
            chain.start(len(hit.blocks), self._cache.entry(hit.blocks[-1]) if hit.blocks else None)
            if self._counts_hits:
                for block in hit.blocks:
                    self._gpu.evictable.hit(block)
        return hit.blocks[:]

    # --- publication ---

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """The full blocks of the first `num_tokens` tokens may be hit from now on."""
        if self._keys is None:
            return
        num_full = num_tokens // self._block_size
        chain = self._chains[seq.seq_id]
        if num_full <= chain.num_published or chain.is_broken:
            return
        if chain.lone is not None or (self._keeps_lone and not chain.num_published and self._is_alone(seq, chain)):
            assert chain.lone is not None
            chain.lone.num_tokens = num_tokens
            return
        self._chain(seq, num_full)
        table, cache = self._tables[seq.seq_id], self._cache
        if not (self.is_merged or self._is_newest_found):
            first = chain.num_published
            newest = cache.publish_new(
                table[first:num_full], chain.keys[first:num_full], chain.contents[first:num_full], chain.entry
            )
            if newest is not None:
                chain.entry, chain.num_published = newest, num_full
                return
        for index in range(chain.num_published, num_full):
            entry = cache.entry(table[index])
            if entry is None:
                if self.is_merged:
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
        """Token `num_computed_tokens + num_more` has filled a block of each of these sequences."""
        if self._keys is None:
            return
        if self.is_merged or self._is_newest_found:
            for seq in seqs:
                self.publish(seq, seq.num_computed_tokens + num_more)
            return
        chains, tables, cache, next_key = self._chains, self._tables, self._cache, self._keys.next
        entries, entry_of = cache.entries, cache.entry_of
        num_new = 0
        for seq in seqs:
            seq_id = seq.seq_id
            chain = chains[seq_id]
            if chain.lone is not None:
                if num_more:
                    chain.lone.num_tokens = seq.num_computed_tokens + num_more
                continue
            table, parent = tables[seq_id], chain.entry
            index = len(table) - 1  # without lookahead the block that is filled is the last one
            if chain.num_published == index and parent is not None and not chain.is_broken:
                # keys of the chain are left as they are: they are made up for if the sequence is looked up again
                key, content = next_key(parent.key, seq.tokens, index)
                if key not in entries:
                    block = table[index]
                    entries[key] = entry_of[block] = chain.entry = CacheEntry(key, content, parent, [block])
                    parent.num_children += 1
                    chain.num_published = index + 1
                    num_new += 1
                    continue
            self.publish(seq, seq.num_computed_tokens + num_more)
        cache.num_cached_blocks += num_new

    def are_alone(self, seqs: list[Sequence]) -> bool:
        """Whether what these sequences compute next needs no publishing: nobody else has their prefixes."""
        if self._keys is None:
            return True
        chains = self._chains
        return None not in [chains[seq.seq_id].lone for seq in seqs]

    def settle(self, seq: Sequence) -> LonePrefix | None:
        """The sequence gives its blocks back, and what it computed is published; the prefix that it alone has."""
        if self._keys is None:
            return None
        chain = self._chains[seq.seq_id]
        lone, chain.lone = chain.lone, None
        if lone is not None:
            self._extend(lone)
        return lone

    def withdraw(self, seq: Sequence, num_tokens: int) -> None:
        """Takes `scheduled` back: only the first `num_tokens` tokens are computed, the rest may not be hit."""
        if self._keys is None:
            return
        chain, table = self._chains[seq.seq_id], self._tables[seq.seq_id]
        if chain.lone is not None:
            self._part(chain.lone)
        num_full = num_tokens // self._block_size
        for index in range(chain.num_published - 1, num_full - 1, -1):
            block = table[index]
            if self.is_merged and self._gpu.pool.ref_counts[block] > 1:
                return  # others of this batch compute it too
            assert self._gpu.pool.ref_counts[block] == 1, f"{seq} is withdrawn, but this step relies on its tokens"
            if self._cache.entry_of[block] is not None:  # None: another block with its content took its place
                self._cache.forget(block)
            chain.num_published = index
            chain.entry = self._cache.entry(table[index - 1]) if index else None
            chain.is_broken = chain.is_broken or (index > 0 and chain.entry is None)

    def planned(self) -> None:
        """The step is decided: what it allocated for its content counts as computed for the next one."""
        for entry in self._fresh:
            entry.is_computed = True
        self._fresh = []

    # --- prefixes that one sequence alone has ---

    def _is_known(self, key: int) -> bool:
        """Whether a prefix begins with this block. One that was alone is no more: somebody asks."""
        lone = self._cache.lone.get(key)
        if lone is not None:
            self._part(lone)
        return key in self._cache.entries

    def _is_alone(self, seq: Sequence, chain: _Chain) -> bool:
        """Whether nobody has published this sequence's first block: then all that it publishes is kept as one."""
        key = self._chain(seq, 1).keys[0]
        if self._is_known(key):
            return False
        chain.lone = LonePrefix(key, seq, self._tables[seq.seq_id], self.salt_of(seq))
        self._cache.lone[key] = chain.lone
        return True

    def _extend(self, lone: LonePrefix) -> None:
        """Its sequence still holds the blocks: the prefix is as long as the sequence has computed."""
        num_full = max(lone.num_tokens, lone.seq.num_computed_tokens) // self._block_size
        self._cache.extend_lone(lone, num_full)

    def _part(self, lone: LonePrefix) -> None:
        """Publishes the blocks of a prefix that was alone one by one."""
        assert self._keys is not None
        chain = self._chains.get(lone.seq.seq_id)
        is_held = chain is not None and chain.lone is lone
        if is_held:
            self._extend(lone)
        keys: list[int] = []
        contents: list[bytes] = []
        self._keys.extend(keys, contents, lone.seq.tokens, lone.num_blocks, lone.salt)
        blocks = self._cache.part(lone)
        newest = self._cache.publish_new(blocks, keys, contents, None)
        if chain is None or not is_held:
            return
        chain.lone, chain.entry, chain.num_published = None, newest, len(blocks)
        if newest is None:  # a collision of keys
            chain.num_published, chain.is_broken = 0, True

    # --- merged content ---

    def fill_by_content(self, seq: Sequence, table: list[int], num_tokens: int) -> None:
        """A table whose full blocks are, one after the other, those that hold the content, or new ones for it."""
        num_full = num_tokens // self._block_size
        chain = self._chain(seq, num_full)
        chain.start(0, None)
        for index in range(num_full):
            found = None
            if not chain.is_broken:
                found = self._cache.find(chain.keys[index], chain.contents[index], chain.entry)
            if found is not None:
                block = found.blocks[0]
                self._gpu.reference(block)
                self._gpu.evictable.hit(block)
            else:
                (block,) = self._gpu.take(1)
                if not chain.is_broken:
                    found = self._publish_fresh(block, index, chain)
            table.append(block)
            if found is None:
                chain.is_broken = True
            else:
                chain.entry, chain.num_published = found, index + 1
        if num_full * self._block_size < num_tokens:
            table += self._gpu.take(1)

    def by_content(self, seq: Sequence, index: int) -> int | None:
        """The block that holds the content of the sequence's block `index` on the GPU, now referenced, if any does."""
        chain = self._chains[seq.seq_id]
        found = None
        if not chain.is_broken:
            found = self._cache.find(chain.keys[index], chain.contents[index], chain.entry)
        if found is None:
            return None
        self._gpu.reference(found.blocks[0])
        return found.blocks[0]

    def _merge(self, table: list[int], index: int, chain: _Chain) -> CacheEntry | None:
        """A block that has become full: another with its content takes its place in the table, or it is published."""
        found = self._cache.find(chain.keys[index], chain.contents[index], chain.entry)
        if found is None:
            return self._publish_fresh(table[index], index, chain)
        self._gpu.release(table[index], index)
        table[index] = found.blocks[0]
        self._gpu.reference(table[index])
        return found

    def _publish_fresh(self, block: int, index: int, chain: _Chain) -> CacheEntry | None:
        entry = self._cache.publish(block, chain.keys[index], chain.contents[index], chain.entry)
        if entry is not None:
            entry.is_computed = False
            self._fresh.append(entry)
        return entry

    def num_referenced(self, contents: list[Content]) -> int:
        """How many of these full blocks others reference on the GPU, where a swap in takes those."""
        if not self.is_merged:
            return 0
        keys, values = [key for key, _ in contents], [value for _, value in contents]
        counts = self._gpu.pool.ref_counts
        return sum(1 for entry in self._cache.match(keys, values, len(keys)) if counts[entry.blocks[0]])

    # --- chains ---

    def _chain(self, seq: Sequence, num_blocks: int) -> _Chain:
        chain = self._chains.get(seq.seq_id)
        if chain is None:
            chain = self._chains[seq.seq_id] = _Chain()
        if len(chain.keys) < num_blocks:
            assert self._keys is not None
            self._keys.extend(chain.keys, chain.contents, seq.tokens, num_blocks, self.salt_of(seq))
        return chain

    def salt_of(self, seq: Sequence) -> str:
        """Sequences share prefixes only with those of the same salt."""
        salt = seq.request.cache_salt
        return f"{len(salt)}:{salt}{seq.request.tenant or ''}" if self._isolate_tenants else salt

    def full_contents(self, seq: Sequence) -> list[Content]:
        """Keys and contents of the full blocks that hold computed tokens; without caching of no meaning."""
        num_full = seq.num_computed_tokens // self._block_size
        if self._keys is None:
            return [(0, b"")] * num_full
        chain = self._chain(seq, num_full)
        return list(zip(chain.keys[:num_full], chain.contents[:num_full], strict=True))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child's blocks are its parent's."""
        if parent.seq_id in self._chains:
            lone = self._chains[parent.seq_id].lone
            if lone is not None:
                self._part(lone)
            self._chains[child.seq_id] = self._chains[parent.seq_id].copy()

    def restart(self, seq: Sequence) -> None:
        """The sequence has other blocks than before: they are to be published anew."""
        chain = self._chains.get(seq.seq_id)
        if chain is not None:
            chain.start(0, None)

    def stop(self, seq: Sequence) -> None:
        """A block is gone from the middle: a hit needs the whole prefix, so that nothing after the hole is cached."""
        chain = self._chains.get(seq.seq_id)
        if chain is not None:
            chain.is_broken = True

    def freed(self, seq: Sequence) -> None:
        """The sequence holds no blocks: its hit is looked up anew."""
        chain = self._chains.get(seq.seq_id)
        if chain is not None:
            chain.frozen = None

    def forget(self, seq: Sequence) -> None:
        """The sequence will not come back."""
        self._chains.pop(seq.seq_id, None)
