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

MAX_NS: Final = 2**62  # of an instant: sums of two still fit into 64 bits


class PricedBackend(Protocol):
    """What this driver can drive: a plan in, a duration out."""

    def start(self, plan: BatchPlan) -> SimWork: ...


def run(loop: Loop, backend: PricedBackend) -> int:
    """Drives the loop to its end; returns the simulated instant of it in ns."""
    env = simpy.Environment()
    env.run(env.process(_engine(env, loop, backend)))
    return int(env.now)


def _engine(env: Any, loop: Loop, backend: PricedBackend) -> Generator[Any, Any, None]:
    """One engine as a SimPy process. It is alone: its steps follow one another, and only its waits are events."""
    now_ns = int(env.now)
    try:
        command: WaitUntil | Execute = next(loop)
        while True:
            if isinstance(command, Execute):
                result = result_of(backend.start(command.plan), now_ns)
                now_ns = result.end_ns
                command = loop.send(Resume(now_ns, result))
                continue
            if command.until_ns is None:
                raise LivelockError("the loop waits to be woken, and nobody is there to do it")
            now_ns = max(now_ns, command.until_ns)
            yield env.timeout(now_ns - int(env.now))
            command = loop.send(Resume(now_ns))
    except StopIteration:
        yield env.timeout(now_ns - int(env.now))
    finally:
        loop.close()


def result_of(work: SimWork, start_ns: int) -> StepResult:
    """What becomes of work that starts now. Raises ConfigError for a price that leads beyond what instants can say."""
    end_ns = start_ns + work.duration_ns
    if end_ns > MAX_NS:
        raise too_late(work.duration_ns)
    return StepResult(end_ns, work.outcomes, work.spans)


def too_late(duration_ns: int) -> ConfigError:
    """What to say of a step that ends beyond what instants can say."""
    duration_s = Decimal(duration_ns).scaleb(-9)  # of any length
    return ConfigError(
        f"the simulated clock passes {MAX_NS / 1e9:.1e} s: a step lasts {duration_s:.2e} s; check the prices (cost, "
        "the device's rates, backend.schedule_ns)"
    )
