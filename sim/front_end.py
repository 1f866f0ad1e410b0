"""The API server between a client and the engine, as a delay of the inbox's events. Knows no engine."""

from __future__ import annotations

from testbed.core.commands import Event
from testbed.core.interfaces import Inbox
from testbed.core.outcome import Finished
from testbed.records.sender import Sender


class FrontEnd:
    """An inbox whose events reach the engine `time_ns` after their own instant.

    Arrival times stay those of the client, so TTFT and E2E include the delay once. A closed-loop turn is delayed again.
    sender: the token delivery; think times then count from the delivery of the last token; None: from the commit.
    """

    def __init__(self, source: Inbox, time_ns: int, sender: Sender | None = None) -> None:
        self._source, self._time_ns, self._sender = source, time_ns, sender

    @property
    def is_open(self) -> bool:
        return self._source.is_open

    def due(self, now_ns: int) -> list[Event]:
        return self._source.due(now_ns - self._time_ns)

    def next_ns(self) -> int | None:
        next_ns = self._source.next_ns()
        return None if next_ns is None else next_ns + self._time_ns

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        """Passes on ended requests. The loop has recorded their tokens before, so the sender already knows these."""
        if self._sender is None:
            self._source.finished(requests, now_ns)
            return
        for item in requests:
            self._source.finished([item], self._sender.last_ns(item.request.request_id, now_ns))
