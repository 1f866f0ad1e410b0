"""Eviction policies: which cached, unreferenced block is evicted first.

They know block ids, depths and steps, but no contents and no sequences. A block's history (its first release, its hits)
is kept while the block holds its content, that is until `pop`; memory stays within a few entries for each block of the
pool. Every operation is O(1) or O(log n). Ties are broken by the order of calls or by block id only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from operator import index
from typing import Any

from librt.vecs import append, vec
from mypy_extensions import i64, mypyc_attr

from testbed.blocks.interfaces import EvictionPolicy
from testbed.lazy_heap import LazyHeap


@mypyc_attr(allow_interpreted_subclasses=True)
class Evictor(ABC):
    """`EvictionPolicy` as a class, the base of the built-in policies: compiled code calls it without name lookups."""

    @abstractmethod
    def add(self, block: int, depth: int, last_step: int) -> None: ...

    @abstractmethod
    def hit(self, block: int) -> None: ...

    @abstractmethod
    def remove(self, block: int) -> None: ...

    @abstractmethod
    def pop(self) -> int: ...

    @abstractmethod
    def __len__(self) -> int: ...


class Foreign(Evictor):
    """Wraps a policy of a user's own class."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy: Any = policy  # its `pop` may return numpy integers

    def add(self, block: int, depth: int, last_step: int) -> None:
        self._policy.add(block, depth, last_step)

    def hit(self, block: int) -> None:
        self._policy.hit(block)

    def remove(self, block: int) -> None:
        self._policy.remove(block)

    def pop(self) -> int:
        return index(self._policy.pop())

    def __len__(self) -> int:
        return len(self._policy)


def evictor(policy: EvictionPolicy) -> Evictor:
    return policy if isinstance(policy, Evictor) else Foreign(policy)


@mypyc_attr(allow_interpreted_subclasses=True)
class LRU(Evictor):
    """Least recently used first; among blocks released together, the deepest of a prefix goes first.

    A doubly linked ring, in two arrays of places: block b has place b + 1. Place 0 is between the last block and the
    first.
    """

    def __init__(self) -> None:
        self._behind: vec[i64] = vec[i64]([0])
        self._before: vec[i64] = vec[i64]([0])
        self._num_blocks = 0

    def add(self, block: int, depth: int, last_step: int) -> None:
        place = i64(block) + 1
        while len(self._behind) <= place:
            self._behind, self._before = append(self._behind, i64(0)), append(self._before, i64(0))
        last = self._before[0]
        self._behind[last], self._before[place] = place, last
        self._behind[place], self._before[0] = 0, place
        self._num_blocks += 1

    def hit(self, block: int) -> None:
        """Does nothing: the block becomes the most recent one when it is released again."""

    def remove(self, block: int) -> None:
        place = i64(block) + 1
        before, behind = self._before[place], self._behind[place]
        self._behind[before], self._before[behind] = behind, before
        self._num_blocks -= 1

    def pop(self) -> int:
        block = int(self._behind[0]) - 1
        assert block >= 0, "nothing is evictable"
        self.remove(block)
        return block

    def __len__(self) -> int:
        return self._num_blocks


@mypyc_attr(allow_interpreted_subclasses=True)
class LRUByLastStep(Evictor):
    """Least recently scheduled owner first, then the deepest block, then the smaller id (the evictor of vLLM 0.8.5 V0).

    A last_step of -1 (never scheduled, or swapped out, which counts as oldest) goes before all others. If the last step
    and the depth are equal, vLLM orders by its content hash, which cannot be reproduced; here the block id decides.
    """

    def __init__(self) -> None:
        self._heap: LazyHeap[int, int] = LazyHeap()  # ordered by last_step, -depth, block

    def add(self, block: int, depth: int, last_step: int) -> None:
        self._heap.put(block, (last_step, -depth, block), block)

    def hit(self, block: int) -> None:
        """Does nothing: the new owner's last step counts once it releases the block."""

    def remove(self, block: int) -> None:
        self._heap.remove(block)

    def pop(self) -> int:
        return self._heap.pop()

    def __len__(self) -> int:
        return len(self._heap)


@mypyc_attr(allow_interpreted_subclasses=True)
class FIFO(Evictor):
    """First in, first out: ordered by the first release of the content; hits do not change the order.

    Of blocks first released together, the deepest goes first.
    """

    def __init__(self) -> None:
        self._heap: LazyHeap[int, int] = LazyHeap()
        self._arrivals: dict[int, int] = {}  # block: the number of its content's first release
        self._num_arrivals = 0

    def add(self, block: int, depth: int, last_step: int) -> None:
        arrival = self._arrivals.get(block)
        if arrival is None:
            arrival = self._arrivals[block] = self._num_arrivals
            self._num_arrivals += 1
        self._heap.put(block, (arrival,), block)

    def hit(self, block: int) -> None:
        """Does nothing: the order stays."""

    def remove(self, block: int) -> None:
        self._heap.remove(block)

    def pop(self) -> int:
        block = self._heap.pop()
        del self._arrivals[block]
        return block

    def __len__(self) -> int:
        return len(self._heap)


@mypyc_attr(allow_interpreted_subclasses=True)
class LFU(Evictor):
    """Least frequently used: fewest hits first, then the least recently released (of a table, the deepest block).

    Without ageing: a block that was popular once may stay long after its last use (`CostAware` ages).
    """

    def __init__(self) -> None:
        self._heap: LazyHeap[int, int] = LazyHeap()  # ordered by hits, then release
        self._hits: dict[int, int] = {}  # block: hits of its content, if there are any

    def add(self, block: int, depth: int, last_step: int) -> None:
        self._heap.put(block, (self._hits.get(block, 0),), block)

    def hit(self, block: int) -> None:
        """Counts for the next release: a block that is hit is referenced."""
        self._hits[block] = self._hits.get(block, 0) + 1

    def remove(self, block: int) -> None:
        self._heap.remove(block)

    def pop(self) -> int:
        block = self._heap.pop()
        self._hits.pop(block, None)
        return block

    def __len__(self) -> int:
        return len(self._heap)
