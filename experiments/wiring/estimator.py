"""Prices for policies inside the core, taken from a cost model: the same in both modes."""

from __future__ import annotations

from sim.cost.base import CostModel
from testbed.core.plan import BatchShape, PrefillChunk


class CostEstimator:
    """`testbed.core.interfaces.Estimator` over a cost model, each question priced as a step of its own."""

    def __init__(self, name: str, cost: CostModel) -> None:
        self.name = name
        self._cost = cost

    def recompute_ns(self, start: int, num_tokens: int) -> int:
        if num_tokens <= 0:
            return 0
        return self._cost.price(BatchShape(0, 0, (PrefillChunk(start, num_tokens),), 1)).total_ns

    def swap_ns(self, num_blocks: int) -> int:
        """One way, out of the GPU: the part of the price that the link takes."""
        return self._cost.price(BatchShape(0, 0, (), 0, num_blocks_swapped_out=num_blocks)).swap_ns
