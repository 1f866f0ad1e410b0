"""Prefixes that one sequence alone has: kept as one until somebody asks, then published block by block.

Most prefixes are never asked for by anyone else, so most of them are never hashed beyond their first block.
"""

from __future__ import annotations

from testbed.blocks.chains import Chain, Chains
from testbed.blocks.prefix_cache import LonePrefix, PrefixCache
from testbed.sequence import Sequence


class LonePrefixes:
    """Makes lone prefixes, keeps them as long as their sequences have computed, and parts them."""

    def __init__(self, cache: PrefixCache, chains: Chains, tables: dict[int, list[int]]) -> None:
        self._cache = cache
        self._chains = chains
        self._tables = tables

    def is_known(self, key: int) -> bool:
        """Whether a prefix begins with this block. One that was alone is no more: somebody asks."""
        lone = self._cache.lone.get(key)
        if lone is not None:
            self.part(lone)
        return key in self._cache.entries

    def begin(self, seq: Sequence, chain: Chain) -> LonePrefix | None:
        """All that the sequence publishes is kept as one, if nobody has published its first block."""
        key = self._chains.of(seq, 1).keys[0]
        if self.is_known(key):
            return None
        chain.lone = LonePrefix(key, seq, self._tables[seq.seq_id], self._chains.salt_of(seq))
        self._cache.lone[key] = chain.lone
        return chain.lone

    def end(self, chain: Chain) -> LonePrefix | None:
        """The sequence gives its blocks back: the prefix that it alone has, if any, grows no more."""
        lone, chain.lone = chain.lone, None
        if lone is not None:
            self._extend(lone)
        return lone

    def part(self, lone: LonePrefix) -> None:
        """Publishes the blocks of a prefix that was alone one by one."""
        source = self._chains.source
        assert source is not None
        chain = self._chains.by_seq.get(lone.seq.seq_id)
        is_held = chain is not None and chain.lone is lone
        if is_held:
            self._extend(lone)
        keys: list[int] = []
        contents: list[bytes] = []
        source.extend(keys, contents, lone.seq.tokens, lone.num_blocks, lone.salt)
        blocks = self._cache.part(lone)
        newest = self._cache.publish_new(blocks, keys, contents, None)
        if chain is None or not is_held:
            return
        chain.lone, chain.entry, chain.num_published = None, newest, len(blocks)
        if newest is None:  # a collision of keys
            chain.num_published, chain.is_broken = 0, True

    def _extend(self, lone: LonePrefix) -> None:
        """Its sequence still holds the blocks: the prefix is as long as the sequence has computed."""
        num_full = max(lone.num_tokens, lone.seq.num_computed_tokens) // self._chains.block_size
        self._cache.extend_lone(lone, num_full)
