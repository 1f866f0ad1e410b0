"""Prefix caching as sequences see it: what of a sequence can be hit, and when what it computes is published.

Works on the block tables of the manager. Prefixes that one sequence alone has are the business of `LonePrefixes`,
blocks that take the place of others that of `MergedContent`.
"""

from __future__ import annotations

from typing import NamedTuple

from testbed.blocks.chains import Chain, Chains
from testbed.blocks.config import KVRules
from testbed.blocks.eviction import LRU, LRUByLastStep
from testbed.blocks.gpu_blocks import GPUBlocks
from testbed.blocks.keys import TokenKeys
from testbed.blocks.lone_prefixes import LonePrefixes
from testbed.blocks.merged_content import MergedContent
from testbed.blocks.prefix_cache import LonePrefix
from testbed.core.sequence import Sequence


class PrefixHit(NamedTuple):
    """A cached prefix. num_unreferenced: how many of its blocks count as free until the hit takes them."""

    num_tokens: int
    blocks: list[int]
    num_unreferenced: int


NO_HIT = PrefixHit(0, [], 0)


class PrefixSharing:
    """Chains of sequences over one prefix cache. Without a source of keys there is no prefix caching: nothing is done.

    merged: finds the one block of a content, where the rules say that equal blocks become one.
    """

    def __init__(
        self,
        gpu: GPUBlocks,
        tables: dict[int, list[int]],
        chains: Chains,
        *,
        rules: KVRules,
    ) -> None:
        self.num_queried_tokens = 0  # of first admissions
        self.num_hit_tokens = 0
        self._gpu = gpu
        self._cache = gpu.cache
        self._tables = tables
        self._chains = chains
        self._keys = chains.source
        self._block_size = chains.block_size
        self._rules = rules
        self._is_newest_found = rules.duplicates == "replaced"
        self._counts_hits = type(gpu.evictable) not in (LRU, LRUByLastStep)
        is_merged = rules.duplicates == "merged" and chains.source is not None
        self.merged = MergedContent(gpu, chains) if is_merged else None
        # what goes by the order of LRU, one block a content; keys that may collide by design are all kept
        keeps_lone = gpu.lends and rules.duplicates == "listed" and type(chains.source) is TokenKeys
        self._lone = LonePrefixes(gpu, chains, tables) if keeps_lone else None

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
        chain = self._chains.of(seq, min(1, max_blocks))
        if seq.prompt_logprobs is not None:
            return NO_HIT
        if self._lone is not None and not (max_blocks and self._lone.is_known(chain.keys[0])):
            return NO_HIT
        self._chains.of(seq, max_blocks)
        if self.merged is not None and self._rules.hits_frozen:
            if chain.frozen is None:
                chain.frozen = self.merged.num_computed_blocks(chain, max_blocks) * self._block_size
            return PrefixHit(min(chain.frozen, num_tokens - 1), [], 0)
        entries = self._cache.match(chain.keys, chain.contents, max_blocks)
        if not entries:
            return NO_HIT
        blocks = [entry.blocks[0] for entry in entries]
        counts = self._gpu.pool.ref_counts
        num_hit = min(len(blocks) * self._block_size, num_tokens - 1)
        return PrefixHit(num_hit, blocks, sum([1 for block in blocks if not counts[block]]))

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
            chain = self._chains.by_seq[seq.seq_id]
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
        chain = self._chains.by_seq[seq.seq_id]
        if num_full <= chain.num_published or chain.is_broken:
            return
        lone = chain.lone
        if lone is None and self._lone is not None and not chain.num_published:
            lone = self._lone.begin(seq, chain)
        if lone is not None:
            lone.num_tokens = num_tokens
            return
        self._chains.of(seq, num_full)
        table, cache, merged = self._tables[seq.seq_id], self._cache, self.merged
        if merged is None and not self._is_newest_found:
            first = chain.num_published
            newest = cache.publish_new(
                table[first:num_full], chain.keys[first:num_full], chain.contents[first:num_full], chain.entry
            )
            if newest is not None:
                self._gpu.pool.count(table[first:num_full])
                chain.entry, chain.num_published = newest, num_full
                return
        for index in range(chain.num_published, num_full):
            entry = cache.entry(table[index])
            if entry is None:
                if merged is not None:
                    entry = merged.merge(table, index, chain)
                else:
                    entry = cache.publish(
                        table[index], chain.keys[index], chain.contents[index], chain.entry,
                        is_newest_found=self._is_newest_found,
                    )  # fmt: skip
            if entry is None:
                chain.is_broken = True
                return
            self._gpu.pool.count([table[index]])
            chain.entry = entry
            chain.num_published = index + 1

    def publish_each(self, seqs: list[Sequence], num_more: int) -> None:
        """Token `num_computed_tokens + num_more` has filled a block of each of these sequences."""
        if self._keys is None:
            return
        if self.merged is not None or self._is_newest_found:
            for seq in seqs:
                self.publish(seq, seq.num_computed_tokens + num_more)
            return
        chains = self._chains.by_seq
        for seq in seqs:
            chain = chains[seq.seq_id]
            if chain.lone is None:
                if not self._publish_next(seq, chain):
                    self.publish(seq, seq.num_computed_tokens + num_more)
            elif num_more:
                chain.lone.num_tokens = seq.num_computed_tokens + num_more

    def _publish_next(self, seq: Sequence, chain: Chain) -> bool:
        """Publishes the last block of a table, all others of which are published; False: it is for `publish` to do."""
        table, parent = self._tables[seq.seq_id], chain.entry
        index = len(table) - 1  # without lookahead the block that is filled is the last one
        if chain.num_published != index or parent is None or chain.is_broken:
            return False
        assert self._keys is not None
        # keys of the chain are left as they are: they are made up for if the sequence is looked up again
        key, content = self._keys.next(parent.key, seq.tokens, index)
        newest = self._cache.publish_next(table[index], key, content, parent)
        if newest is None:
            return False
        self._gpu.pool.count(table[index:])
        chain.entry, chain.num_published = newest, index + 1
        return True

    def are_alone(self, seqs: list[Sequence]) -> bool:
        """Whether what these sequences compute next needs no publishing: nobody else has their prefixes."""
        if self._keys is None:
            return True
        chains = self._chains.by_seq
        return None not in [chains[seq.seq_id].lone for seq in seqs]

    def settle(self, seq: Sequence) -> LonePrefix | None:
        """The sequence gives its blocks back, and what it computed is published; the prefix that it alone has."""
        return None if self._lone is None else self._lone.end(self._chains.by_seq[seq.seq_id])

    def withdraw(self, seq: Sequence, num_tokens: int) -> None:
        """Takes `scheduled` back: only the first `num_tokens` tokens are computed, the rest may not be hit."""
        if self._keys is None:
            return
        chain, table = self._chains.by_seq[seq.seq_id], self._tables[seq.seq_id]
        if self._lone is not None and chain.lone is not None:
            self._lone.part(chain.lone)
        num_full = num_tokens // self._block_size
        for index in range(chain.num_published - 1, num_full - 1, -1):
            block = table[index]
            if self.merged is not None and self._gpu.pool.ref_counts[block] > 1:
                return  # others of this batch compute it too
            assert self._gpu.pool.ref_counts[block] <= 1, f"{seq} is withdrawn, but this step relies on its tokens"
            if self._cache.entry_of[block] is not None:  # None: another block with its content took its place
                self._cache.forget(block)
            chain.num_published = index
            chain.entry = self._cache.entry(table[index - 1]) if index else None
            chain.is_broken = chain.is_broken or (index > 0 and chain.entry is None)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child's blocks are its parent's."""
        chain = self._chains.by_seq.get(parent.seq_id)
        if chain is not None:
            if self._lone is not None and chain.lone is not None:
                self._lone.part(chain.lone)
            self._chains.by_seq[child.seq_id] = chain.copy()
