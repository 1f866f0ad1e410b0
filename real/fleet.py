"""Real replicas behind a router, in real time: one thread drives all loops, each engine runs in a process of its own.

What happens in a turn, in this order: steps that are done are committed, in replica order; what is due is routed; loops
that wait go on. So a router sees every step that is over by then, as it does in the simulator. Needs no torch.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Protocol

from real.clocks import SLEEP_SLICE_S, Clock
from real.driver import Drive, RunningBackend, StepLog
from testbed.core.interfaces import Inbox
from testbed.core.scheduler import Scheduler
from testbed.core.serve import Loop
from testbed.routing.dispatch import Dispatcher
from testbed.routing.routers import Router


class ReplicaBackend(RunningBackend, Protocol):
    """An engine that runs beside this process."""

    @property
    def has_answer(self) -> bool:
        """Whether waiting for the oldest step in flight would not block. Raises what ended the engine."""
        ...

    def fileno(self) -> int:
        """Readable when an answer has come."""
        ...


class Fleet:
    """Some engines, one inbox for all of them, and the router between. Give each loop its inbox of `inboxes`."""

    def __init__(
        self, source: Inbox, router: Router, backends: Sequence[ReplicaBackend], clock: Clock, log: StepLog
    ) -> None:
        self._dispatcher = Dispatcher(source, router, len(backends))
        self.inboxes = self._dispatcher.inboxes
        self._backends = backends
        self._clock = clock
        self._log = log
        self._drives: list[Drive[None]] = []
        self._schedulers: Sequence[Scheduler] = ()

    def run(
        self, loops: Sequence[Loop], schedulers: Sequence[Scheduler], catch_ups: Sequence[Callable[[], None]] = ()
    ) -> None:
        """Drives the loops to their ends. Raises what a loop or an engine raises; what is committed stays recorded.
        catch_ups: one for each, as `real.driver.run` has it."""
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
        """All that can be done now; whether anything was."""
        has_moved = self._commit()
        now_ns = self._clock.now_ns()  # what comes from here on is for the next turn, and for the steps planned there
        for _ in self._dispatcher.send_due(now_ns, is_late=True):
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
        """Answers what is done, up to where each loop waits for an event or for its engine."""
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
        """Whether nothing will ever move: those that have work left have nobody to help them."""
        return self._dispatcher.next_ns() is None and all(drive.waits_for_events for drive in self._drives)

    def _rest(self) -> None:
        """Until an engine has an answer or something is due, but not for long: Ctrl-C is heard when a loop goes on."""
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
            if drive.is_waiting and not scheduler.has_work:
                drive.wake(self._clock.now_ns())
