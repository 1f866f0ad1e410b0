"""The prefix cache: which physical blocks hold which content. Owns entries and unreferenced cached blocks.

An entry stands for one prefix: a full block's content after the entry of the block before it. It is found by its 64-bit
key and then confirmed: same content, same parent entry. As parents are confirmed in turn, a collision of keys can never
join two users' KV. Several blocks may hold the same content (two sequences computed it side by side); each is listed.

Most prefixes are never asked for by anyone else. As long as one sequence alone has published a first block of its key,
all that it publishes is one `LonePrefix`, and nothing is hashed but that first block.
"""

from __future__ import annotations

from testbed.blocks.eviction import EvictionPolicy
from testbed.core.sequence import Sequence


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
    """The first blocks of a table, whose content no other blocks have: entries that are not yet made.

    While its sequence holds the blocks, it is as long as the sequence has computed. Then `blocks` are what is left of
    them: they are given up from the deepest on, as LRU does. salt: of the keys, which are made from the sequence's
    tokens. num_tokens: these are published, whether or not the sequence has computed them.
    """

    __slots__ = ("block_size", "blocks", "is_parted", "key", "num_tokens", "salt", "seq", "table")

    def __init__(self, key: int, seq: Sequence, table: list[int], salt: str, block_size: int) -> None:
        self.key = key  # of its first block
        self.seq = seq
        self.table = table
        self.salt = salt
        self.block_size = block_size
        self.blocks: list[int] | None = None  # None: its sequence holds them
        self.num_tokens = 0
        self.is_parted = False  # entries were made

    @property
    def num_held(self) -> int:
        """How many blocks it has while its sequence holds them."""
        return max(self.num_tokens, self.seq.num_computed_tokens) // self.block_size


class PrefixCache:
    """Content of blocks, by key."""

    __slots__ = ("_num_listed", "entries", "entry_of", "evictable", "lone")

    def __init__(self, num_blocks: int, eviction: EvictionPolicy) -> None:
        self.entries: dict[int, CacheEntry] = {}  # by key
        self.lone: dict[int, LonePrefix] = {}  # by the key of the first block, which no entry has
        self.entry_of: list[CacheEntry | None] = [None] * num_blocks  # of blocks that are in no lone prefix
        self.evictable = eviction  # free blocks whose content may still be hit
        self._num_listed = 0  # blocks that entries list

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that hold something, but for lone prefixes that sequences hold. Goes through all lone ones."""
        return self._num_listed + sum([len(lone.blocks) for lone in self.lone.values() if lone.blocks is not None])

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
            self._num_listed -= 1
        entry.blocks.append(block)
        self.entry_of[block] = entry
        self._num_listed += 1
        return entry

    def publish_next(self, block: int, key: int, content: bytes, parent: CacheEntry) -> CacheEntry | None:
        """`publish`; None, and nothing done, if the key is known."""
        if key in self.entries:
            return None
        assert self.entry_of[block] is None, f"block {block} is published twice"
        entry = self.entries[key] = self.entry_of[block] = CacheEntry(key, content, parent, [block])
        parent.num_children += 1
        self._num_listed += 1
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
        self._num_listed += len(blocks)
        return parent

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
        """These blocks, the last one first, no longer hold what they hold, if anything."""
        entry_of = self.entry_of
        num_forgotten = 0
        for block in reversed(blocks):
            entry = entry_of[block]
            if entry is None:
                continue
            entry_of[block] = None
            num_forgotten += 1
            entry.blocks.remove(block)
            if not entry.num_children and not entry.blocks:
                self._drop(entry)
        self._num_listed -= num_forgotten

    def _drop(self, entry: CacheEntry | None) -> None:
        """From this entry up, those that stand for nothing go."""
        while entry is not None and not entry.num_children and not entry.blocks:
            del self.entries[entry.key]
            entry = entry.parent
            if entry is not None:
                entry.num_children -= 1

    def check_invariants(self) -> None:
        held = [block for block, entry in enumerate(self.entry_of) if entry is not None]
        assert len(held) == self._num_listed
        assert sum(len(entry.blocks) for entry in self.entries.values()) == len(held)
        for key, lone in self.lone.items():
            assert lone.key == key
            assert key not in self.entries, "it is not alone"
            assert not lone.is_parted
            assert lone.blocks is None or lone.blocks, "nothing is left of it"
            assert all(self.entry_of[block] is None for block in lone.blocks or ())
        for key, entry in self.entries.items():
            assert entry.key == key
            assert entry.blocks or entry.num_children, "an entry that stands for nothing"
            assert all(self.entry_of[block] is entry for block in entry.blocks)
            assert entry.parent is None or self.entries.get(entry.parent.key) is entry.parent, "a lost parent"
