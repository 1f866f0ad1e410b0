"""Prefix caching for sequences: the lookup of hits, and the publication of computed blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from mypy_extensions import i64

from testbed.blocks.chain import Chain
from testbed.blocks.config import KVRules
from testbed.blocks.gpu_blocks import GPUBlocks
from testbed.blocks.keys import KeySource
from testbed.blocks.kv_sequence import KVSequence
from testbed.blocks.merged_content import MergedContent


class PrefixHit:
    """A cached prefix. num_unreferenced: how many of its blocks count as free until the hit takes them."""

    def __init__(self, num_tokens: int, blocks: list[int], num_unreferenced: int) -> None:
        self.num_tokens, self.blocks, self.num_unreferenced = num_tokens, blocks, num_unreferenced


NO_HIT: Final = PrefixHit(0, [], 0)


class Prefixes:
    """The chains of sequences over one prefix cache. Without a source of keys there is no prefix caching: sequences
    have no chains, nothing is hit and nothing is published.

    isolate_tenants: the keys depend on the tenant, in addition to the request's salt. merged: finds the only block of a
    content, if the rules merge equal blocks.
    """

    def __init__(self, gpu: GPUBlocks, source: KeySource | None, rules: KVRules, *, isolate_tenants: bool) -> None:
        self.num_queried_tokens = 0  # tokens of all sequences, each at its first admission
        self.num_hit_tokens = 0  # those of them that were found in the cache
        self.source = source
        self.merged = MergedContent(gpu, source) if rules.duplicates == "merged" and source is not None else None
        self._block_size: i64 = 1 if source is None else source.block_size
        self.gpu, self._isolate_tenants = gpu, isolate_tenants
        self._caps_by_block = rules.hit_cap == "last_block"
        self._keeps_hits = rules.hits_frozen

    def salt_of(self, seq: KVSequence) -> str:
        """Returns the salt of a sequence's keys: sequences share prefixes only if these are equal."""
        return f"{len(seq.salt)}:{seq.salt}{seq.tenant}" if self._isolate_tenants else seq.salt

    def chain_of(self, seq: KVSequence, source: KeySource, num_blocks: int) -> Chain:
        """Returns the sequence's chain, with at least `num_blocks` keys."""
        chain = seq.chain
        if chain is None:
            chain = seq.chain = Chain(seq, self.salt_of(seq))
        chain.make_keys(source, num_blocks)
        return chain

    # --- hits ---

    def lookup(self, seq: KVSequence) -> PrefixHit:
        """Returns the longest cached prefix of all tokens so far except the last: one token is always computed. NO_HIT
        for a request that must compute its whole prompt (`computes_whole_prompt`)."""
        if self.source is None:
            return NO_HIT
        num_tokens = seq.num_tokens
        max_blocks = (num_tokens - 1 if self._caps_by_block else num_tokens) // self._block_size
        chain = self.chain_of(seq, self.source, min(1, max_blocks))
        if seq.computes_whole_prompt:
            return NO_HIT
        if self.merged is not None and self._keeps_hits:
            chain.make_keys(self.source, max_blocks)
            if chain.frozen_hit is None:
                chain.frozen_hit = self.merged.num_computed_blocks(chain, max_blocks) * self._block_size
            return PrefixHit(min(chain.frozen_hit, num_tokens - 1), [], 0)
        if not max_blocks or not self.gpu.cache.is_known(chain.keys[0]):
            return NO_HIT
        chain.make_keys(self.source, max_blocks)
        blocks = [entry.blocks[0] for entry in self.gpu.cache.match(chain, max_blocks)]
        counts = self.gpu.pool.ref_counts
        num_hit = min(len(blocks) * self._block_size, num_tokens - 1)
        return PrefixHit(num_hit, blocks, sum([1 for block in blocks if not counts[block]]))

    def count_hit(self, seq: KVSequence, num_hit: int) -> None:
        """Counts the hit of a sequence's first admission."""
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = num_hit
            if self.source is not None:
                self.num_queried_tokens += seq.num_tokens
                self.num_hit_tokens += num_hit

    def adopt(self, seq: KVSequence, hit: PrefixHit) -> None:
        """Starts the sequence's table with the hit's blocks, and references them."""
        gpu, chain = self.gpu, seq.chain
        entry = gpu.cache.entry(hit.blocks[-1]) if hit.blocks else None
        is_there = entry is not None and chain is not None and entry.key == chain.keys[len(hit.blocks) - 1]
        assert is_there or not hit.blocks, "the hit's blocks hold something else by now: look it up again"
        for block in hit.blocks:
            gpu.reference(block)
            gpu.evictable.hit(block)
        seq.block_table = hit.blocks[:]
        if chain is not None:
            chain.start(len(hit.blocks), entry)

    # --- publication ---

    def publish(self, seq: KVSequence, num_tokens: i64) -> None:
        """Publishes the full blocks of the first `num_tokens` tokens: they can be hit from now on."""
        chain = seq.chain
        if chain is None:
            return
        while num_tokens >= (chain.num_published + 1) * self._block_size and not chain.is_broken:
            if self.merged is not None:
                chain.is_broken = not self.merged.publish_next(chain, seq.block_table)
            else:
                chain.is_broken = not self.gpu.cache.publish_next(chain, seq.block_table[chain.num_published])

    def withdraw(self, seq: KVSequence, num_tokens: int) -> None:
        """Unpublishes all blocks after the first `num_tokens` tokens, as they will not be computed in this step."""
        chain, table, cache = seq.chain, seq.block_table, self.gpu.cache
        if chain is None:
            return
        cache.list_chain(chain)
        for index in range(chain.num_published - 1, num_tokens // self._block_size - 1, -1):
            block = table[index]
            if self.merged is not None and self.gpu.pool.ref_counts[block] > 1:
                return  # other sequences of this batch compute it too
            assert self.gpu.pool.ref_counts[block] <= 1, "a victim is withdrawn, but this step relies on its tokens"
            cache.forget(block)  # it may have no content: a block of equal content may have replaced it
            chain.num_published = index
            chain.entry = cache.entry(table[index - 1]) if index else None
            chain.is_broken = chain.is_broken or (index > 0 and chain.entry is None)

    def fork(self, parent: KVSequence, child: KVSequence) -> None:
        """Copies the parent's chain for a child that shares its blocks."""
        if parent.chain is not None:
            self.gpu.cache.list_chain(parent.chain)
            child.chain = parent.chain.copy_of(child)

    def num_merged_blocks(self, seq: KVSequence) -> int:
        """Returns how many blocks, from the first on, may be merged with equal blocks of others: the full, computed
        ones. Makes their keys. 0 if the rules do not merge equal blocks."""
        if self.source is None or self.merged is None:
            return 0
        num_full = seq.num_computed_tokens // self._block_size
        self.chain_of(seq, self.source, num_full)
        return num_full

    def reset(self, waiting: Iterable[KVSequence]) -> None:
        """Empties the cache and forgets the chains of waiting sequences. No block may be referenced."""
        for seq in waiting:
            self.forget(seq)
        self.gpu.empty()

    def forget(self, seq: KVSequence) -> None:
        """Forgets the chain of a sequence; the blocks that it published stay cached."""
        if seq.chain is not None:
            seq.chain.unlisted = None  # leaves no reference cycle
            seq.chain = None
