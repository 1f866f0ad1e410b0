"""Real replicas behind a router, in real time: one thread drives all loops, each engine runs in a process of its own.

Each turn has this order: finished steps are committed, in replica order; due events are routed; waiting loops go on. So
a router sees every step that has finished by then, as in the simulator. Needs no torch.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from itertools import zip_longest

from real.clocks import SLEEP_SLICE_S, Clock
from real.driver import Drive, StepLog
from real.parallel.replica import ReplicaEngine
from testbed.core.interfaces import Inbox
from testbed.core.scheduler import Scheduler
from testbed.core.serve import Loop
from testbed.routing.dispatch import Dispatcher
from testbed.routing.routers import Router


class Fleet:
    """Several engines, one inbox for all of them, and the router in between. Each loop must get one of `inboxes`."""

    def __init__(
        self, source: Inbox, router: Router, backends: Sequence[ReplicaEngine], clock: Clock, log: StepLog
    ) -> None:
        self._dispatcher = Dispatcher(source, router, len(backends))
        self.inboxes = self._dispatcher.inboxes
        self._backends = backends
        self._clock = clock
        self._log = log
        self._drives: list[Drive] = []
        self._schedulers: Sequence[Scheduler] = ()

    def run(
        self, loops: Sequence[Loop], schedulers: Sequence[Scheduler], catch_ups: Sequence[Callable[[], None]] = ()
    ) -> None:
        """Drives the loops to their ends. Raises errors of loops and engines; committed steps stay recorded. catch_ups:
        one per loop, as for `real.driver.run`."""
        self._dispatcher.attach(schedulers)
        self._schedulers = schedulers
        self._drives = [
            Drive(loop, backend, self._clock, self._log, catch_up)
            for loop, backend, catch_up in zip_longest(loops, self._backends, catch_ups)
        ]
        try:
            while not all(drive.is_over for drive in self._drives):
                if not self._turn():
                    self._rest()
        finally:
            for loop in loops:
                loop.close()

    def _turn(self) -> bool:
        """Does everything that can be done now; returns whether there was anything."""
        has_moved = self._commit()
        now_ns = self._clock.now_ns()  # later arrivals are for the next turn and its plans
        for _ in self._dispatcher.send_due(now_ns):
            has_moved = True
        for drive, inbox in zip(self._drives, self.inboxes, strict=True):
            if drive.is_waiting and (inbox.next_ns() is not None or not drive.waits_for_events):
                drive.wake(now_ns)
                drive.begin()
                has_moved = True
        if not has_moved and self._is_over:
            self._dispatcher.close()
            for drive in self._drives:
                drive.wake(now_ns)
            return True
        return has_moved

    def _commit(self) -> bool:
        """Commits finished steps, until each loop waits for an event or for its engine."""
        has_moved = False
        for drive, backend in zip(self._drives, self._backends, strict=True):
            while not drive.is_waiting and not drive.is_over:
                drive.begin()
                if drive.awaits_result and not backend.has_answer:
                    break
                drive.step()
                has_moved = True
        return has_moved

    @property
    def _is_over(self) -> bool:
        """Whether nothing can happen any more: no event is left, and every loop waits for one."""
        return self._dispatcher.next_ns() is None and all(drive.waits_for_events for drive in self._drives)

    def _rest(self) -> None:
        """Waits until an engine has an answer or an event is due; at most SLEEP_SLICE_S, so that Ctrl-C has effect."""
        for drive in self._drives:
            drive.catch_up()
        next_ns = self._dispatcher.next_ns()
        busy = [backend for drive, backend in zip(self._drives, self._backends, strict=True) if drive.awaits_result]
        if busy:
            left_s = SLEEP_SLICE_S if next_ns is None else (next_ns - self._clock.now_ns()) / 1e9
            select.select(busy, [], [], min(max(left_s, 0.0), SLEEP_SLICE_S))
            return
        assert next_ns is not None, "a fleet without work in flight rests until something is due"
        self._clock.wait_until(min(next_ns, self._clock.now_ns() + round(SLEEP_SLICE_S * 1e9)))
        for drive, scheduler in zip(self._drives, self._schedulers, strict=True):
            if drive.is_waiting and not scheduler.has_work:  # a loop that wakes sees that Ctrl-C was pressed
                drive.wake(self._clock.now_ns())
