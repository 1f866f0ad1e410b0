"""Requests that the core decides about and an engine computes, on a clock that is the same on every machine."""

from __future__ import annotations

from typing import Any, TypeVar

from real.clocks import Clock
from real.driver import run
from testbed.core.commands import Arrive, Event, Recorder, ResetPrefixes
from testbed.core.outcome import Finished
from testbed.core.request import Request
from testbed.core.serve import serve
from tests.testbed.core_kit import make_scheduler


class TickingClock:
    """Each look at it takes a third of a millisecond, so that a run meets the same arrivals on every machine."""

    def __init__(self) -> None:
        self.time = 0

    def start(self) -> None:
        self.time = 0

    def before_step(self) -> float:
        return 1.0

    def now_ns(self) -> int:
        self.time += 333_333
        return self.time

    def wait_until(self, until_ns: int) -> None:
        self.time = max(self.time, until_ns)


class Requests(Recorder):
    """An inbox that keeps what finished; a recorder that counts preemptions, hits and what happened to the blocks."""

    is_open = False

    def __init__(self, requests: list[Request], reset_at: tuple[int, ...] = ()) -> None:
        self.pending = list(requests)
        self._reset_at, self.num_boundaries = reset_at, 0
        self.outputs: dict[str, list[int]] = {}
        self.completions: dict[str, list[list[int]]] = {}  # of all sequences of a request
        self.num_preemptions = self.num_cached_tokens = 0
        self.num_swapped_out = self.num_swapped_in = self.num_copied = 0

    def due(self, now_ns: int) -> list[Event]:
        due = [request for request in self.pending if request.arrival_ns <= now_ns]
        self.pending = self.pending[len(due) :]
        self.num_boundaries += 1
        resets = [ResetPrefixes()] if self.num_boundaries in self._reset_at else []
        return [*resets, *[Arrive(request) for request in due]]

    def next_ns(self) -> int | None:
        return self.pending[0].arrival_ns if self.pending else None

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        for done in requests:
            self.outputs[done.request.request_id] = list(done.output_token_ids)
            self.completions[done.request.request_id] = sorted(list(one.token_ids) for one in done.completions)

    def committed(self, step) -> None:
        plan = step.plan
        self.num_preemptions += len(plan.preempted)
        self.num_cached_tokens += sum(admission.num_cached_tokens for admission in plan.admitted)
        self.num_swapped_out += len(plan.swap_out)
        self.num_swapped_in += len(plan.swap_in)
        self.num_copied += len(plan.copies)


Inbox = TypeVar("Inbox", bound=Requests)


def served(backend: Any, inbox: Inbox, composition: str, *, clock: Clock | None = None, **options: Any) -> Inbox:
    """Returns the inbox. options: those of make_scheduler."""
    scheduler = make_scheduler(composition, **options)
    run(serve(inbox, scheduler, inbox), backend, clock or TickingClock())
    scheduler.check_invariants()
    return inbox
