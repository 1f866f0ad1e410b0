"""The block pool: fixed-size KV blocks by id, with reference counts. O(1) a block; misuse raises.

Most blocks belong to one table from when it takes them until it is released as a whole: they are lent to it, and not
counted. A block is counted from when others may reference it too: it is shared, or its content can be found.
"""

from __future__ import annotations


class BlockPool:
    """Blocks 0 … num_blocks - 1. A block is free, lent, counted (`ref_counts` above 0), or handed to the prefix cache.

    `lend` and `give_back` move lists of blocks without a look at each; `share` and `drop` move counts, and raise for a
    block that is not counted; `put_back` returns blocks of count 0 to the free list. The split lets a prefix cache keep
    unreferenced blocks without the pool knowing why.
    """

    __slots__ = ("_free", "num_blocks", "num_counted", "ref_counts")

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.num_counted = 0  # blocks with a count
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest id is handed out first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lend(self, num_blocks: int) -> list[int]:
        """Takes free blocks for a single owner, uncounted. Over-allocation raises."""
        assert 0 <= num_blocks <= len(self._free), f"{num_blocks} blocks wanted, {len(self._free)} free"
        if num_blocks == 0:
            return []
        blocks = self._free[-num_blocks:]
        blocks.reverse()
        del self._free[-num_blocks:]
        return blocks

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes free blocks, each with count 1. Over-allocation raises."""
        blocks = self.lend(num_blocks)
        self.claim(blocks)
        return blocks

    def claim(self, blocks: list[int]) -> None:
        """The first reference to each of these blocks."""
        counts = self.ref_counts
        for block in blocks:
            assert counts[block] == 0, f"block {block} is referenced already"
            counts[block] = 1
        self.num_counted += len(blocks)

    def count(self, blocks: list[int]) -> None:
        """These referenced blocks are counted from now on, if they are not: others may come to reference them."""
        self.claim([block for block in blocks if not self.ref_counts[block]])

    def share(self, block: int) -> None:
        """One more reference to a counted block. Use after free raises."""
        assert self.ref_counts[block] > 0, f"block {block} is not referenced"
        self.ref_counts[block] += 1

    def revive(self, block: int) -> None:
        """The first reference to a block that the prefix cache kept."""
        assert self.ref_counts[block] == 0, f"block {block} is referenced already"
        self.ref_counts[block] = 1
        self.num_counted += 1

    def drop(self, block: int) -> bool:
        """One reference less; True if it was the last. Double free raises."""
        counts = self.ref_counts
        assert counts[block] > 0, f"block {block} is freed twice"
        counts[block] -= 1
        self.num_counted -= counts[block] == 0
        return counts[block] == 0

    def give_back(self, table: list[int], *, is_lent: bool) -> list[int]:
        """One reference less to each block of a table; those that nothing references now, in order.

        is_lent: the table has what of its blocks is not counted. Double free of what is counted raises.
        """
        if is_lent and not self.num_counted:
            return table
        counts, num_counted = self.ref_counts, self.num_counted
        left: list[int] = []
        for block in table:
            count = counts[block]
            if count > 1:
                counts[block] = count - 1
                continue
            assert count or is_lent, f"block {block} is freed twice"
            counts[block] = 0
            num_counted -= count
            left.append(block)
        self.num_counted = num_counted
        return left

    def put_back(self, blocks: list[int]) -> None:
        """Blocks without references become free."""
        if self.num_counted:
            for block in blocks:
                assert self.ref_counts[block] == 0, f"block {block} is still referenced"
        self._free += blocks

    def check_invariants(self) -> None:
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert all(self.ref_counts[block] == 0 for block in self._free), "a free block is referenced"
        assert all(count >= 0 for count in self.ref_counts)
        assert self.num_counted == sum(1 for count in self.ref_counts if count)

    def free_blocks(self) -> tuple[int, ...]:
        """For checks and tests."""
        return tuple(self._free)
