"""The prefix cache: which physical blocks hold which content. Owns the entries, and what is not listed yet.

An entry stands for one prefix: a full block's content after the entry of the block before it. It is found by its 64-bit
key and then confirmed: same content, same parent entry. As parents are confirmed in turn, a collision of keys can never
join two users' KV. Several blocks may hold the same content (two sequences computed it side by side); each is listed.

Most prefixes are never asked for by anyone else. So a prefix whose first block nobody has yet is kept without keys and
entries, and listed when somebody asks for that block (`is_known`). Nobody can tell from outside; a simulation of single
requests takes a third of the time.
"""

from __future__ import annotations

from librt.vecs import append, pop
from mypy_extensions import i64

from testbed.blocks.chain import CacheEntry, Chain, UnlistedPrefix
from testbed.blocks.keys import KeySource


class PrefixCache:
    """Content of blocks, by key. is_newest_found: a block takes the place of an older one of the same content, which is
    forgotten. source: of the keys of chains. Where it names contents for good, and all blocks of a content are kept, it
    does not show that a prefix is listed late."""

    def __init__(self, num_blocks: int, source: KeySource | None = None, *, is_newest_found: bool = False) -> None:
        self.entries: dict[int, CacheEntry] = {}  # by key
        self.unlisted: dict[int, UnlistedPrefix] = {}  # by the key of the first block, which no entry has
        self.content_of: list[CacheEntry | UnlistedPrefix | None] = [None] * num_blocks
        self._source = source
        self._is_newest_found = is_newest_found
        self._lists_late = source is not None and source.are_unique and not is_newest_found

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that hold something. Goes through all of them: for checks."""
        return sum([1 for content in self.content_of if content is not None])

    def entry(self, block: int) -> CacheEntry | None:
        """What the block holds, if it is listed."""
        content = self.content_of[block]
        return content if isinstance(content, CacheEntry) else None

    # --- asking ---

    def is_known(self, key: int) -> bool:
        """Whether a prefix begins with this block; it is listed from now on: somebody asks."""
        prefix = self.unlisted.get(key)
        if prefix is not None:
            self.list_prefix(prefix)
        return key in self.entries

    def find(self, chain: Chain, index: int, parent: CacheEntry | None) -> CacheEntry | None:
        """The entry of the chain's block `index` after `parent`, if a block holds it. The chain must have its key."""
        entry = self.standing(chain, index, parent)
        return entry if entry is not None and entry.blocks else None

    def standing(self, chain: Chain, index: int, parent: CacheEntry | None) -> CacheEntry | None:
        """The same, whether or not a block holds it still."""
        entry = self.entries.get(chain.keys[index])
        if entry is None or entry.parent is not parent or entry.content != chain.contents[index]:
            return None
        return entry

    def match(self, chain: Chain, max_blocks: int) -> list[CacheEntry]:
        """The entries of the longest cached prefix, at most `max_blocks` of them, of which the chain must have keys."""
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
        """Says that `block` holds what comes next in the chain. False if another content has its key."""
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
            entry = self.entry(block)  # others that share the block may have come first
            if entry is None:
                entry = self.publish(block, chain, index, chain.entry)
            if entry is None:
                return False
            chain.entry = entry
        chain.num_published = index + 1
        return True

    def publish(self, block: int, chain: Chain, index: int, parent: CacheEntry | None) -> CacheEntry | None:
        """Says that `block` holds the content of the chain's block `index`, after `parent`. None if another content has
        the key: the block stays uncached."""
        assert self.content_of[block] is None, "a block is published twice"
        if self._is_newest_found and parent is not None:
            parent = self._alive(parent)
            if parent is None:
                return None
        entry = self.entries.get(chain.keys[index])
        if entry is None:
            entry = self._make(chain.keys[index], chain.contents[index], parent)
        elif entry.parent is not parent or entry.content != chain.contents[index]:
            self._drop(parent)  # it may have been made for this block
            return None
        elif self._is_newest_found and entry.blocks:
            self.content_of[entry.blocks.pop()] = None
        entry.blocks.append(block)
        self.content_of[block] = entry
        return entry

    def list_chain(self, chain: Chain) -> None:
        """What the chain published is listed from now on."""
        if chain.unlisted is not None:
            self.list_prefix(chain.unlisted)

    def list_prefix(self, prefix: UnlistedPrefix) -> None:
        """Publishes the blocks of a prefix one by one."""
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
        """The entry that stands for this prefix now: it may have died with a block that took its own one's place. None
        if one of its keys stands for another content now."""
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
        """The block no longer holds its content, if it has any."""
        content = self.content_of[block]
        if isinstance(content, UnlistedPrefix):
            num_blocks = len(content.blocks)
            if content.blocks[num_blocks - 1] == i64(block):
                content.blocks, _last = pop(content.blocks)  # `_` would be boxed
                self.content_of[block] = None
                if num_blocks == 1:
                    self._give_up(content)
                return
            self.list_prefix(content)  # a hole: what lies behind it hangs on an entry
            content = self.content_of[block]
        if isinstance(content, CacheEntry):
            self.content_of[block] = None
            content.blocks.remove(block)
            self._drop(content)

    def _give_up(self, prefix: UnlistedPrefix) -> None:
        """Nothing is left of the prefix."""
        del self.unlisted[prefix.chain.keys[0]]
        if prefix.chain.unlisted is prefix:
            prefix.chain.unlisted = None

    def _drop(self, entry: CacheEntry | None) -> None:
        """From this entry up, those that stand for nothing go."""
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
