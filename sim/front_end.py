"""The front end of a server: what lies between a client and the engine. Knows no engine."""

from __future__ import annotations

from testbed.core.commands import Event
from testbed.core.interfaces import Inbox
from testbed.core.outcome import Finished
from testbed.records.sender import Sender


class FrontEnd:
    """An inbox whose events reach the engine `time_ns` after they came.

    Instants of arrival stay those of the client, so TTFT and E2E have the time in them, once. A closed-loop turn passes
    the front end again. sender: whose clients have their last token only when it has sent it; None: at the commit.
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
        """The loop has had what these emitted recorded, and so sent, before it says so."""
        if self._sender is None:
            self._source.finished(requests, now_ns)
            return
        for item in requests:
            self._source.finished([item], self._sender.last_ns(item.request.request_id, now_ns))
