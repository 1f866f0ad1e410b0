"""What the prefix cache knows of a sequence and of a prefix: chains of keys, entries, prefixes that are not listed.

Plain records, which the files around this one fill in and change.
"""

from __future__ import annotations

from array import array

from librt.vecs import vec
from mypy_extensions import i64

from testbed.blocks.keys import KeySource


class TokenSource:
    """Somebody whose first tokens can be read. No ABC: below one, compiled code checks every access to a field."""

    def first_tokens(self, num_tokens: int) -> array[int]:
        """At least its first `num_tokens` tokens."""
        raise NotImplementedError


class CacheEntry:
    """One cached prefix. Lives while a block holds it or a longer prefix hangs on it."""

    __slots__ = ("blocks", "content", "is_computed", "key", "num_children", "parent")

    def __init__(self, key: int, content: bytes, parent: CacheEntry | None) -> None:
        self.key, self.content, self.parent = key, content, parent
        self.blocks: list[int] = []  # the first one is found
        self.num_children = 0
        self.is_computed = True  # False: allocated for this content by the step being planned


class UnlistedPrefix:
    """A prefix that begins with a block that nobody else has asked for: but for the first, its blocks have no keys yet,
    and none has an entry.

    blocks: those that hold it, from the first on. chain: of the sequence that published it.
    """

    __slots__ = ("blocks", "chain")

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.blocks: vec[i64] = vec[i64]()


class Chain:
    """The keys of a sequence's full blocks, as far as somebody asked for them, and how many of them are published.

    They are listed (`entry` is the last one's), or they are one prefix that is not (`unlisted`).
    """

    __slots__ = ("_tokens", "contents", "entry", "frozen_hit", "is_broken", "keys", "num_published", "salt", "unlisted")

    def __init__(self, tokens: TokenSource, salt: str) -> None:
        self.salt = salt
        self.keys: list[int] = []
        self.contents: list[bytes] = []
        self.num_published: i64 = 0
        self.entry: CacheEntry | None = None
        self.unlisted: UnlistedPrefix | None = None
        self.is_broken = False  # a key collision, or a hole: what follows cannot be cached
        self.frozen_hit: int | None = None  # the hit in tokens that was found first, where the rules keep it
        self._tokens = tokens

    def make_keys(self, source: KeySource, num_blocks: int) -> None:
        """At least so many keys and contents."""
        if len(self.keys) < num_blocks:
            tokens = self._tokens.first_tokens(num_blocks * source.block_size)
            source.extend(self.keys, self.contents, tokens, num_blocks, self.salt)

    def start(self, num_published: int, entry: CacheEntry | None) -> None:
        """The sequence has other blocks than before."""
        self.num_published, self.entry = num_published, entry
        self.unlisted, self.is_broken = None, False

    def copy_of(self, tokens: TokenSource) -> Chain:
        """The same for a sequence that shares the blocks. The prefix must be listed."""
        assert self.unlisted is None
        twin = Chain(tokens, self.salt)
        twin.keys, twin.contents = self.keys[:], self.contents[:]
        twin.num_published, twin.entry, twin.is_broken = self.num_published, self.entry, self.is_broken
        return twin
