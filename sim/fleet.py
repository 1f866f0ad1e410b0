"""Replicas behind a router, in SimPy time: one process for each engine, one for the router.

Order at one instant: transfers that end, commits in replica order, the session arrivals that they cause, routing, plans
in replica order (`sim.replica.Phases`). It is kept by priorities of SimPy's events, never by the order in which
processes were scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import simpy

from sim.link import HostLink, Process
from sim.replica import Phases, Replica, ReplicaInbox, SwappingBackend
from sim.routers import Router
from testbed.core.commands import Arrive, Event
from testbed.core.interfaces import Inbox
from testbed.core.outcome import Finished
from testbed.core.request import Request
from testbed.core.scheduler import Scheduler
from testbed.core.serve import Loop
from testbed.errors import ConfigError


class Fleet:
    """Some replicas, one inbox for all of them, and the router between.

    backends: of each replica. replicas_per_link: how many share one PCIe link; None: swaps are not on the link but a
    part of each step. Give each loop its inbox of `inboxes`, then `run`.
    """

    def __init__(
        self,
        source: Inbox,
        router: Router,
        backends: Sequence[SwappingBackend],
        *,
        replicas_per_link: int | None = None,
    ) -> None:
        self.inboxes = [ReplicaInbox(self._finished) for _ in backends]
        self._source = source
        self._router = router
        self._backends = backends
        self._env = simpy.Environment()
        self._phases = Phases(self._env, len(backends))
        self._links = [HostLink(self._env) for _ in backends[:: replicas_per_link or 1]]
        self._per_link = replicas_per_link
        self._homes: dict[str, int] = {}  # of the requests that have not ended
        self._replicas: list[Replica] = []
        self._over = self._env.event()
        self._failure: BaseException | None = None  # what a process ended with
        self._num_left = len(backends)  # loops that have not ended
        self._routing: simpy.Process | None = None
        self._routes_at: int | None = None

    def run(self, loops: Sequence[Loop], schedulers: Sequence[Scheduler]) -> int:
        """Drives the loops to their ends; returns the simulated instant of it in ns.

        Raises what a loop raises: LivelockError when work remains on a replica and nothing will ever move.
        """
        env = self._env
        for number, (loop, scheduler, backend) in enumerate(zip(loops, schedulers, self._backends, strict=True)):
            link = None if self._per_link is None else self._links[number // self._per_link]
            self._replicas.append(
                Replica(self._phases, number, loop, self.inboxes[number], scheduler, backend, link, self._close_if_over)
            )
        self._routing = env.process(self._guarded(self._route_all()))
        for replica in self._replicas:
            replica.process = env.process(self._guarded(self._serve(replica)))
        try:
            env.run(self._over)
        finally:
            for loop in loops:
                loop.close()
        if self._failure is not None:
            raise self._failure
        return int(env.now)

    # --- processes ---

    def _serve(self, replica: Replica) -> Process:
        yield from replica.serve()
        self._num_left -= 1
        if not self._num_left:
            self._over.succeed()

    def _route_all(self) -> Process:
        """Sends each event of the inbox to a replica, at its instant."""
        env, source = self._env, self._source
        while True:
            self._routes_at = next_ns = source.next_ns()
            try:
                if next_ns is None:
                    self._close_if_over()
                    yield env.event()  # until a request that ends brings a new one
                else:
                    yield self._phases.at_routing(max(next_ns, int(env.now)))
            except simpy.Interrupt:
                continue
            for event in source.due(int(env.now)):
                self._send(event, int(env.now))

    def _guarded(self, process: Process) -> Process:
        """Ends the run with the very error that a process ends with; SimPy itself would raise a copy."""
        try:
            yield from process
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001  # raised again by `run`, whatever it is
            self._failure = self._failure or error
            if not self._over.triggered:
                self._over.succeed()

    # --- routing ---

    def _send(self, event: Event, now_ns: int) -> None:
        if isinstance(event, Arrive):
            number = self._choose(event.request)
            self._homes[event.request.request_id] = number
        else:
            home = self._homes.get(event.request_id)
            if home is None:
                return  # it has ended, or never came
            number = home
        self.inboxes[number].put(event, now_ns)
        self._replicas[number].wake()

    def _choose(self, request: Request) -> int:
        """The router's answer. Raises ConfigError for one that is no replica's number."""
        number: Any = self._router.route(request, self._replicas)
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(self._replicas):
            raise ConfigError(
                f"router {type(self._router).__name__} sent request {request.request_id!r} to {number!r}; route() must "
                f"return the number of a replica, 0 to {len(self._replicas) - 1}"
            )
        return number

    def _finished(self, requests: list[Finished], now_ns: int) -> None:
        """Requests of some replica have ended: their sessions may go on now, or later."""
        for item in requests:
            del self._homes[item.request.request_id]
        self._source.finished(requests, now_ns)
        if self._source.next_ns() != self._routes_at and self._routing is not None:
            self._routing.interrupt()

    def _close_if_over(self) -> None:
        """Lets the loops end once nothing will ever move: those with work left raise LivelockError."""
        if self._source.next_ns() is None and all(replica.is_idle for replica in self._replicas):
            for replica, inbox in zip(self._replicas, self.inboxes, strict=True):
                inbox.is_open = False
                replica.wake()
