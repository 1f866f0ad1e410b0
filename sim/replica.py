"""One replica of a fleet: its loop and the step in flight, as a SimPy process."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import simpy

from sim.backend import SimBackend
from sim.driver import LATEST_NS, Device, sent, too_late
from sim.link import HostLink, Process, SwapsUnderWay
from testbed.blocks.kv_sequence import RELEASED
from testbed.core.commands import Execute, Resume, WaitUntil
from testbed.core.outcome import StepResult
from testbed.core.plan import BatchPlan
from testbed.core.serve import Loop
from testbed.routing.dispatch import ReplicaInbox


class _At(simpy.Event):
    """An event at an instant, after all ordinary SimPy events of that instant, ordered by `rank`."""

    def __init__(self, env: simpy.Environment, instant_ns: int, rank: int) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        env.schedule(self, simpy.events.EventPriority(simpy.events.NORMAL + 1 + rank), instant_ns - int(env.now))


class Phases:
    """The order of the events of one instant in a fleet of `num_replicas`.

    Plans see the aborts of their instant. An arrival that such an abort releases at the same instant is routed after
    all plans of that instant, which do not see it.
    """

    def __init__(self, env: simpy.Environment, num_replicas: int) -> None:
        self.env = env
        self._num_replicas = num_replicas
        self._planned_ns = -1

    @property
    def is_late(self) -> bool:
        """Whether a replica has planned at this instant."""
        return self._planned_ns == int(self.env.now)

    def planning(self) -> None:
        """Notes that a replica plans now."""
        self._planned_ns = int(self.env.now)

    def at_commit(self, instant_ns: int, replica: int) -> simpy.Event:
        return _At(self.env, instant_ns, replica)

    def at_scrape(self, instant_ns: int) -> simpy.Event:
        return _At(self.env, instant_ns, self._num_replicas)

    def at_routing(self, instant_ns: int) -> simpy.Event:
        is_after_plans = self.is_late and instant_ns == int(self.env.now)
        return _At(self.env, instant_ns, self._num_replicas * (2 if is_after_plans else 1) + 1 + is_after_plans)

    def at_plan(self, instant_ns: int, replica: int) -> simpy.Event:
        return _At(self.env, instant_ns, self._num_replicas + 2 + replica)


class Replica:
    """One replica. link: over which its swaps go; None: swaps are a part of each step.

    on_idle: called whenever the replica can continue only with an event from the router.
    """

    def __init__(
        self,
        phases: Phases,
        number: int,
        loop: Loop,
        inbox: ReplicaInbox,
        block_size: int,
        backend: SimBackend,
        link: HostLink | None,
        on_idle: Callable[[], None],
    ) -> None:
        self.number = number
        self.process: simpy.Process | None = None
        self._env = phases.env
        self._phases = phases
        self._loop = loop
        self._inbox = inbox
        self._block_size = block_size
        self._backend = backend
        self._device = Device(backend)
        self._link = link
        self._on_idle = on_idle
        self._swaps = SwapsUnderWay()
        self._command: WaitUntil | Execute | None = None  # None: the loop has ended
        self._is_stuck = False  # whether the loop repeats the same preemptions, which only an event can end
        self._answer: Resume | None = None  # to the present Execute command, unless its step involves the link

    # --- the process ---

    def serve(self) -> Process:
        """Drives the loop to its end."""
        env = self._env
        self._take(next(self._loop, None))
        while self._command is not None:
            try:
                if isinstance(self._command, WaitUntil):
                    if self.is_idle and self._inbox.is_open:
                        self._on_idle()  # may close the inbox
                    yield self._boundary(self._command.until_ns)
                    self._phases.planning()
                    self._resume(Resume(int(env.now)))
                else:
                    answer = self._answer
                    if answer is None:
                        assert self._command.plan is not None
                        result = yield from self._step_beside_transfers(self._command.plan)
                        answer = Resume(result.end_ns, result)
                    yield self._phases.at_commit(answer.now_ns, self.number)
                    self._resume(answer)
            except simpy.Interrupt:  # the inbox has changed: look again
                continue

    def _boundary(self, until_ns: int | None) -> simpy.Event:
        """Returns the event with which a waiting loop continues."""
        instant_ns = self._inbox.next_ns() if until_ns is None else until_ns
        if instant_ns is None and self._inbox.is_open:
            return self._env.event()  # an interrupt will come
        return self._phases.at_plan(max(int(self._env.now), instant_ns or 0), self.number)

    def _resume(self, resume: Resume) -> None:
        self._answer = None
        self._take(sent(self._loop, resume), resume.now_ns)

    def _take(self, command: WaitUntil | Execute | None, now_ns: int = 0) -> None:
        self._command = command
        if isinstance(command, WaitUntil):
            self._is_stuck = command.is_stuck
        if isinstance(command, Execute) and not (command.plan is not None and self._meets_transfers(command.plan)):
            self._answer = self._device.execute(command, now_ns)

    # --- events from outside ---

    @property
    def is_idle(self) -> bool:
        """Whether the loop can continue only with an event, and none has come."""
        return (self._is_waiting or self._is_stuck) and self._inbox.next_ns() is None

    @property
    def _is_waiting(self) -> bool:
        """Whether the loop has nothing to do, and no instant is known at which it will have."""
        return isinstance(self._command, WaitUntil) and self._command.until_ns is None

    def wake(self) -> None:
        """Called when an event came to the inbox, or the inbox was closed: ends a wait, but never cuts a step short."""
        self._is_stuck = False
        if self._is_waiting and self.process is not None and self.process is not self._env.active_process:
            self.process.interrupt()

    # --- swaps on the link ---

    def _meets_transfers(self, plan: BatchPlan) -> bool:
        """Whether the step swaps over the link, or runs while swap-outs are under way."""
        return self._link is not None and bool(plan.swap_out or plan.swap_in or self._swaps)

    def _step_beside_transfers(self, plan: BatchPlan) -> Generator[simpy.Event, Any, StepResult]:
        """Runs one step with its transfers on the link. Raises ConfigError as a Device does.

        Its swap-outs may continue after the step. Its swap-ins overlap with its computation, layer by layer: the step
        ends when both have ended. The computation waits for swap-outs of the blocks that it writes.
        """
        assert self._link is not None
        env, swaps, start_ns = self._env, self._swaps, int(self._env.now)
        work = self._backend.start(plan)
        num_out, num_in = len(plan.swap_out), len(plan.swap_in)
        moves_ns = self._backend.transfer_ns(num_out, num_in) if num_out or num_in else 0
        spans = work.spans.replace(swap_ns=max(0, work.spans.swap_ns - moves_ns))  # without the time of transfers
        if spans.schedule_ns:
            yield env.timeout(spans.schedule_ns)
        if plan.swap_out:
            out_ns = self._backend.transfer_ns(num_out, 0)
            if out_ns:
                swaps.add(plan.swap_out, self._link.move_out(out_ns))
        moving_in: list[simpy.Process] = []
        if plan.swap_in:
            sources, targets = zip(*plan.swap_in, strict=True)
            saved = swaps.before_reading(sources) + swaps.before_writing(targets)
            moving_in = [self._link.move_in(self._backend.transfer_ns(0, num_in), saved)]
        if swaps:
            yield env.all_of(swaps.before_writing(written_blocks(plan, self._block_size)))
        yield env.timeout(spans.total_ns - spans.schedule_ns)
        yield env.all_of(moving_in)
        end_ns = max(int(env.now), start_ns + 1)
        if end_ns > LATEST_NS:
            raise too_late(end_ns - start_ns)
        waited_ns = int(env.now) - start_ns - spans.total_ns
        return StepResult(end_ns, work.outcomes, spans.replace(swap_ns=spans.swap_ns + waited_ns))


def written_blocks(plan: BatchPlan, block_size: int) -> list[int]:
    """Returns the GPU blocks that a step writes: those of the tokens that it computes, and targets of its copies."""
    blocks = [target for _, target in plan.copies]
    for row in plan.scheduled:
        last = (row.start + row.num_tokens - 1) // block_size
        blocks += row.block_table[row.start // block_size : last + 1]
    return [block for block in dict.fromkeys(blocks) if block != RELEASED]
