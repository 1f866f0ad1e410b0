"""Traces some steps of a run by torch's profiler: operators, kernels and copies, in ranges named after the parts of a
step. The ranges are also NVTX ranges, which Nsight Systems shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from real.driver import Computed, Work
from testbed.core.interfaces import Backend
from testbed.core.plan import BatchPlan
from testbed.records.schema import STEP_TRACE_FILE

Ranges = Callable[[str], AbstractContextManager[object]]


class NamesParts(Backend[Work], Protocol):
    """A backend that can run the parts of its steps in named ranges."""

    def name_parts(self, ranges: Ranges = ...) -> None: ...


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """A range for torch's profiler, and for NVTX if there is a GPU."""
    has_nvtx = torch.cuda.is_available()
    if has_nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with record_function(name):
            yield
    finally:
        if has_nvtx:
            torch.cuda.nvtx.range_pop()


class StepTrace:
    """Wraps a backend and traces its steps from `first` to `last` to STEP_TRACE_FILE in the folder. A Backend[Work].

    A step is traced from its launch until it was waited for. The profiler itself takes time, most of it in the first
    traced step, which waits until the profiler has started, and at the end of the last one.
    """

    def __init__(self, backend: NamesParts, folder: Path, first: int, last: int) -> None:
        self._backend, self._folder, self._first, self._last = backend, folder, first, last
        self._profile: profile | None = None  # until it is written
        self._is_over = False

    def start(self, plan: BatchPlan) -> Work:
        if self._is_over or plan.step < self._first - 1:
            return self._backend.start(plan)
        if plan.step < self._first:  # if the first one is launched before this one was waited for, that is traced
            return Work(partial(self._wait, self._backend.start(plan), plan.step))
        if self._profile is None:
            self._begin()
        with named_range(f"step {plan.step}"):
            return Work(partial(self._wait, self._backend.start(plan), plan.step))

    def _wait(self, work: Work, step: int) -> Computed:
        with named_range(f"wait for step {step}"):
            computed = work.wait()
        if step >= self._last:
            self._end()
        return computed

    def close(self) -> None:
        """Writes the trace, also if the run ended before the last step to trace."""
        self._end()
        if self._profile is not None:
            self._profile.export_chrome_trace(str(self._folder / STEP_TRACE_FILE))
            self._profile = None

    def _end(self) -> None:
        if self._profile is not None and not self._is_over:
            self._profile.stop()
            self._backend.name_parts()
            self._is_over = True

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(activities=activities, acc_events=True)  # one cycle; without it, torch warns
        self._profile.start()
        self._backend.name_parts(named_range)
