"""Chains: the keys of each sequence's full blocks, and how much of it is published. Owns who may share with whom."""

from __future__ import annotations

from testbed.blocks.keys import KeySource
from testbed.blocks.prefix_cache import CacheEntry, LonePrefix
from testbed.blocks.swap_space import Content
from testbed.core.sequence import Sequence


class Chain:
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

    def copy(self) -> Chain:
        twin = Chain()
        twin.keys, twin.contents = self.keys[:], self.contents[:]
        twin.num_published, twin.entry, twin.is_broken = self.num_published, self.entry, self.is_broken
        return twin


class Chains:
    """The chains of all sequences. source None: no prefix caching, and there are none.

    isolate_tenants: the tenant is part of the keys, beside a request's salt.
    """

    def __init__(self, source: KeySource | None, *, block_size: int, isolate_tenants: bool) -> None:
        self.by_seq: dict[int, Chain] = {}
        self.source = source
        self.block_size = block_size
        self._isolate_tenants = isolate_tenants

    def of(self, seq: Sequence, num_blocks: int) -> Chain:
        """The sequence's chain, with at least so many keys."""
        chain = self.by_seq.get(seq.seq_id)
        if chain is None:
            chain = self.by_seq[seq.seq_id] = Chain()
        if len(chain.keys) < num_blocks:
            assert self.source is not None
            tokens = seq.first_tokens(num_blocks * self.block_size)
            self.source.extend(chain.keys, chain.contents, tokens, num_blocks, self.salt_of(seq))
        return chain

    def salt_of(self, seq: Sequence) -> str:
        """Sequences share prefixes only with those of the same salt."""
        salt = seq.request.cache_salt
        return f"{len(salt)}:{salt}{seq.request.tenant or ''}" if self._isolate_tenants else salt

    def full_contents(self, seq: Sequence) -> list[Content]:
        """Keys and contents of the full blocks that hold computed tokens; without caching of no meaning."""
        num_full = seq.num_computed_tokens // self.block_size
        if self.source is None:
            return [(0, b"")] * num_full
        chain = self.of(seq, num_full)
        return list(zip(chain.keys[:num_full], chain.contents[:num_full], strict=True))

    def restart(self, seq: Sequence) -> None:
        """The sequence has other blocks than before: they are to be published anew."""
        chain = self.by_seq.get(seq.seq_id)
        if chain is not None:
            chain.start(0, None)

    def stop(self, seq: Sequence) -> None:
        """A block is gone from the middle: a hit needs the whole prefix, so that nothing after the hole is cached."""
        chain = self.by_seq.get(seq.seq_id)
        if chain is not None:
            chain.is_broken = True

    def freed(self, seq: Sequence) -> None:
        """The sequence holds no blocks: its hit is looked up anew."""
        chain = self.by_seq.get(seq.seq_id)
        if chain is not None:
            chain.frozen = None

    def forget(self, seq: Sequence) -> None:
        """The sequence will not come back."""
        self.by_seq.pop(seq.seq_id, None)
