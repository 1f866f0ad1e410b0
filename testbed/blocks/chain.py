"""Records of the prefix cache: a sequence's chain of keys, the entry of a prefix, and prefixes without entries.

Plain records; other files of this package fill and change them.
"""

from __future__ import annotations

from array import array

from librt.vecs import vec
from mypy_extensions import i64

from testbed.blocks.keys import KeySource


class TokenSource:
    """An object whose first tokens can be read. Not an ABC: compiled code checks field accesses in its subclasses."""

    def first_tokens(self, num_tokens: int) -> array[int]:
        """Returns at least the first `num_tokens` tokens."""
        raise NotImplementedError


class CacheEntry:
    """One cached prefix. It exists while a block holds it or it is the parent of a longer prefix."""

    __slots__ = ("blocks", "content", "is_computed", "key", "num_children", "parent")

    def __init__(self, key: int, content: bytes, parent: CacheEntry | None) -> None:
        self.key, self.content, self.parent = key, content, parent
        self.blocks: list[int] = []  # the blocks that hold it; a lookup returns the first
        self.num_children = 0
        self.is_computed = True  # False: allocated for this content by the step being planned


class UnlistedPrefix:
    """A published prefix whose first block no other sequence has looked up. Only that block needs a key, and none has
    an entry.

    blocks: those that hold the prefix, in order. chain: the chain of the sequence that published it.
    """

    __slots__ = ("blocks", "chain")

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.blocks: vec[i64] = vec[i64]()


class Chain:
    """The keys of a sequence's full blocks, made when needed, and how many of these blocks are published.

    Published blocks are either listed, that is they have entries (`entry` is the last one's), or they are `unlisted`.
    """

    __slots__ = ("_tokens", "contents", "entry", "frozen_hit", "is_broken", "keys", "num_published", "salt", "unlisted")

    def __init__(self, tokens: TokenSource, salt: str) -> None:
        self.salt = salt
        self.keys: list[int] = []
        self.contents: list[bytes] = []
        self.num_published: i64 = 0
        self.entry: CacheEntry | None = None
        self.unlisted: UnlistedPrefix | None = None
        self.is_broken = False  # after a key collision or a released block: later blocks cannot be cached
        self.frozen_hit: int | None = None  # tokens of the first hit found, if the rules freeze hits
        self._tokens = tokens

    def make_keys(self, source: KeySource, num_blocks: int) -> None:
        """Makes keys and contents for at least `num_blocks` blocks."""
        if len(self.keys) < num_blocks:
            tokens = self._tokens.first_tokens(num_blocks * source.block_size)
            source.extend(self.keys, self.contents, tokens, num_blocks, self.salt)

    def start(self, num_published: int, entry: CacheEntry | None) -> None:
        """Sets the published blocks of a sequence that has a new table."""
        self.num_published, self.entry = num_published, entry
        self.unlisted, self.is_broken = None, False

    def copy_of(self, tokens: TokenSource) -> Chain:
        """Returns a copy for a sequence that shares the blocks. The prefix must be listed."""
        assert self.unlisted is None
        twin = Chain(tokens, self.salt)
        twin.keys, twin.contents = self.keys[:], self.contents[:]
        twin.num_published, twin.entry, twin.is_broken = self.num_published, self.entry, self.is_broken
        return twin
