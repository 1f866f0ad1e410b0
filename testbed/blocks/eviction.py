"""Eviction policies: which cached, unreferenced block is given up first.

They know block ids, depths and steps, no contents and no sequences. A block's history (when it came, how often it was
hit) is kept while it holds its content, that is until `pop`; memory stays within a few entries for each block of the
pool. Every operation is O(1) or O(log n). Ties never depend on anything but the order of calls.
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
    """The same as a class, which compiled code calls without a look at the names of its methods: base of ours."""

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
    """A policy of a user's class."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy: Any = policy  # its victims may be numpy's integers

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

    A ring: each block names the one behind it and the one before it. Place 0 stands between the last and the first;
    block b has place b + 1.
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
        """Recency is renewed when the block is released again."""

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

    A last_step of -1 (never scheduled, or said to be the oldest, as blocks that were swapped out) goes before all.
    Where the owner and the depth tie, vLLM goes by its content hash, which no other program can know; we by block id.
    """

    def __init__(self) -> None:
        self._heap: LazyHeap[int, int] = LazyHeap()  # by last_step, -depth, block

    def add(self, block: int, depth: int, last_step: int) -> None:
        self._heap.put(block, (last_step, -depth, block), block)

    def hit(self, block: int) -> None:
        """The new owner's steps count when it releases the block."""

    def remove(self, block: int) -> None:
        self._heap.remove(block)

    def pop(self) -> int:
        return self._heap.pop()

    def __len__(self) -> int:
        return len(self._heap)


@mypyc_attr(allow_interpreted_subclasses=True)
class FIFO(Evictor):
    """First in, first out: by when the content was released for the first time, which no hit renews.

    Blocks released together the first time go deepest first.
    """

    def __init__(self) -> None:
        self._heap: LazyHeap[int, int] = LazyHeap()
        self._arrivals: dict[int, int] = {}  # block: how many contents came before its own
        self._num_arrivals = 0

    def add(self, block: int, depth: int, last_step: int) -> None:
        arrival = self._arrivals.get(block)
        if arrival is None:
            arrival = self._arrivals[block] = self._num_arrivals
            self._num_arrivals += 1
        self._heap.put(block, (arrival,), block)

    def hit(self, block: int) -> None:
        """Makes no block younger."""

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
    """Least frequently used: fewest hits first, then the least recently released, so the deepest of a release.

    Without ageing: a block that was popular once may outlive its use (`CostAware` ages).
    """

    def __init__(self) -> None:
        self._heap: LazyHeap[int, int] = LazyHeap()  # by hits, release
        self._hits: dict[int, int] = {}  # of the content that a block holds; 0 is left out
        self._releases: dict[int, int] = {}  # block: its last release, counted over all blocks
        self._num_releases = 0

    def add(self, block: int, depth: int, last_step: int) -> None:
        self._releases[block] = self._num_releases
        self._num_releases += 1
        self._push(block)

    def hit(self, block: int) -> None:
        self._hits[block] = self._hits.get(block, 0) + 1
        if block in self._heap:
            self._push(block)

    def remove(self, block: int) -> None:
        self._heap.remove(block)

    def pop(self) -> int:
        block = self._heap.pop()
        self._hits.pop(block, None)
        return block

    def __len__(self) -> int:
        return len(self._heap)

    def _push(self, block: int) -> None:
        self._heap.put(block, (self._hits.get(block, 0), self._releases[block]), block)
