"""The simulator's driver: runs the loop in SimPy time, in integer nanoseconds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator
from decimal import Decimal
from itertools import accumulate
from typing import Any, Protocol

import simpy

from sim.backend import SimWork
from testbed.core.interfaces import Execute, Resume
from testbed.core.plan import BatchPlan, RunSpans, StepResult
from testbed.core.serve import Loop
from testbed.errors import ConfigError, LivelockError

MAX_NS = 2**62  # of an instant: sums of two still fit into 64 bits


class PricedBackend(Protocol):
    """What this driver can drive: a plan in, a duration out."""

    def start(self, plan: BatchPlan, limit_ns: int | None = None) -> SimWork: ...


def run(loop: Loop, backend: PricedBackend) -> int:
    """Drives the loop to its end; returns the simulated instant of it in ns."""
    env = simpy.Environment()
    env.run(env.process(_engine(env, loop, backend)))
    return int(env.now)


def _engine(env: simpy.Environment, loop: Loop, backend: PricedBackend) -> Generator[Any, Any, None]:
    """One engine as a SimPy process: each command of the loop becomes a timeout."""
    timeout, now_ns = env.timeout, int(env.now)
    try:
        command = next(loop)
        while True:
            if isinstance(command, Execute):
                plan, wake_ns = command
                limit_ns = None if wake_ns is None else max(1, wake_ns - now_ns)
                result = result_of(backend.start(plan, limit_ns), now_ns, wake_ns)
                end_ns = result.end_ns[-1]
                yield timeout(end_ns - now_ns)
                now_ns = end_ns
                command = loop.send(Resume(now_ns, result))
            else:
                if command.until_ns is None:
                    raise LivelockError("the loop waits to be woken, and nobody is there to do it")
                yield timeout(max(0, command.until_ns - now_ns))
                now_ns = int(env.now)
                command = loop.send(Resume(now_ns))
    except StopIteration:
        return
    finally:
        loop.close()


def result_of(work: SimWork, start_ns: int, wake_ns: int | None) -> StepResult:
    """What becomes of work that starts now: its steps up to the first that ends at or after `wake_ns`.

    Raises ConfigError for prices that lead beyond what instants can say.
    """
    durations_ns, spans, outcomes = work
    num_steps = len(durations_ns)
    if num_steps == 1 and start_ns + durations_ns[0] <= MAX_NS:
        return StepResult((start_ns + durations_ns[0],), outcomes, spans[0])
    ends = list(accumulate(durations_ns, initial=start_ns))
    if wake_ns is not None and ends[-1] > wake_ns:
        num_steps = bisect_left(ends, wake_ns, 1)
        del ends[num_steps + 1 :]
    if ends[-1] > MAX_NS:
        raise too_late(max(durations_ns))
    first = spans.first if type(spans) is RunSpans else spans[0]
    return StepResult(tuple(ends[1:]), outcomes, first, spans[1:num_steps])


def too_late(longest_ns: int) -> ConfigError:
    """What to say of a step that ends beyond what instants can say."""
    longest_s = Decimal(longest_ns).scaleb(-9)  # of any length
    return ConfigError(
        f"the simulated clock passes {MAX_NS / 1e9:.1e} s: a step lasts {longest_s:.2e} s; check the prices (cost, the "
        "device's rates, backend.schedule_ns)"
    )
