"""The block pool: fixed-size KV blocks by id, with reference counts. O(1) a block; misuse raises."""

from __future__ import annotations


class BlockPool:
    """Blocks 0 … num_blocks - 1. A block is free, referenced, or handed to the prefix cache (count 0, not free).

    `take` and `drop` move counts; `put_back` returns a block of count 0 to the free list. The split lets a prefix
    cache keep unreferenced blocks without the pool knowing why.
    """

    __slots__ = ("_free", "_num_shared", "num_blocks", "ref_counts")

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._num_shared = 0  # blocks with more than one reference
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest id is handed out first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes free blocks, each with count 1. Over-allocation raises."""
        assert 0 <= num_blocks <= len(self._free), f"{num_blocks} blocks wanted, {len(self._free)} free"
        if num_blocks == 0:
            return []
        blocks = self._free[-num_blocks:]
        blocks.reverse()
        del self._free[-num_blocks:]
        counts = self.ref_counts
        for block in blocks:
            counts[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more reference to a referenced block. Use after free raises."""
        assert self.ref_counts[block] > 0, f"block {block} is not referenced"
        self._num_shared += self.ref_counts[block] == 1
        self.ref_counts[block] += 1

    def revive(self, block: int) -> None:
        """The first reference to a block that the prefix cache kept."""
        assert self.ref_counts[block] == 0, f"block {block} is referenced already"
        self.ref_counts[block] = 1

    def drop(self, block: int) -> bool:
        """One reference less; True if it was the last. Double free raises."""
        counts = self.ref_counts
        assert counts[block] > 0, f"block {block} is freed twice"
        counts[block] -= 1
        self._num_shared -= counts[block] == 1
        return counts[block] == 0

    def drop_all(self, blocks: list[int]) -> list[int]:
        """`drop` for each of these different blocks; those whose last reference it was, in order."""
        if self._num_shared:
            return [block for block in blocks if self.drop(block)]
        counts = self.ref_counts
        for block in blocks:
            assert counts[block] == 1, f"block {block} is freed twice"
            counts[block] = 0
        return blocks

    def claim(self, blocks: list[int]) -> None:
        """The first reference to each of these blocks, which the prefix cache kept and has forgotten."""
        counts = self.ref_counts
        for block in blocks:
            assert counts[block] == 0, f"block {block} is referenced already"
            counts[block] = 1

    def put_back(self, block: int) -> None:
        """A block without references becomes free."""
        assert self.ref_counts[block] == 0, f"block {block} is still referenced"
        self._free.append(block)

    def check_invariants(self) -> None:
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert all(self.ref_counts[block] == 0 for block in self._free), "a free block is referenced"
        assert all(count >= 0 for count in self.ref_counts)
        assert self._num_shared == sum(1 for count in self.ref_counts if count > 1)

    def free_blocks(self) -> tuple[int, ...]:
        """For checks and tests."""
        return tuple(self._free)
