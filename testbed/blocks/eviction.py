"""Eviction policies: which cached, unreferenced block is given up first.

They know block ids, depths and steps, no contents and no sequences. A block's history (when it came, how often it was
hit) is kept while it holds its content, that is until `pop`; memory stays within a few entries for each block of the
pool. Every operation is O(1) or O(log n). Ties never depend on anything but the order of calls.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from testbed.blocks.lazy_heap import LazyHeap
from testbed.errors import ConfigError

if TYPE_CHECKING:
    from testbed.core.interfaces import Estimator
    from testbed.policies.context import PolicyContext


class EvictionPolicy(Protocol):
    """Holds the cached blocks that nothing references. A user's own class with these methods plugs in by `_target_`.

    It may have `bind(context: PolicyContext)`.
    """

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
    """Least recently used first; among blocks released together, the deepest of a prefix goes first.

    Blocks that were released together stand in the line as one run, in the order of their table: they are given up from
    the end. What is removed stays in the line, marked, until it comes to the front or the line is swept.
    """

    __slots__ = ("_gone", "_line", "_num_gone", "_num_places")

    def __init__(self) -> None:
        self._line: deque[tuple[list[int], object]] = deque()  # runs and their owners
        self._num_places = 0  # in the line, void ones included
        self._gone: dict[int, int] = {}  # block -> how many of its places in the line, the first ones, are void
        self._num_gone = 0

    def add(self, block: int, depth: int, last_step: int) -> None:
        self.add_run([block])

    def add_run(self, run: list[int], owner: object = None) -> None:
        """The same as `add` for each, from the last one to the first. The list is the line's from now on: it shrinks as
        its blocks are given up. owner: whatever `pop_run` is to say of them."""
        if run:
            self._line.append((run, owner))
            self._num_places += len(run)

    def hit(self, block: int) -> None:
        """Recency is renewed when the block is released again."""

    def remove(self, block: int) -> None:
        self._gone[block] = self._gone.get(block, 0) + 1
        self._num_gone += 1
        if self._num_gone > 64 + self._num_places // 2:
            self._sweep()

    def pop(self) -> int:
        while not (blocks := self.pop_run(1)[0]):
            pass
        return blocks[0]

    def pop_run(self, num_blocks: int) -> tuple[list[int], object]:
        """The blocks of the first run, at most the `num_blocks` that are given up first, and its owner. The last one
        comes first in the line. None of them, where all have been removed."""
        run, owner = self._line[0]
        blocks = run[-num_blocks:]
        del run[-num_blocks:]
        if not run:
            self._line.popleft()
        self._num_places -= len(blocks)
        return self._without_void(blocks) if self._gone else blocks, owner

    def _without_void(self, blocks: list[int]) -> list[int]:
        """Those of the blocks at the front of the line that have not been removed."""
        if self._gone.keys().isdisjoint(blocks):
            return blocks
        return [block for block in blocks if not self._is_void(block)]

    def _is_void(self, block: int) -> bool:
        """Whether this place of a block in the line is void, as the block has been removed since."""
        if block not in self._gone:
            return False
        self._num_gone -= 1
        self._gone[block] -= 1
        if not self._gone[block]:
            del self._gone[block]
        return True

    def _sweep(self) -> None:
        """No place in the line is void. Runs stay the lists that they are."""
        for run, _ in self._line:
            run[:] = self._without_void(run)
        self._line = deque([item for item in self._line if item[0]])
        self._num_places = sum([len(run) for run, _ in self._line])

    def blocks(self) -> list[int]:
        """In the order in which they would be given up. For checks and tests."""
        gone, blocks = self._gone.copy(), []
        for block in chain.from_iterable(run[::-1] for run, _ in self._line):
            if gone.get(block):
                gone[block] -= 1
            else:
                blocks.append(block)
        return blocks

    def __len__(self) -> int:
        return self._num_places - self._num_gone


class LRUByLastStep:
    """Least recently scheduled owner first, then the deepest block, then the smaller id (the evictor of vLLM 0.8.5 V0).

    A last_step of -1 (never scheduled, or said to be the oldest, as blocks that were swapped out) goes before all.
    Where the owner and the depth tie, vLLM goes by its content hash, which no other program can know; we by block id.
    """

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: LazyHeap[tuple[int, int]] = LazyHeap()  # last_step, -depth

    def add(self, block: int, depth: int, last_step: int) -> None:
        self._heap.push(block, (last_step, -depth))

    def hit(self, block: int) -> None:
        """The new owner's steps count when it releases the block."""

    def remove(self, block: int) -> None:
        self._heap.remove(block)

    def pop(self) -> int:
        return self._heap.pop()[1]

    def __len__(self) -> int:
        return len(self._heap)


class FIFO:
    """First in, first out: by when the content was released for the first time, which no hit renews.

    Blocks released together the first time go deepest first.
    """

    __slots__ = ("_arrivals", "_heap", "_num_arrivals")

    def __init__(self) -> None:
        self._heap: LazyHeap[int] = LazyHeap()
        self._arrivals: dict[int, int] = {}  # block: how many contents came before its own
        self._num_arrivals = 0

    def add(self, block: int, depth: int, last_step: int) -> None:
        arrival = self._arrivals.get(block)
        if arrival is None:
            arrival = self._arrivals[block] = self._num_arrivals
            self._num_arrivals += 1
        self._heap.push(block, arrival)

    def hit(self, block: int) -> None:
        """Makes no block younger."""

    def remove(self, block: int) -> None:
        self._heap.remove(block)

    def pop(self) -> int:
        block = self._heap.pop()[1]
        del self._arrivals[block]
        return block

    def __len__(self) -> int:
        return len(self._heap)


class LFU:
    """Least frequently used: fewest hits first, then the least recently released, so the deepest of a release.

    Without ageing: a block that was popular once may outlive its use (`CostAware` ages).
    """

    __slots__ = ("_heap", "_hits", "_num_releases", "_releases")

    def __init__(self) -> None:
        self._heap: LazyHeap[tuple[int, int]] = LazyHeap()  # hits, release
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
        block = self._heap.pop()[1]
        self._hits.pop(block, None)
        return block

    def __len__(self) -> int:
        return len(self._heap)

    def _push(self, block: int) -> None:
        self._heap.push(block, (self._hits.get(block, 0), self._releases[block]))


class CostAware:
    """Gives up the block that costs least to compute again, weighted by its hits and aged (GreedyDual-Size-Frequency).

        priority = inflation + (1 + hits) x cost of the block; the least goes first, and its priority is the inflation
        from then on: what was dear but is no longer used falls behind (Cherkasova 1998; all blocks are of one size)

    The cost is the estimator's time for the block's tokens behind their context, in ns; without an estimator it is
    token_cost + context_cost x context for each token, which is how the work of dense layers and of attention grows.
    By the defaults 8,192 tokens of context double a token's work; in a dense model it is about 6 x the hidden size.

    A block without the blocks before it is lost, so a block is worth at least as much as the deeper neighbour that was
    released just before it; ties go in order of release, that is deepest first. Raises ConfigError on bad costs.
    """

    __slots__ = (
        "_block_size",
        "_context_cost",
        "_costs",
        "_estimator",
        "_heap",
        "_hits",
        "_inflation",
        "_neighbour",
        "_num_releases",
        "_released",
        "_token_cost",
    )

    def __init__(self, token_cost: int = 8192, context_cost: int = 1) -> None:
        for name, value, least in (("token_cost", token_cost, 1), ("context_cost", context_cost, 0)):
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"cache.eviction.{name} is {value!r}; it must be a whole number, at least {least}")
        self._token_cost = token_cost
        self._context_cost = context_cost
        self._block_size = 0
        self._estimator: Estimator | None = None
        self._costs: list[int] = []  # by depth
        self._heap: LazyHeap[tuple[int, int]] = LazyHeap()  # priority, release
        self._hits: dict[int, int] = {}  # of the content that a block holds; 0 is left out
        self._released: dict[int, tuple[int, int, int]] = {}  # block: depth, least worth, release
        self._inflation = 0
        self._neighbour = (-1, 0)  # depth and worth of the block released just before
        self._num_releases = 0

    def bind(self, context: PolicyContext) -> None:
        self._block_size = context.blocks.block_size
        self._estimator = context.estimator

    def add(self, block: int, depth: int, last_step: int) -> None:
        next_depth, next_worth = self._neighbour
        least_worth = next_worth if next_depth == depth + 1 else 0
        self._released[block] = (depth, least_worth, self._num_releases)
        self._num_releases += 1
        self._neighbour = (depth, self._push(block))

    def hit(self, block: int) -> None:
        self._hits[block] = self._hits.get(block, 0) + 1
        self._neighbour = (-1, 0)
        if block in self._heap:
            self._push(block)

    def remove(self, block: int) -> None:
        self._heap.remove(block)
        self._neighbour = (-1, 0)

    def pop(self) -> int:
        (self._inflation, _), block = self._heap.pop()
        self._hits.pop(block, None)
        self._neighbour = (-1, 0)
        return block

    def __len__(self) -> int:
        return len(self._heap)

    def _push(self, block: int) -> int:
        """Puts the block in by what it is worth now, and returns that."""
        depth, least_worth, release = self._released[block]
        worth = max(least_worth, (1 + self._hits.get(block, 0)) * self._cost(depth))
        self._heap.push(block, (self._inflation + worth, release))
        return worth

    def _cost(self, depth: int) -> int:
        """What computing the block at this depth again costs; asked of the estimator once for each depth."""
        size, costs = self._block_size, self._costs
        assert size, "bind comes first"
        while len(costs) <= depth:
            context = len(costs) * size
            if self._estimator is None:
                costs.append(size * (self._token_cost + self._context_cost * context))
            else:
                costs.append(self._estimator.recompute_ns(context, size))
        return costs[depth]
