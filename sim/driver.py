"""The simulator's driver: runs the loop in SimPy time, in integer nanoseconds."""

from __future__ import annotations

from collections.abc import Generator
from decimal import Decimal
from typing import Any, Final, Protocol

import simpy

from sim.backend import SimWork
from testbed.core.commands import Execute, Resume, WaitUntil
from testbed.core.interfaces import Backend
from testbed.core.outcome import StepResult
from testbed.core.serve import Loop
from testbed.errors import ConfigError, LivelockError

LATEST_NS: Final = 2**62 - 1  # of the clock: a sum of two fits into 64 bits; compiled code boxes larger ints


class Executor(Protocol):
    """Answers the loop's commands, which are given at `now_ns`. Implemented by Device and RecordedDevice (a tape)."""

    def execute(self, command: Execute, now_ns: int) -> Resume: ...

    def resume(self, until_ns: int | None, now_ns: int) -> Resume | None:
        """Returns the answer that ends the loop's wait (until_ns None: no known end); None: it would wait forever."""
        ...


def run(loop: Loop, backend: Backend[SimWork]) -> int:
    """Drives the loop to its end on a device with this backend's step times. Returns the simulated end time in ns."""
    return drive(loop, Device(backend))


def drive(loop: Loop, device: Executor) -> int:
    """Drives the loop to its end. Returns the simulated end time in ns."""
    env = simpy.Environment()
    env.run(env.process(_engine(env, loop, device)))
    return int(env.now)


def _engine(env: Any, loop: Loop, device: Executor) -> Generator[Any, Any, None]:
    """A single engine as a SimPy process. Only its waits are SimPy events: no other process needs to see its steps."""
    now_ns = int(env.now)
    try:
        command = next(loop, None)
        while command is not None:
            if isinstance(command, Execute):
                resume: Resume | None = device.execute(command, now_ns)
            else:
                resume = device.resume(command.until_ns, now_ns)
            if resume is None:
                raise LivelockError("the loop waits to be woken, and nobody is there to do it")
            now_ns = resume.now_ns
            if isinstance(command, WaitUntil):
                yield env.timeout(now_ns - int(env.now))
            command = sent(loop, resume)
        yield env.timeout(now_ns - int(env.now))
    except StopIteration as error:  # of a user's cost model, as in testbed.core.serve
        raise RuntimeError("StopIteration was raised by a step's price") from error
    finally:
        loop.close()


def sent(loop: Loop, resume: Resume) -> WaitUntil | Execute | None:
    """Returns the loop's next command; None at its end."""
    try:
        return loop.send(resume)
    except StopIteration:
        return None


class Device:
    """The simulated device. Launched steps run on it one after the other, each after the host's part of it. The answers
    of `execute` are at least 1 ns apart.

    The host's part of a step (scheduling and preparation) overlaps with the step in flight, if there is one. All other
    spans (swaps and copies, forward pass, sampling) are the device's part.
    """

    def __init__(self, backend: Backend[SimWork]) -> None:
        self._backend = backend
        self._in_flight: tuple[tuple[int, SimWork], ...] = ()  # (instant at which the device is done, step)
        self._free_ns, self._answered_ns = 0, -1

    def resume(self, until_ns: int | None, now_ns: int) -> Resume | None:
        return None if until_ns is None else Resume(max(now_ns, until_ns))

    def execute(self, command: Execute, now_ns: int) -> Resume:
        """Returns the answer to a command given at `now_ns`. Raises ConfigError for a step that ends too late."""
        if command.plan is not None:
            work = self._backend.start(command.plan)
            now_ns += work.spans.schedule_ns + work.spans.prepare_ns
            device_ns = work.duration_ns - work.spans.schedule_ns - work.spans.prepare_ns
            self._free_ns = max(self._free_ns, now_ns) + device_ns
            if self._free_ns > LATEST_NS:
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
    """Returns the error for a step that ends after LATEST_NS."""
    duration_s = Decimal(duration_ns).scaleb(-9)  # may be too large for a float
    return ConfigError(
        f"the simulated clock passes {LATEST_NS / 1e9:.1e} s: a step lasts {duration_s:.2e} s; check the prices (cost, "
        "the device's rates, backend.schedule_ns)"
    )
