"""The prefix cache: which physical blocks hold which content. Owns entries and unreferenced cached blocks.

An entry stands for one prefix: a full block's content after the entry of the block before it. It is found by its 64-bit
key and then confirmed: same content, same parent entry. As parents are confirmed in turn, a collision of keys can never
join two users' KV. Several blocks may hold the same content (two sequences computed it side by side); each is listed.

Most prefixes are never asked for by anyone else. As long as one sequence alone has published a first block of its key,
all that it publishes is one `LonePrefix`, and nothing is hashed but that first block.
"""

from __future__ import annotations

from testbed.blocks.eviction import EvictionPolicy
from testbed.sequence import Sequence


class CacheEntry:
    """One cached prefix. Lives while a block holds it or a longer prefix hangs on it."""

    __slots__ = ("blocks", "content", "is_computed", "key", "num_children", "parent")

    def __init__(
        self, key: int, content: bytes, parent: CacheEntry | None, blocks: list[int], num_children: int = 0
    ) -> None:
        self.key = key
        self.content = content
        self.parent = parent
        self.blocks = blocks  # the first one is found
        self.num_children = num_children
        self.is_computed = True  # False: allocated for this content by the step being planned


class LonePrefix:
    """The first `num_blocks` blocks of a table, whose content no other blocks have: entries that are not yet made.

    While its sequence holds the blocks, it is as long as the sequence has computed, and `num_blocks` is brought up to
    date when somebody asks. Then they are given up from the deepest on, as LRU does. salt: of the keys, which are made
    from the sequence's tokens. num_tokens: these are published, whether or not the sequence has computed them.
    """

    __slots__ = ("is_parted", "key", "num_blocks", "num_tokens", "salt", "seq", "table")

    def __init__(self, key: int, seq: Sequence, table: list[int], salt: str) -> None:
        self.key = key  # of its first block
        self.seq = seq
        self.table = table
        self.salt = salt
        self.num_blocks = 0
        self.num_tokens = 0
        self.is_parted = False  # entries were made


class PrefixCache:
    """Content of blocks, by key."""

    __slots__ = ("entries", "entry_of", "evictable", "lone", "num_cached_blocks")

    def __init__(self, num_blocks: int, eviction: EvictionPolicy) -> None:
        self.entries: dict[int, CacheEntry] = {}  # by key
        self.lone: dict[int, LonePrefix] = {}  # by the key of the first block, which no entry has
        self.entry_of: list[CacheEntry | None] = [None] * num_blocks  # of blocks that are in no lone prefix
        self.evictable = eviction  # free blocks whose content may still be hit
        self.num_cached_blocks = 0

    def entry(self, block: int) -> CacheEntry | None:
        """What the block holds, if anything. Its prefix is not kept as a lone one."""
        return self.entry_of[block]

    def find(self, key: int, content: bytes, parent: CacheEntry | None) -> CacheEntry | None:
        """The entry of this content after `parent`, if a block holds it."""
        entry = self.entries.get(key)
        if entry is None or not entry.blocks or entry.parent is not parent or entry.content != content:
            return None
        return entry

    def standing(self, key: int, content: bytes, parent: CacheEntry | None) -> CacheEntry | None:
        """The same, whether or not a block holds it still."""
        entry = self.entries.get(key)
        return entry if entry is not None and entry.parent is parent and entry.content == content else None

    def match(self, keys: list[int], contents: list[bytes], max_blocks: int) -> list[CacheEntry]:
        """The entries of the longest cached prefix, at most `max_blocks` of them."""
        matched: list[CacheEntry] = []
        entries = self.entries
        parent: CacheEntry | None = None
        for index in range(max_blocks):
            entry = entries.get(keys[index])
            if entry is None or not entry.blocks or entry.parent is not parent or entry.content != contents[index]:
                break
            matched.append(entry)
            parent = entry
        return matched

    def publish(
        self, block: int, key: int, content: bytes, parent: CacheEntry | None, *, is_newest_found: bool = False
    ) -> CacheEntry | None:
        """Says that `block` holds this content. None if another content has the key: the block stays uncached.

        is_newest_found: the block takes the place of an older one of the same content, which is forgotten.
        """
        assert self.entry_of[block] is None, f"block {block} is published twice"
        if is_newest_found and parent is not None:
            parent = self._alive(parent)
            if parent is None:
                return None
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = CacheEntry(key, content, parent, [])
            if parent is not None:
                parent.num_children += 1
        elif entry.parent is not parent or entry.content != content:
            self._drop(parent)  # it may have been made for this block
            return None
        elif is_newest_found and entry.blocks:
            self.entry_of[entry.blocks.pop()] = None
            self.num_cached_blocks -= 1
        entry.blocks.append(block)
        self.entry_of[block] = entry
        self.num_cached_blocks += 1
        return entry

    def publish_new(
        self, blocks: list[int], keys: list[int], contents: list[bytes], parent: CacheEntry | None
    ) -> CacheEntry | None:
        """`publish` for these blocks, one after the other; None, and nothing done, if one of the keys is known."""
        if len(dict.fromkeys(keys)) < len(keys) or not self.entries.keys().isdisjoint(keys):
            return None
        entries, entry_of = self.entries, self.entry_of
        if parent is not None:
            parent.num_children += 1
        for block, key, content in zip(blocks, keys, contents, strict=True):
            assert entry_of[block] is None, f"block {block} is published twice"
            parent = entries[key] = entry_of[block] = CacheEntry(key, content, parent, [block], 1)
        assert parent is not None
        parent.num_children = 0
        self.num_cached_blocks += len(blocks)
        return parent

    def extend_lone(self, lone: LonePrefix, num_blocks: int) -> None:
        """The first `num_blocks` blocks of its table hold the prefix."""
        assert num_blocks >= lone.num_blocks, "what is held is not given up"
        self.num_cached_blocks += num_blocks - lone.num_blocks
        lone.num_blocks = num_blocks

    def shorten_lone(self, lone: LonePrefix, num_blocks: int) -> None:
        """So many blocks, the deepest, no longer hold it."""
        assert num_blocks <= lone.num_blocks, "more blocks are given up than there are"
        self.num_cached_blocks -= num_blocks
        lone.num_blocks -= num_blocks
        if not lone.num_blocks:
            del self.lone[lone.key]

    def part(self, lone: LonePrefix) -> list[int]:
        """The prefix is no longer kept as one; its blocks, which hold nothing until they are published."""
        del self.lone[lone.key]
        lone.is_parted = True
        self.num_cached_blocks -= lone.num_blocks
        return lone.table[: lone.num_blocks]

    def _alive(self, entry: CacheEntry) -> CacheEntry | None:
        """The entry that stands for this prefix now: it may have died with a block that took its own one's place. None
        if one of its keys stands for another content now."""
        dead: list[CacheEntry] = []
        parent: CacheEntry | None = entry
        while parent is not None and self.entries.get(parent.key) is not parent:
            dead.append(parent)
            parent = parent.parent
        for lost in reversed(dead):
            found = self.entries.get(lost.key)
            if found is None or found.parent is not parent or found.content != lost.content:
                if found is not None:
                    self._drop(parent)
                    return None
                found = self.entries[lost.key] = CacheEntry(lost.key, lost.content, parent, [])
                if parent is not None:
                    parent.num_children += 1
            parent = found
        return parent

    def forget(self, block: int) -> None:
        """The block no longer holds its content."""
        assert self.entry_of[block] is not None, f"block {block} is not cached"
        self.forget_all([block])

    def forget_all(self, blocks: list[int]) -> None:
        """These blocks, in this order, no longer hold what they hold, if anything."""
        entry_of = self.entry_of
        for block in blocks:
            entry = entry_of[block]
            if entry is not None:
                self._leave(entry, block)

    def _leave(self, entry: CacheEntry, block: int) -> None:
        """The block holds this content no more."""
        self.entry_of[block] = None
        self.num_cached_blocks -= 1
        entry.blocks.remove(block)
        self._drop(entry)

    def _drop(self, entry: CacheEntry | None) -> None:
        """From this entry up, those that stand for nothing go."""
        while entry is not None and not entry.num_children and not entry.blocks:
            del self.entries[entry.key]
            entry = entry.parent
            if entry is not None:
                entry.num_children -= 1

    def check_invariants(self) -> None:
        held = [block for block, entry in enumerate(self.entry_of) if entry is not None]
        num_lone = sum(lone.num_blocks for lone in self.lone.values())
        assert len(held) + num_lone == self.num_cached_blocks
        assert sum(len(entry.blocks) for entry in self.entries.values()) == len(held)
        for key, lone in self.lone.items():
            assert lone.key == key
            assert key not in self.entries, "it is not alone"
            assert not lone.is_parted
            assert all(self.entry_of[block] is None for block in lone.table[: lone.num_blocks])
        for key, entry in self.entries.items():
            assert entry.key == key
            assert entry.blocks or entry.num_children, "an entry that stands for nothing"
            assert all(self.entry_of[block] is entry for block in entry.blocks)
            assert entry.parent is None or self.entries.get(entry.parent.key) is entry.parent, "a lost parent"
