"""Prefixes that one sequence alone has: kept as one until somebody asks, then published block by block.

Most prefixes are never asked for by anyone else, so most of them are never hashed beyond their first block.
"""

from __future__ import annotations

from testbed.blocks.chains import Chain, Chains
from testbed.blocks.gpu_blocks import GPUBlocks
from testbed.blocks.prefix_cache import LonePrefix
from testbed.core.sequence import Sequence


class LonePrefixes:
    """Makes lone prefixes, keeps them as long as their sequences have computed, and parts them."""

    def __init__(self, gpu: GPUBlocks, chains: Chains, tables: dict[int, list[int]]) -> None:
        self._pool = gpu.pool
        self._cache = gpu.cache
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
        key = chain.keys[0] if chain.keys else self._chains.of(seq, 1).keys[0]
        if self.is_known(key):
            return None
        table, salt = self._tables[seq.seq_id], self._chains.salt_of(seq)
        chain.lone = LonePrefix(key, seq, table, salt, self._chains.block_size)
        self._cache.lone[key] = chain.lone
        return chain.lone

    def end(self, chain: Chain) -> LonePrefix | None:
        """The sequence gives its blocks back: the prefix that it alone has, if any, grows no more."""
        lone, chain.lone = chain.lone, None
        return lone

    def part(self, lone: LonePrefix) -> None:
        """Publishes the blocks of a prefix that was alone one by one."""
        source = self._chains.source
        assert source is not None
        del self._cache.lone[lone.key]
        lone.is_parted = True
        blocks = lone.blocks
        is_held = blocks is None
        if blocks is None:
            blocks = lone.table[: lone.num_held]
        keys: list[int] = []
        contents: list[bytes] = []
        tokens = lone.seq.first_tokens(len(blocks) * lone.block_size)
        source.extend(keys, contents, tokens, len(blocks), lone.salt)
        newest = self._cache.publish_new(blocks, keys, contents, None)
        if not is_held:
            return
        chain = self._chains.by_seq[lone.seq.seq_id]
        chain.lone, chain.entry, chain.num_published = None, newest, len(blocks)
        if newest is None:  # a collision of keys
            chain.num_published, chain.is_broken = 0, True
        else:
            self._pool.count(blocks)
