"""Eviction policies: which cached, unreferenced block is given up first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class EvictionPolicy(Protocol):
    """Holds the cached blocks that nothing references. A user's own class with these methods plugs in by `_target_`."""

    def add(self, block: int, depth: int, last_step: int) -> None:
        """The block lost its last reference just now. Blocks of one sequence come deepest first.

        depth: how many blocks of the same prefix stand before it. last_step: the step that last scheduled its sequence.
        """
        ...

    def hit(self, block: int) -> None:
        """A new sequence found the block's content; called whether or not something references it already."""
        ...

    def remove(self, block: int) -> None:
        """The block is referenced again."""
        ...

    def pop(self) -> int:
        """Removes and returns the victim."""
        ...

    def __len__(self) -> int: ...


class LRU:
    """Least recently used first; among blocks released together, the deepest of a prefix goes first."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int, depth: int, last_step: int) -> None:
        self._blocks[block] = None

    def hit(self, block: int) -> None:
        """Recency is renewed when the block is released again."""

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def pop(self) -> int:
        return self._blocks.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._blocks)
