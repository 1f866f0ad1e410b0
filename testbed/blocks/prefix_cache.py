"""The prefix cache: which physical blocks hold which content. Owns entries and unreferenced cached blocks.

An entry stands for one prefix: a full block's content after the entry of the block before it. It is found by its 64-bit
key and then confirmed: same content, same parent entry. As parents are confirmed in turn, a collision of keys can never
join two users' KV. Several blocks may hold the same content (two sequences computed it side by side); each is listed.
"""

from __future__ import annotations

from testbed.blocks.eviction import EvictionPolicy


class CacheEntry:
    """One cached prefix. Lives while a block holds it or a longer prefix hangs on it."""

    __slots__ = ("blocks", "content", "key", "num_children", "parent")

    def __init__(self, key: int, content: bytes, parent: CacheEntry | None) -> None:
        self.key = key
        self.content = content
        self.parent = parent
        self.blocks: list[int] = []
        self.num_children = 0


class PrefixCache:
    """Content of blocks, by key. `version` changes whenever a lookup could come out differently."""

    __slots__ = ("_entries", "entry_of", "evictable", "num_cached_blocks", "version")

    def __init__(self, num_blocks: int, eviction: EvictionPolicy) -> None:
        self._entries: dict[int, CacheEntry] = {}
        self.entry_of: list[CacheEntry | None] = [None] * num_blocks
        self.evictable = eviction  # cached blocks with no reference
        self.num_cached_blocks = 0
        self.version = 0

    def match(self, keys: list[int], contents: list[bytes], max_blocks: int) -> list[CacheEntry]:
        """The entries of the longest cached prefix, at most `max_blocks` of them."""
        matched: list[CacheEntry] = []
        parent: CacheEntry | None = None
        for index in range(max_blocks):
            entry = self._entries.get(keys[index])
            if entry is None or not entry.blocks or entry.parent is not parent or entry.content != contents[index]:
                break
            matched.append(entry)
            parent = entry
        return matched

    def publish(self, block: int, key: int, content: bytes, parent: CacheEntry | None) -> CacheEntry | None:
        """Says that `block` holds this content. None if another content has the key: the block stays uncached."""
        assert self.entry_of[block] is None, f"block {block} is published twice"
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = CacheEntry(key, content, parent)
            if parent is not None:
                parent.num_children += 1
        elif entry.parent is not parent or entry.content != content:
            return None
        entry.blocks.append(block)
        self.entry_of[block] = entry
        self.num_cached_blocks += 1
        self.version += 1
        return entry

    def evict(self) -> int:
        """Gives up one unreferenced block and returns it."""
        block = self.evictable.pop()
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """The block no longer holds its content."""
        entry = self.entry_of[block]
        assert entry is not None, f"block {block} is not cached"
        self.entry_of[block] = None
        entry.blocks.remove(block)
        self.num_cached_blocks -= 1
        self.version += 1
        while entry is not None and not entry.blocks and not entry.num_children:
            del self._entries[entry.key]
            entry = entry.parent
            if entry is not None:
                entry.num_children -= 1

    def check_invariants(self) -> None:
        held = [block for block, entry in enumerate(self.entry_of) if entry is not None]
        assert len(held) == self.num_cached_blocks
        assert sum(len(entry.blocks) for entry in self._entries.values()) == len(held)
        for key, entry in self._entries.items():
            assert entry.key == key
            assert entry.blocks or entry.num_children, "an entry that stands for nothing"
            assert all(self.entry_of[block] is entry for block in entry.blocks)
            assert entry.parent is None or self._entries.get(entry.parent.key) is entry.parent, "a lost parent"
