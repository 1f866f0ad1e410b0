"""The recorded cost model: the durations and outcomes of a real run's tape, step by step."""

from __future__ import annotations

from sim.backend import SimWork
from testbed.core.plan import BatchPlan
from testbed.errors import RunFolderError
from testbed.records.tape import Tape


class RecordedBackend:
    """Replays a tape. Step k lasts what it lasted, so the decisions must come out identical.

    Raises RunFolderError when the scheduler asks for more steps than were recorded.
    """

    def __init__(self, tape: Tape) -> None:
        self._steps = tape.steps

    def start(self, plan: BatchPlan) -> SimWork:
        if plan.step >= len(self._steps):
            raise RunFolderError(f"the tape ends after {len(self._steps)} steps, but the replay goes on")
        step = self._steps[plan.step]
        return SimWork(step.commit_ns - step.plan_ns, step.spans, step.outcomes)
