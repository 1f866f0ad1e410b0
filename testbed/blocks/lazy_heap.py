"""A heap of blocks that can be moved and taken out. Owns the lazy deletion; knows no policy."""

from __future__ import annotations

import heapq
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Any)  # anything that compares


class LazyHeap(Generic[Key]):
    """Blocks by key, smallest first, then by id. What was removed stays in the heap until it surfaces or is swept."""

    __slots__ = ("_entries", "_keys")

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int]] = []
        self._keys: dict[int, Key] = {}  # of the blocks that are really there

    def push(self, block: int, key: Key) -> None:
        """Puts the block in, or gives it another key."""
        self._keys[block] = key
        heapq.heappush(self._entries, (key, block))
        if len(self._entries) > 2 * len(self._keys) + 64:
            self._entries = [(key, block) for block, key in self._keys.items()]
            heapq.heapify(self._entries)

    def remove(self, block: int) -> None:
        del self._keys[block]

    def pop(self) -> tuple[Key, int]:
        while True:
            key, block = heapq.heappop(self._entries)
            if self._keys.get(block) == key:
                del self._keys[block]
                return key, block

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def __len__(self) -> int:
        return len(self._keys)
