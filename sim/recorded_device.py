"""A device that replays a real run's tape: the durations and outcomes of its steps, one by one. It prices nothing."""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter

from testbed.core.commands import Execute, Resume
from testbed.core.outcome import StepResult
from testbed.errors import RunFolderError
from testbed.records.tape import Tape


class RecordedDevice:
    """Replays a tape. Each step is planned and committed at the recorded instants, so the scheduler's decisions must be
    identical. Implements sim.driver.Executor.

    Raises RunFolderError if the scheduler plans more steps than were recorded.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._in_flight: list[int] = []
        self._num_started = 0

    def execute(self, command: Execute, now_ns: int) -> Resume:
        if command.plan is not None:
            number = command.plan.step
            if number >= len(self._tape.steps):
                raise RunFolderError(f"the tape ends after {number} steps, but the replay goes on")
            self._in_flight.append(number)
            self._num_started = number + 1
            if command.is_ahead:
                return Resume(max(now_ns, self._looked_again_ns(number)))
        return self._end_oldest()

    def resume(self, until_ns: int | None, now_ns: int) -> Resume | None:
        """Returns the answer to a wait. On a live tape, at the next recorded plan or event, or end of a step before."""
        if not self._tape.is_live:
            return None if until_ns is None else Resume(max(now_ns, until_ns))
        steps, events = self._tape.steps, self._tape.events
        known = [step.plan_ns for step in steps[self._num_started : self._num_started + 1]]
        first = bisect_right(events, now_ns, key=attrgetter("now_ns"))
        known += [event.now_ns for event in events[first : first + 1]]
        next_ns = min([ns for ns in known if ns >= now_ns], default=None)
        if self._in_flight and (next_ns is None or steps[self._in_flight[0]].commit_ns <= next_ns):
            return self._end_oldest()
        next_ns = until_ns if next_ns is None else next_ns
        return None if next_ns is None else Resume(next_ns)

    def _end_oldest(self) -> Resume:
        step = self._tape.steps[self._in_flight.pop(0)]
        return Resume(step.commit_ns, StepResult(step.commit_ns, step.outcomes, step.spans))

    def _looked_again_ns(self, number: int) -> int:
        """Returns when the loop planned again after a launch that it did not wait for. If there was nothing to plan, an
        older tape lacks that instant (looked_ns); the last event that the loop saw before the commit then gives it."""
        step = self._tape.steps[number]
        if self._tape.is_live:
            return step.plan_ns + 1  # the loop then waits to be asked for a step
        if step.looked_ns is not None:
            return step.looked_ns
        if number + 1 < len(self._tape.steps) and self._tape.steps[number + 1].plan_ns < step.commit_ns:
            return self._tape.steps[number + 1].plan_ns
        seen = [event.now_ns for event in self._tape.events if step.plan_ns < event.now_ns < step.commit_ns]
        return max(seen, default=step.plan_ns + 1)
