"""A scheduler in vLLM's engine whose plans come from outside, through a Seat."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.request import RequestStatus

from real.vllm.own_loop import Seat
from real.vllm.scheduler import CoreInVllm, Steering


class SeatedScheduler(CoreInVllm):
    """Created by vLLM; gets its plans from a VllmBackend."""

    def make_steering(self) -> Steering:
        self.seat = Seat()
        return self.seat

    def name_of(self, request: Any) -> str:
        return self.seat.expected

    def schedule(self, throttle_prefills: bool = False) -> Any:
        output = super().schedule(throttle_prefills)
        self.seat.planned_ns = time.perf_counter_ns()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.seat.taken_ns = time.perf_counter_ns()
        return super().update_from_output(scheduler_output, model_runner_output)

    def has_requests(self) -> bool:
        """Whether there is a step to plan, which is only if the seat has a plan."""
        return self.seat.plan is not None

    def abort(self, name: str) -> None:
        """Aborts a request, by our id, if it is live."""
        told = self._translator.live.get(name)
        if told is not None:
            self.finish_requests(told.request.request_id, RequestStatus.FINISHED_ABORTED)
