"""The simulator's driver: runs the loop in SimPy time, in integer nanoseconds."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

import simpy

from sim.backend import SimWork
from testbed.errors import LivelockError
from testbed.interfaces import Execute, Resume
from testbed.plan import BatchPlan, StepResult
from testbed.serve import Loop


class PricedBackend(Protocol):
    """What this driver can drive: a plan in, a duration out."""

    def start(self, plan: BatchPlan) -> SimWork: ...


def run(loop: Loop, backend: PricedBackend) -> int:
    """Drives the loop to its end; returns the simulated instant of it in ns."""
    env = simpy.Environment()
    env.run(env.process(_engine(env, loop, backend)))
    return int(env.now)


def _engine(env: simpy.Environment, loop: Loop, backend: PricedBackend) -> Generator[Any, Any, None]:
    """One engine as a SimPy process: each command of the loop becomes a timeout."""
    timeout = env.timeout
    try:
        command = next(loop)
        while True:
            if isinstance(command, Execute):
                work = backend.start(command.plan)
                yield timeout(work.duration_ns)
                now_ns = int(env.now)
                command = loop.send(Resume(now_ns, StepResult((now_ns,), work.outcomes, work.spans)))
            else:
                if command.until_ns is None:
                    raise LivelockError("the loop waits to be woken, and nobody is there to do it")
                yield timeout(max(0, command.until_ns - env.now))
                command = loop.send(Resume(int(env.now)))
    except StopIteration:
        return
    finally:
        loop.close()
