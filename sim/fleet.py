"""Replicas behind a router, in SimPy time: one process for each engine, one for the router.

Order of events at one instant: ends of transfers, commits in replica order, the session arrivals that these commits
release, the scraping of counts, routing, plans in replica order (`sim.replica.Phases`). The priorities of SimPy's
events give this order; it never depends on the order in which processes were scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence

import simpy

from sim.backend import SimBackend
from sim.link import HostLink, Process
from sim.replica import Phases, Replica
from testbed.core.interfaces import Inbox
from testbed.core.scheduler import Scheduler
from testbed.core.serve import Loop
from testbed.routing.dispatch import Dispatcher
from testbed.routing.routers import Router


class Fleet:
    """Replicas, one source inbox for all of them, and the router between.

    backends: one for each replica. replicas_per_link: how many replicas share one PCIe link; None: swaps do not use a
    link, but are a part of each step. router_period_ns: how often the counts that the router sees are renewed; 0: at
    each of its choices. Build each replica's loop with its inbox of `inboxes`, then call `run`.
    """

    def __init__(
        self, source: Inbox, router: Router, backends: Sequence[SimBackend], *, replicas_per_link: int | None = None,
        router_period_ns: int = 0,
    ) -> None:  # fmt: skip
        self._dispatcher = Dispatcher(source, router, len(backends), self._route_again)
        self.inboxes = self._dispatcher.inboxes
        self._backends = backends
        self._env = simpy.Environment()
        self._phases = Phases(self._env, len(backends))
        self._links = [HostLink(self._env) for _ in backends]  # at most one for each
        self._per_link = replicas_per_link
        self._period_ns = router_period_ns
        self._replicas: list[Replica] = []
        self._over = self._env.event()
        self._failure: BaseException | None = None  # the first error that ended a process
        self._num_left = len(backends)  # loops that have not ended
        self._routing: simpy.Process | None = None
        self._routes_at: int | None = None

    def run(self, loops: Sequence[Loop], schedulers: Sequence[Scheduler]) -> int:
        """Drives the loops to their ends. Returns the simulated end time in ns.

        Raises the first error that a loop raises: LivelockError if a replica has work left and can never continue.
        """
        env = self._env
        self._dispatcher.attach(schedulers)
        for number, (loop, scheduler, backend) in enumerate(zip(loops, schedulers, self._backends, strict=True)):
            link = None if self._per_link is None else self._links[number // self._per_link]
            self._replicas.append(
                Replica(
                    self._phases,
                    number,
                    loop,
                    self.inboxes[number],
                    scheduler.blocks.block_size,
                    backend,
                    link,
                    self._close_if_over,
                )
            )
        if self._period_ns:
            env.process(self._guarded(self._scrape_all()))
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
        """Sends each event of the source inbox to a replica, at the event's instant."""
        env = self._env
        while True:
            self._routes_at = next_ns = self._dispatcher.next_ns()
            try:
                if next_ns is None:
                    self._close_if_over()
                    yield env.event()  # until an ended request releases a new event, which interrupts this wait
                else:
                    yield self._phases.at_routing(max(next_ns, int(env.now)))
            except simpy.Interrupt:
                continue
            for number in self._dispatcher.send_due(int(env.now)):
                self._replicas[number].wake()

    def _scrape_all(self) -> Process:
        while True:
            self._dispatcher.scrape()
            yield self._phases.at_scrape(int(self._env.now) + self._period_ns)

    def _guarded(self, process: Process) -> Process:
        """Ends the run with the original error that ended a process; SimPy itself would raise a copy."""
        try:
            yield from process
        except BaseException as error:  # noqa: BLE001  # raised again by `run`, whatever it is
            self._failure = self._failure or error
            if not self._over.triggered:
                self._over.succeed()

    # --- ends ---

    def _route_again(self) -> None:
        """Called when requests have ended: next turns of their sessions may be due before the event that is awaited."""
        if self._dispatcher.next_ns() != self._routes_at and self._routing is not None:
            self._routing.interrupt()

    def _close_if_over(self) -> None:
        """Lets the loops end if no event can come any more: loops with work left then raise LivelockError."""
        if self._dispatcher.next_ns() is None and all(replica.is_idle for replica in self._replicas):
            self._dispatcher.close()
            for replica in self._replicas:
                replica.wake()
