"""Stop strings reach the core: a backend around the backend, which marks the outcomes that complete one.

The core ends a sequence whose outcome says so with the same step, so no token more is computed.
"""

from __future__ import annotations

from typing import Protocol

from real.driver import Computed, RunningBackend, RunningWork
from testbed.core.outcome import Outcome
from testbed.core.plan import BatchPlan


class Watch(Protocol):
    """Who knows the texts."""

    @property
    def has_stops(self) -> bool:
        """Whether any request that is live has stop strings."""
        ...

    def planned(self, plan: BatchPlan) -> None: ...

    def marked(self, outcome: Outcome) -> Outcome:
        """The outcome, with `stop` and `fork_stops` where a stop string is complete."""
        ...


class StoppingBackend:
    """Implements testbed.core.interfaces.Backend."""

    def __init__(self, backend: RunningBackend, watch: Watch) -> None:
        self._backend = backend
        self._watch = watch

    def start(self, plan: BatchPlan) -> RunningWork:
        work = self._backend.start(plan)
        self._watch.planned(plan)
        return _StoppingWork(work, self._watch) if self._watch.has_stops else work


class _StoppingWork:
    def __init__(self, work: RunningWork, watch: Watch) -> None:
        self._work = work
        self._watch = watch

    def wait(self) -> Computed:
        computed = self._work.wait()
        if computed.outcomes is None:
            return computed
        return computed._replace(outcomes=tuple(self._watch.marked(outcome) for outcome in computed.outcomes))
