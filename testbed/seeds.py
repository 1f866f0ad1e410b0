"""A seed of its own for each request that draws and brings none: of the run's seed and the request's id.

Without it a backend would tell requests apart by what the core numbered them, which differs between policies: a
session's next turn comes earlier under one than under another. So each request draws the same under every policy
(common random numbers), on either backend.
"""

from __future__ import annotations

from dataclasses import replace

from testbed.core.commands import Arrive, Event
from testbed.core.interfaces import Inbox
from testbed.core.outcome import Finished
from testbed.core.request import SamplingParams
from testbed.streams import draw


def request_seed(run_seed: int, request_id: str) -> int:
    """The seed of a request's draws, of 64 bits: stream "sampling"."""
    return draw(run_seed, "sampling", request_id)


def needs_seed(sampling: SamplingParams) -> bool:
    """Whether requests with these parameters draw, from nothing of their own."""
    return sampling.seed is None and (sampling.temperature > 0 or sampling.beam_width > 1)


class SeededInbox:
    """An inbox whose requests all have what they need to draw. A decorator: everything else is the inner inbox's."""

    def __init__(self, inbox: Inbox, run_seed: int) -> None:
        self._inbox = inbox
        self._run_seed = run_seed

    @property
    def is_open(self) -> bool:
        return self._inbox.is_open

    def due(self, now_ns: int) -> list[Event]:
        return [self._seeded(event) for event in self._inbox.due(now_ns)]

    def next_ns(self) -> int | None:
        return self._inbox.next_ns()

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        self._inbox.finished(requests, now_ns)

    def _seeded(self, event: Event) -> Event:
        if not isinstance(event, Arrive) or not needs_seed(event.request.sampling):
            return event
        request = event.request
        sampling = replace(request.sampling, seed=request_seed(self._run_seed, request.request_id))
        return Arrive(replace(request, sampling=sampling))
