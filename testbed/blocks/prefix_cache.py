"""The prefix cache: which physical blocks hold which content. Owns the entries and the unlisted prefixes.

An entry represents one prefix: a full block's content after its parent, the entry of the block before. It is found by
its 64-bit key and confirmed by content and parent. As every parent is confirmed, a key collision can never mix the KV
of two users. Several blocks may hold the same content (if two sequences compute it at the same time); all are listed.

Most prefixes are never looked up by another sequence. So a prefix with a new first block is kept unlisted, without
entries and without the other blocks' keys, until a sequence looks up that block (`is_known`). Results do not change,
and a simulation of unrelated requests takes a third of the time.
"""

from __future__ import annotations

from librt.vecs import append, pop
from mypy_extensions import i64

from testbed.blocks.chain import CacheEntry, Chain, UnlistedPrefix
from testbed.blocks.keys import KeySource


class PrefixCache:
    """Content of blocks, by key. is_newest_found: a block replaces an older one of the same content, which is then not
    cached. source: makes the keys of chains. Prefixes are kept unlisted only if its keys are unique and all blocks of
    a content are kept, as only then the results are the same."""

    def __init__(self, num_blocks: int, source: KeySource | None = None, *, is_newest_found: bool = False) -> None:
        self.entries: dict[int, CacheEntry] = {}  # by key
        self.unlisted: dict[int, UnlistedPrefix] = {}  # by the key of the first block, which no entry has
        self.content_of: list[CacheEntry | UnlistedPrefix | None] = [None] * num_blocks
        self._source = source
        self._is_newest_found = is_newest_found
        self._lists_late = source is not None and source.are_unique and not is_newest_found

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that hold cached content. Iterates over all blocks: for checks only."""
        return sum([1 for content in self.content_of if content is not None])

    def entry(self, block: int) -> CacheEntry | None:
        """Returns the entry of the block's content; None if the block has none."""
        content = self.content_of[block]
        return content if isinstance(content, CacheEntry) else None

    # --- lookup ---

    def is_known(self, key: int) -> bool:
        """Whether a cached prefix begins with the block of this key. If that prefix is unlisted, it is listed now."""
        prefix = self.unlisted.get(key)
        if prefix is not None:
            self.list_prefix(prefix)
        return key in self.entries

    def find(self, chain: Chain, index: int, parent: CacheEntry | None) -> CacheEntry | None:
        """Returns the entry of the chain's block `index` after `parent`, if a block holds it. Its key must exist."""
        entry = self.standing(chain, index, parent)
        return entry if entry is not None and entry.blocks else None

    def standing(self, chain: Chain, index: int, parent: CacheEntry | None) -> CacheEntry | None:
        """As `find`, but also returns an entry that no block holds any more."""
        entry = self.entries.get(chain.keys[index])
        if entry is None or entry.parent is not parent or entry.content != chain.contents[index]:
            return None
        return entry

    def match(self, chain: Chain, max_blocks: int) -> list[CacheEntry]:
        """Returns the entries of the longest cached prefix, at most `max_blocks`. That many keys must exist."""
        matched: list[CacheEntry] = []
        parent: CacheEntry | None = None
        for index in range(max_blocks):
            parent = self.find(chain, index, parent)
            if parent is None:
                break
            matched.append(parent)
        return matched

    # --- publishing ---

    def publish_next(self, chain: Chain, block: int) -> bool:
        """Publishes `block` as the next one of the chain. Returns False if a different content has its key."""
        index, source = chain.num_published, self._source
        assert source is not None, "a chain is published without keys"
        chain.make_keys(source, 1)
        if index == 0 and self._lists_late and not self.is_known(chain.keys[0]):
            chain.unlisted = self.unlisted[chain.keys[0]] = UnlistedPrefix(chain)
        if chain.unlisted is not None:
            assert self.content_of[block] is None, "a block is published twice"
            chain.unlisted.blocks = append(chain.unlisted.blocks, i64(block))
            self.content_of[block] = chain.unlisted
        else:
            chain.make_keys(source, index + 1)
            entry = self.entry(block)  # another sequence that shares the block may have published it
            if entry is None:
                entry = self.publish(block, chain, index, chain.entry)
            if entry is None:
                return False
            chain.entry = entry
        chain.num_published = index + 1
        return True

    def publish(self, block: int, chain: Chain, index: int, parent: CacheEntry | None) -> CacheEntry | None:
        """Publishes `block` as the chain's block `index`; returns its entry, or None if another content has the key."""
        assert self.content_of[block] is None, "a block is published twice"
        if self._is_newest_found and parent is not None:
            parent = self._alive(parent)
            if parent is None:
                return None
        entry = self.entries.get(chain.keys[index])
        if entry is None:
            entry = self._make(chain.keys[index], chain.contents[index], parent)
        elif entry.parent is not parent or entry.content != chain.contents[index]:
            self._drop(parent)  # `_alive` may have made it for this block
            return None
        elif self._is_newest_found and entry.blocks:
            self.content_of[entry.blocks.pop()] = None
        entry.blocks.append(block)
        self.content_of[block] = entry
        return entry

    def list_chain(self, chain: Chain) -> None:
        """Lists what the chain has published, if it is unlisted."""
        if chain.unlisted is not None:
            self.list_prefix(chain.unlisted)

    def list_prefix(self, prefix: UnlistedPrefix) -> None:
        """Lists an unlisted prefix: publishes its blocks one by one."""
        assert self._source is not None
        chain = prefix.chain
        del self.unlisted[chain.keys[0]]
        chain.make_keys(self._source, len(prefix.blocks))
        entry: CacheEntry | None = None
        is_broken = False  # a collision of keys
        for index, block in enumerate([int(block) for block in prefix.blocks]):
            self.content_of[block] = None
            if not is_broken:
                entry = self.publish(block, chain, index, entry)
                is_broken = entry is None
        if chain.unlisted is prefix:
            chain.unlisted, chain.entry, chain.is_broken = None, entry, chain.is_broken or is_broken

    def _make(self, key: int, content: bytes, parent: CacheEntry | None) -> CacheEntry:
        entry = self.entries[key] = CacheEntry(key, content, parent)
        if parent is not None:
            parent.num_children += 1
        return entry

    def _alive(self, entry: CacheEntry) -> CacheEntry | None:
        """Returns the current entry of this prefix, which may have been dropped with the block that replaced its own;
        it is then made again. None if one of its keys belongs to a different content now."""
        dead: list[CacheEntry] = []
        parent: CacheEntry | None = entry
        while parent is not None and self.entries.get(parent.key) is not parent:
            dead.append(parent)
            parent = parent.parent
        for lost in reversed(dead):
            found = self.entries.get(lost.key)
            if found is None:
                found = self._make(lost.key, lost.content, parent)
            elif found.parent is not parent or found.content != lost.content:
                self._drop(parent)
                return None
            parent = found
        return parent

    # --- forgetting ---

    def forget(self, block: int) -> None:
        """Removes the block's content from the cache, if it has any."""
        content = self.content_of[block]
        if isinstance(content, UnlistedPrefix):
            num_blocks = len(content.blocks)
            if content.blocks[num_blocks - 1] == i64(block):
                content.blocks, _last = pop(content.blocks)  # `_` would be boxed
                self.content_of[block] = None
                if num_blocks == 1:
                    self._give_up(content)
                return
            self.list_prefix(content)  # a block before others: their entries need its entry as parent
            content = self.content_of[block]
        if isinstance(content, CacheEntry):
            self.content_of[block] = None
            content.blocks.remove(block)
            self._drop(content)

    def _give_up(self, prefix: UnlistedPrefix) -> None:
        """Removes an unlisted prefix that has no blocks left."""
        del self.unlisted[prefix.chain.keys[0]]
        if prefix.chain.unlisted is prefix:
            prefix.chain.unlisted = None

    def _drop(self, entry: CacheEntry | None) -> None:
        """Removes this entry and its parents, as far as they have neither blocks nor children."""
        while entry is not None and not entry.num_children and not entry.blocks:
            del self.entries[entry.key]
            entry = entry.parent
            if entry is not None:
                entry.num_children -= 1

    def check_invariants(self) -> None:
        for key, entry in self.entries.items():
            assert entry.key == key
            assert entry.blocks or entry.num_children, "an entry that stands for nothing"
            assert all(self.content_of[block] is entry for block in entry.blocks)
            assert entry.parent is None or self.entries.get(entry.parent.key) is entry.parent, "a lost parent"
        for key, prefix in self.unlisted.items():
            assert prefix.chain.keys[0] == key
            assert key not in self.entries, "listed and unlisted"
            assert len(prefix.blocks) or prefix.chain.unlisted is prefix, "nothing is left of it"
            assert all(self.content_of[block] is prefix for block in prefix.blocks)
        num_held = sum([len(entry.blocks) for entry in self.entries.values()])
        num_held += sum([len(prefix.blocks) for prefix in self.unlisted.values()])
        assert num_held == self.num_cached_blocks
