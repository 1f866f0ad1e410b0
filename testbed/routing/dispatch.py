"""Dispatch from one inbox to the inboxes of several replicas. Owns which replica has a request; a driver owns time.

The driver calls `send_due` at an instant, wakes the replicas that it yields, and calls `close` after the last event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import index
from typing import Any

from testbed.core.commands import Arrive, Event, ResetPrefixes
from testbed.core.interfaces import Inbox
from testbed.core.outcome import Finished
from testbed.core.request import Request
from testbed.core.scheduler import Scheduler
from testbed.core.sequence import Sequence as CoreSequence
from testbed.errors import ConfigError
from testbed.foreign_text import shown
from testbed.routing.routers import Replicas, Router


class ReplicaInbox:
    """Events that were sent to one replica and not yet taken by its loop. Implements testbed.core.interfaces.Inbox."""

    def __init__(self, tell: Callable[[list[Finished], int], None]) -> None:
        self.is_open = True  # until `Dispatcher.close`
        self.num_requests = 0  # requests that were sent there and have not ended
        self.num_unseen = self.num_unseen_tokens = 0  # requests not yet taken by the loop, and their prompt tokens
        self._events: deque[tuple[int, Event]] = deque()  # with the instant of sending
        self._tell = tell

    def put(self, event: Event, now_ns: int) -> None:
        self._events.append((now_ns, event))
        if isinstance(event, Arrive):
            self.num_requests += 1
            self._count(event.request, 1)

    def due(self, now_ns: int) -> list[Event]:
        """Removes and returns the events that were sent at or before `now_ns`."""
        events = []
        while self._events and self._events[0][0] <= now_ns:
            event = self._events.popleft()[1]
            events.append(event)
            if isinstance(event, Arrive):
                self._count(event.request, -1)
        return events

    def _count(self, request: Request, change: int) -> None:
        self.num_unseen += change
        self.num_unseen_tokens += change * len(request.prompt_token_ids)

    def next_ns(self) -> int | None:
        return self._events[0][0] if self._events else None

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        self.num_requests -= len(requests)
        self._tell(requests, now_ns)


class Probe:
    """The request that a router looks up, as a sequence. It is kept until the next one, so that its tokens are made and
    its keys computed once, however many replicas are asked: all of a fleet have one configuration."""

    def __init__(self) -> None:
        self._seq: CoreSequence | None = None

    def of(self, request: Request, max_model_len: int) -> CoreSequence:
        seq = self._seq
        if seq is None or seq.request is not request:
            if seq is not None:
                seq.chain = None  # leaves no reference cycle
            seq = self._seq = CoreSequence(-1, request, max_model_len)
        elif seq.chain is not None:
            seq.chain.frozen_hit = None  # that of the replica asked before
        return seq


class LiveView:
    """A replica as routers see it. Implements testbed.routing.routers.ReplicaView. probe: the fleet's."""

    def __init__(self, number: int, inbox: ReplicaInbox, scheduler: Scheduler, probe: Probe) -> None:
        self.number = number
        self._probe = probe
        self._inbox, self._scheduler, self._blocks = inbox, scheduler, scheduler.blocks

    @property
    def num_requests(self) -> int:
        return self._inbox.num_requests

    @property
    def num_waiting(self) -> int:
        return self._inbox.num_unseen + self._scheduler.num_waiting + self._scheduler.num_swapped

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_tokens(self) -> int:
        return self._inbox.num_unseen_tokens + self._scheduler.num_known_tokens

    @property
    def num_kv_blocks(self) -> int:
        return self._blocks.num_gpu_blocks - self._blocks.num_free_blocks

    def num_cached_tokens(self, request: Request) -> int:
        probe = self._probe.of(request, self._scheduler.limits.max_model_len)
        return self._blocks.lookup(probe).num_tokens


class Scraped:
    """A replica with its counts of one instant, as a gauge that was scraped then: they lack what was sent since. Its
    cache is looked up as it is."""

    def __init__(self, replica: LiveView) -> None:
        self.number = replica.number
        self.num_requests = replica.num_requests
        self.num_waiting = replica.num_waiting
        self.num_running = replica.num_running
        self.num_tokens = replica.num_tokens
        self.num_kv_blocks = replica.num_kv_blocks
        self.num_cached_tokens = replica.num_cached_tokens


class Dispatcher:
    """Routes the events of one source to a fleet of `num_replicas`, with an inbox for each replica's loop.

    Give each loop its inbox of `inboxes`, then pass the schedulers to `attach`, in the same order. on_finished: called
    when requests have ended, because the next event of the source may then be earlier than it was before.
    """

    def __init__(
        self, source: Inbox, router: Router, num_replicas: int, on_finished: Callable[[], None] | None = None
    ) -> None:
        self.inboxes = [ReplicaInbox(self._finished) for _ in range(num_replicas)]
        self._source = source
        self._router = router
        self._on_finished = on_finished
        self._homes: dict[str, int] = {}  # the replica of each request that has not ended
        self._replicas: tuple[LiveView, ...] = ()
        self._seen: Replicas = ()  # what the router is shown

    def attach(self, schedulers: Sequence[Scheduler]) -> None:
        pairs, probe = zip(self.inboxes, schedulers, strict=True), Probe()
        self._seen = self._replicas = tuple(LiveView(number, *pair, probe) for number, pair in enumerate(pairs))

    def scrape(self) -> None:
        """From now on the router is shown the counts of this instant, until the next call."""
        self._seen = [Scraped(replica) for replica in self._replicas]

    def next_ns(self) -> int | None:
        """Returns the instant of the next event of the source."""
        return self._source.next_ns()

    def send_due(self, now_ns: int) -> Iterator[int]:
        """Sends each due event to its replica, a reset to all. Yields the replica's number before the next is routed.
        An arrival is sent as of its own instant: the caller may have been busy then.
        """
        for event in self._source.due(now_ns):
            sent_ns = now_ns
            if isinstance(event, ResetPrefixes):
                for number, inbox in enumerate(self.inboxes):
                    inbox.put(event, now_ns)
                    yield number
                continue
            if isinstance(event, Arrive):
                name = event.request.request_id
                sent_ns = min(now_ns, event.request.arrival_ns)
                self._homes[name] = self._choose(event.request)
            else:
                name = event.request_id
            home = self._homes.get(name)
            if home is not None:  # otherwise the request has ended, or never arrived
                self.inboxes[home].put(event, sent_ns)
                yield home

    def close(self) -> None:
        """Closes all inboxes: no event will be sent again. Woken loops then end; LivelockError if work is left."""
        for inbox in self.inboxes:
            inbox.is_open = False

    def _choose(self, request: Request) -> int:
        """Returns the router's choice. Raises ConfigError if it is not the number of a replica."""
        said: Any = self._router.route(request, self._seen)
        if not isinstance(said, bool):
            with suppress(TypeError):  # numpy integers are accepted too
                if 0 <= (number := index(said)) < len(self._replicas):
                    return number
        raise ConfigError(
            f"router {type(self._router).__name__} sent request {request.request_id!r} to {shown(said)}; route() must "
            f"return the number of a replica, a whole number from 0 to {len(self._replicas) - 1}"
        )

    def _finished(self, requests: list[Finished], now_ns: int) -> None:
        """Reports ended requests of a replica to the source, whose sessions may continue now or later."""
        for item in requests:
            del self._homes[item.request.request_id]
        self._source.finished(requests, now_ns)
        if self._on_finished is not None:
            self._on_finished()
