"""The CPU side of swapping: a pool of blocks, and the tables of the sequences that lie there."""

from __future__ import annotations

from testbed.blocks.eviction import LRU
from testbed.blocks.pool import BlockPool
from testbed.blocks.prefix_cache import CacheEntry, PrefixCache

RELEASED = -1  # in a table: the block lay outside the sliding window and was given back
Content = tuple[int, bytes]  # key and content of a full block


class SwapSpace:
    """CPU blocks of swapped-out sequences. A GPU block that several of them share moves once and stays shared.

    by_content: full blocks of equal prefixes share a CPU block, also when they came at different times.
    """

    def __init__(self, num_blocks: int, *, by_content: bool) -> None:
        self.tables: dict[int, list[int]] = {}  # by seq_id
        self._pool = BlockPool(num_blocks)
        self._leaving: list[int] = []  # blocks that the step being planned empties: not to be filled by it
        self._cache = PrefixCache(num_blocks, LRU()) if by_content else None

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that a swap out can have."""
        return self._pool.num_free

    def num_held(self, contents: list[Content]) -> int:
        """How many of these full blocks, the first of a sequence, are here already."""
        return len(self._cache.match([key for key, _ in contents], [c for _, c in contents], len(contents))) if (
            self._cache is not None
        ) else 0  # fmt: skip

    def put(self, tables: dict[int, list[int]], contents: dict[int, list[Content]]) -> list[tuple[int, int]]:
        """Takes in sequences that leave the GPU together; (GPU block, CPU block) pairs to copy. There must be room."""
        moved: dict[int, int] = {}
        for seq_id, table in tables.items():
            parent: CacheEntry | None = None
            is_broken = False  # a key collision: what follows is not shared
            own = contents.get(seq_id, [])
            cpu_table = self.tables[seq_id] = []
            for index, block in enumerate(table):
                if block == RELEASED:
                    cpu_table.append(RELEASED)
                    continue
                is_full = self._cache is not None and not is_broken and index < len(own)
                content = own[index] if is_full else None
                found = self._cache.find(*content, parent) if self._cache is not None and content is not None else None
                if block in moved:
                    self._pool.share(moved[block])
                elif found is not None:
                    moved[block] = found.blocks[0]
                    self._pool.share(moved[block])
                else:
                    moved[block] = self._pool.allocate(1)[0]
                    if self._cache is not None and content is not None:
                        found = self._cache.publish(moved[block], *content, parent)
                parent = found
                is_broken = content is None or found is None
                cpu_table.append(moved[block])
        return list(moved.items())

    def drop(self, seq_id: int) -> list[int]:
        """The sequence leaves; returns its CPU table, whose blocks are handed out again once the step is planned: a
        device moves out before it moves in."""
        table = self.tables.pop(seq_id)
        for block in reversed(table):
            if block != RELEASED and self._pool.drop(block):
                if self._cache is not None and self._cache.entry_of[block] is not None:
                    self._cache.forget(block)
                self._leaving.append(block)
        return table

    def planned(self) -> None:
        """The step is decided: what it emptied is free."""
        if self._leaving:
            self._pool.put_back(self._leaving)
            self._leaving = []

    def check_invariants(self) -> None:
        self._pool.check_invariants()
        references = [0] * self._pool.num_blocks
        for table in self.tables.values():
            for block in table:
                if block != RELEASED:
                    references[block] += 1
        assert references == self._pool.ref_counts, "CPU reference counts differ from the tables"
        num_held = sum(1 for count in references if count)
        assert self._pool.num_free + len(self._leaving) + num_held == self._pool.num_blocks
