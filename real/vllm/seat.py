"""The seat of a scheduler in vLLM's engine, without vLLM: what a backend of ours and its scheduler there share."""

from __future__ import annotations

from typing import Any

from testbed.core.outcome import Outcome
from testbed.core.plan import BatchPlan
from testbed.errors import RequestError


class Seat:
    """Where plans are laid from outside for vLLM to carry out. Implements real.vllm.scheduler.Steering."""

    cached_block_size: int | None = None  # nobody asks for vLLM's own statistics

    def __init__(self) -> None:
        self.expected = ""  # our id of the request that is being added
        self.plan: BatchPlan | None = None
        self.outcomes: tuple[Outcome, ...] | None = None  # of the oldest plan in flight; None: it still is
        self.planned_ns = self.taken_ns = 0  # when a plan was last told, and when a result last came

    def added(self, name: str, request: Any) -> None: ...
    def aborted(self, name: str) -> None: ...

    def reset_prefixes(self) -> None:
        """Plans come from a loop, which takes its events from elsewhere."""
        raise RequestError("backend=vllm takes a reset of the prefix cache from the run's inbox, not from vLLM")

    def next_plan(self) -> BatchPlan | None:
        plan, self.plan = self.plan, None
        return plan

    def took(self, outcomes: tuple[Outcome, ...]) -> list[tuple[str, str]]:
        self.outcomes = outcomes
        return []

    def num_requests(self) -> tuple[int, int]:
        return 0, 0

    def kv_usage(self) -> float:
        return 0.0

    def close(self) -> None: ...
