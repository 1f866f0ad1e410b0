"""Simulated runs without configuration files: a trace, a core built by hand, a cost model, and what was recorded."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from analysis.reading.frames import as_frame
from sim.backend import SimBackend
from sim.cost.base import CostModel
from sim.cost.config import ConstantConfig
from sim.cost.constant import ConstantCost
from sim.driver import run
from sim.fleet import Fleet
from testbed.core.commands import Recorder, StepView
from testbed.core.outcome import Finished
from testbed.core.request import GREEDY, Request, SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.core.serve import serve
from testbed.errors import LivelockError
from testbed.records.recorder import RunRecorder
from testbed.records.recorders import Recorders
from testbed.traces.arrange import arrange
from testbed.traces.inbox import TraceInbox
from testbed.traces.schema import Span, Trace, TraceRequest

VOCAB_SIZE = 32_000
STEP_NS = 10_000_000


def constant(step_ns: int = STEP_NS) -> CostModel:
    return ConstantCost(ConstantConfig(step_ns / 1e9))


def trace_of(arrivals_ns: Sequence[int], outputs: Sequence[int], num_prompt_tokens: int = 1) -> Trace:
    """Requests r0, r1, … of prompts that nobody shares."""
    rows = [
        TraceRequest(f"r{i}", arrival, (Span(2 * i, 0, num_prompt_tokens),), Span(2 * i + 1, 0, output))
        for i, (arrival, output) in enumerate(zip(arrivals_ns, outputs, strict=True))
    ]
    return arrange("by hand", rows)


@dataclass
class Instants(Recorder):
    """A recorder of three instants, in ns, by request id: arrival, start of the first step, end."""

    arrival: dict[str, int] = field(default_factory=dict)
    start: dict[str, int] = field(default_factory=dict)
    end: dict[str, int] = field(default_factory=dict)

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        self.arrival[request.request_id] = request.arrival_ns

    def committed(self, step: StepView) -> None:
        for admission in step.plan.admitted:
            self.start.setdefault(admission.request_id, step.plan_ns)

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        for item in finished:
            self.end[item.request.request_id] = now_ns

    @property
    def waits_ns(self) -> list[int]:
        """Arrival to the start of service, in order of arrival."""
        return [self.start[name] - arrival for name, arrival in self.arrival.items()]

    @property
    def makespan_ns(self) -> int:
        return max(self.end.values()) - min(self.arrival.values())


def serve_trace(scheduler: Scheduler, trace: Trace, cost: CostModel | None = None) -> Instants:
    """Simulates a trace to its end."""
    instants = Instants()
    run(serve(TraceInbox(trace, VOCAB_SIZE), scheduler, instants), SimBackend(cost or constant()))
    return instants


class StopRun(Exception):  # noqa: N818  (it stops a run, and is no error)
    """The run was cut short, as by Ctrl-C."""


class Cut(Recorder):
    """Ends the run after so many steps, as a recorder: not every policy promises that everything ends."""

    def __init__(self, num_steps: int) -> None:
        self._num_left = num_steps

    def committed(self, step: StepView) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            raise StopRun


@dataclass(frozen=True)
class Records:
    requests: pd.DataFrame
    steps: pd.DataFrame
    is_cut: bool


def recorded(
    scheduler: Scheduler, trace: Trace, cost: CostModel | None = None, *, sampling: SamplingParams = GREEDY,
    num_steps: int = 2000, stops_on: tuple[type[Exception], ...] = (),
) -> Records:  # fmt: skip
    """Simulates a trace and reads the records back as a run folder would hold them.

    num_steps: after which the run is cut. stops_on: errors of a policy that end the run where it is, as a partial one.
    """
    is_cut = False
    with tempfile.TemporaryDirectory() as folder:
        recorder = RunRecorder(Path(folder))
        try:
            inbox = TraceInbox(trace, VOCAB_SIZE, sampling)
            loop = serve(inbox, scheduler, Recorders(recorder, Cut(num_steps)))
            run(loop, SimBackend(cost or constant()))
        except (StopRun, *stops_on):
            is_cut = True
        finally:
            recorder.close()
        return _read(Path(folder), is_cut)


def _read(folder: Path, is_cut: bool) -> Records:
    requests, steps = (as_frame(pq.read_table(folder / f"{name}.parquet")) for name in ("requests", "steps"))
    return Records(requests, steps, is_cut)


def fleet_recorded(fleet: Fleet, schedulers: list[Scheduler]) -> Records:
    """Runs a fleet; its records as a run folder holds them."""
    with tempfile.TemporaryDirectory() as folder:
        recorders: list[RunRecorder] = []
        for replica in range(len(schedulers)):
            recorders.append(RunRecorder(Path(folder), replica=replica, beside=recorders[0] if recorders else None))
        loops = [
            serve(inbox, scheduler, recorder)
            for inbox, scheduler, recorder in zip(fleet.inboxes, schedulers, recorders, strict=True)
        ]
        with suppress(LivelockError):
            fleet.run(loops, schedulers)
        for recorder in reversed(recorders):
            recorder.close()
        return _read(Path(folder), is_cut=False)
