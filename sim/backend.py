"""The simulated backend: prices a plan instead of running it. Knows cost models; knows no clock and no queues."""

from __future__ import annotations

from typing import NamedTuple

from sim.cost.base import CostModel
from testbed.errors import RequestError
from testbed.plan import BatchPlan, Outcome, Spans


class SimWork(NamedTuple):
    """What a plan costs. duration_ns is at least 1, also for a plan that only preempts."""

    duration_ns: int
    spans: Spans
    outcomes: tuple[Outcome, ...] | None = None


class SimBackend:
    """Every row is forced: the simulator draws no tokens."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def start(self, plan: BatchPlan) -> SimWork:
        spans = self.cost.price(plan.shape)
        return SimWork(max(1, sum(spans)), spans)


def refuse_unforced(request_id: str, num_output_tokens: int | None) -> None:
    """The simulator cannot know what a model would say. Raises RequestError for an output that is not forced."""
    if num_output_tokens is None:
        raise RequestError(
            f"request {request_id!r} forces no output, and the simulator has no model to sample from; "
            "give it output_tokens or output_token_ids"
        )
