"""An eviction policy that considers the cost of computing a block again."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from testbed.blocks.eviction import Evictor
from testbed.core.interfaces import Estimator
from testbed.lazy_heap import LazyHeap
from testbed.policies.context import PolicyContext


@mypyc_attr(allow_interpreted_subclasses=True)
class CostAware(Evictor):
    """Evicts the block that is cheapest to compute again, weighted by its hits and aged (GreedyDual-Size-Frequency).

        priority = inflation + (1 + hits) x cost of the block

    The block of the lowest priority is evicted, and the inflation is set to that priority, so that blocks no longer in
    use fall behind even if they were expensive (Cherkasova 1998; all blocks have the same size).

    The cost is the estimator's time in ns to compute the block's tokens after their context.

    A block is useless without the blocks before it, so a block is worth at least as much as the deeper neighbour that
    was released just before it. Equal priorities go in order of release, deepest first.
    """

    asks = ("estimator",)

    def __init__(self) -> None:
        self._block_size = 0
        self._estimator: Estimator | None = None
        self._costs: list[int] = []  # by depth
        self._heap: LazyHeap[int, int] = LazyHeap()  # ordered by priority, then release
        self._hits: dict[int, int] = {}  # block: hits of its content, if there are any
        self._inflation = 0
        self._neighbour = (-1, 0)  # depth and worth of the block released just before

    def bind(self, context: PolicyContext) -> None:
        self._block_size = context.blocks.block_size
        self._estimator = context.estimator

    def add(self, block: int, depth: int, last_step: int) -> None:
        next_depth, next_worth = self._neighbour
        least_worth = next_worth if next_depth == depth + 1 else 0
        worth = max(least_worth, (1 + self._hits.get(block, 0)) * self._cost(depth))
        self._heap.put(block, (self._inflation + worth,), block)
        self._neighbour = (depth, worth)

    def hit(self, block: int) -> None:
        """Counts for the next release: a block that is hit is referenced."""
        self._hits[block] = self._hits.get(block, 0) + 1
        self._neighbour = (-1, 0)

    def remove(self, block: int) -> None:
        self._heap.remove(block)
        self._neighbour = (-1, 0)

    def pop(self) -> int:
        rank = self._heap.first_rank()
        assert rank is not None, "nothing is evictable"
        self._inflation = rank[0]
        block = self._heap.pop()
        self._hits.pop(block, None)
        self._neighbour = (-1, 0)
        return block

    def __len__(self) -> int:
        return len(self._heap)

    def _cost(self, depth: int) -> int:
        """Returns the cost of computing a block at this depth; calls the estimator once for each depth."""
        size, costs = self._block_size, self._costs
        assert self._estimator is not None, "bind comes first"
        while len(costs) <= depth:
            costs.append(self._estimator.recompute_ns(len(costs) * size, size))
        return costs[depth]
