"""The simulator's driver: runs the loop in SimPy time, in integer nanoseconds."""

from __future__ import annotations

from collections.abc import Generator
from decimal import Decimal
from typing import Any, Final, Protocol

import simpy

from sim.backend import SimWork
from testbed.core.commands import Execute, Resume, WaitUntil
from testbed.core.outcome import StepResult
from testbed.core.plan import BatchPlan
from testbed.core.serve import Loop
from testbed.errors import ConfigError, LivelockError

MAX_NS: Final = 2**62 - 1  # of an instant: sums of two fit into 64 bits; compiled code boxes larger ints


class PricedBackend(Protocol):
    """What this driver can drive: a plan in, a duration out."""

    def start(self, plan: BatchPlan) -> SimWork: ...


class Executor(Protocol):
    """Answers the loop's commands, given at `now_ns`: a Device, or a tape."""

    def execute(self, command: Execute, now_ns: int) -> Resume: ...

    def resume(self, until_ns: int | None, now_ns: int) -> Resume | None:
        """With what a loop that waits goes on; None: nobody would wake it."""
        ...


def run(loop: Loop, backend: PricedBackend) -> int:
    """Drives the loop to its end on a device of these prices; returns the simulated instant of it in ns."""
    return drive(loop, Device(backend))


def drive(loop: Loop, device: Executor) -> int:
    """Drives the loop to its end; returns the simulated instant of it in ns."""
    env = simpy.Environment()
    env.run(env.process(_engine(env, loop, device)))
    return int(env.now)


def _engine(env: Any, loop: Loop, device: Executor) -> Generator[Any, Any, None]:
    """One engine as a SimPy process. It is alone: its steps follow one another, and only its waits are events."""
    now_ns = int(env.now)
    try:
        command: WaitUntil | Execute = next(loop)
        while True:
            if isinstance(command, Execute):
                resume = device.execute(command, now_ns)
                now_ns = resume.now_ns
                command = loop.send(resume)
                continue
            woken = device.resume(command.until_ns, now_ns)
            if woken is None:
                raise LivelockError("the loop waits to be woken, and nobody is there to do it")
            now_ns = woken.now_ns
            yield env.timeout(now_ns - int(env.now))
            command = loop.send(woken)
    except StopIteration:
        yield env.timeout(now_ns - int(env.now))
    finally:
        loop.close()


class Device:
    """The simulated device: launched steps follow one another on it, the host's part of each before its own. Each
    answer is at least 1 ns after the one before it.

    The host schedules and prepares a step while the device is at the one before, if that is in flight; what of a step
    is neither (moves, forward pass, sampling) is the device's.
    """

    def __init__(self, backend: PricedBackend) -> None:
        self._backend = backend
        self._in_flight: tuple[tuple[int, SimWork], ...] = ()  # with the instant at which the device is done
        self._free_ns = self._answered_ns = 0

    def resume(self, until_ns: int | None, now_ns: int) -> Resume | None:
        return None if until_ns is None else Resume(max(now_ns, until_ns))

    def execute(self, command: Execute, now_ns: int) -> Resume:
        """The answer to a command of `now_ns`. Raises ConfigError for a price that leads beyond what instants say."""
        if command.plan is not None:
            work = self._backend.start(command.plan)
            now_ns += work.spans.schedule_ns + work.spans.prepare_ns
            device_ns = work.duration_ns - work.spans.schedule_ns - work.spans.prepare_ns
            self._free_ns = max(self._free_ns, now_ns) + device_ns
            if self._free_ns > MAX_NS:
                raise too_late(work.duration_ns)
            self._in_flight += ((self._free_ns, work),)
        now_ns = max(now_ns, self._answered_ns + 1)
        if command.is_ahead:
            self._answered_ns = now_ns
            return Resume(now_ns)
        done_ns, work = self._in_flight[0]
        self._in_flight = self._in_flight[1:]
        self._answered_ns = now_ns = max(now_ns, done_ns)
        return Resume(now_ns, StepResult(now_ns, work.outcomes, work.spans))


def too_late(duration_ns: int) -> ConfigError:
    """What to say of a step that ends beyond what instants can say."""
    duration_s = Decimal(duration_ns).scaleb(-9)  # of any length
    return ConfigError(
        f"the simulated clock passes {MAX_NS / 1e9:.1e} s: a step lasts {duration_s:.2e} s; check the prices (cost, "
        "the device's rates, backend.schedule_ns)"
    )
