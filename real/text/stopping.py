"""Stop strings reach the core: a backend around the backend, which marks the outcomes that complete one.

The core ends a sequence whose outcome says so with the same step, so no token more is computed.
"""

from __future__ import annotations

from real.driver import Computed, RunningBackend, RunningWork
from real.text.collector import Collector
from testbed.core.plan import BatchPlan


class StoppingBackend:
    """Implements testbed.core.interfaces.Backend. collector: knows the texts."""

    def __init__(self, backend: RunningBackend, collector: Collector) -> None:
        self._backend = backend
        self._collector = collector

    def start(self, plan: BatchPlan) -> RunningWork:
        work = self._backend.start(plan)
        self._collector.planned(plan)
        return _StoppingWork(work, self._collector) if self._collector.has_stops else work


class _StoppingWork:
    def __init__(self, work: RunningWork, collector: Collector) -> None:
        self._work = work
        self._collector = collector

    def wait(self) -> Computed:
        computed = self._work.wait()
        if computed.outcomes is None:
            return computed
        return computed._replace(outcomes=tuple(self._collector.marked(outcome) for outcome in computed.outcomes))
