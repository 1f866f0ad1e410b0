"""Block keys: a chain of xxhash64 values over the tokens of full blocks, so that equal prefixes have equal keys."""

from __future__ import annotations

from array import array
from typing import Protocol

from xxhash import xxh64_intdigest


class KeySource(Protocol):
    """Names the content of full blocks."""

    def extend(self, keys: list[int], contents: list[bytes], tokens: array[int], num_blocks: int, salt: str) -> None:
        """Appends keys and contents (what a hit is confirmed against) until there are `num_blocks` of each."""
        ...

    def next(self, previous_key: int, tokens: array[int], index: int) -> tuple[int, bytes]:
        """Key and content of full block `index` alone, after a block that has `previous_key`."""
        ...


class TokenKeys:
    """key = xxh64 of the token ids, seeded with the key of the block before; the first block's is a hash of the salt.

    The salt is part of the first block's content too: equal tokens of two salts stay apart if their keys collide.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def extend(self, keys: list[int], contents: list[bytes], tokens: array[int], num_blocks: int, salt: str) -> None:
        key = keys[-1] if keys else xxh64_intdigest(salt.encode())
        width = self.block_size * tokens.itemsize
        first = len(keys)
        # a copy: a view would forbid the array to grow
        data = tokens[first * self.block_size : num_blocks * self.block_size].tobytes()
        added = [data[offset : offset + width] for offset in range(0, (num_blocks - first) * width, width)]
        for content in added:
            key = xxh64_intdigest(content, key)
            keys.append(key)
        if salt and added and not first:
            added[0] = salt.encode() + added[0]
        contents += added

    def next(self, previous_key: int, tokens: array[int], index: int) -> tuple[int, bytes]:
        start = index * self.block_size
        content = tokens[start : start + self.block_size].tobytes()
        return xxh64_intdigest(content, previous_key), content
