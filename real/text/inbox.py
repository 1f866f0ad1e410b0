"""Requests of a live caller, as an Inbox: all arrive at once, and all can be given up."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.core.commands import Abort, Arrive, Event
from testbed.core.outcome import Finished
from testbed.core.request import Request


class LiveInbox:
    """A testbed.core.interfaces.Inbox. Open while a request is unfinished: the loop then pauses after each step."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._waiting = list(requests)
        self._live: dict[str, None] = {}
        self._is_giving_up = False

    @property
    def is_open(self) -> bool:
        return bool(self._waiting or self._live)

    def give_up(self) -> None:
        """At the next step boundary every request that is not finished is aborted; those not yet seen never come."""
        self._waiting.clear()
        self._is_giving_up = True

    def due(self, now_ns: int) -> list[Event]:
        if self._is_giving_up:
            return [Abort(request_id) for request_id in self._live]
        arrived, self._waiting = self._waiting, []
        self._live.update(dict.fromkeys(request.request_id for request in arrived))
        return [Arrive(request) for request in arrived]

    def next_ns(self) -> int | None:
        return self._waiting[0].arrival_ns if self._waiting else None

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        for finished in requests:
            del self._live[finished.request.request_id]
