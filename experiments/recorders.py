"""Recorders of a run beside its files: several at once, and how far it is. Compiled: they are told of each step."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from mypy_extensions import mypyc_attr

from testbed.core.commands import StepView
from testbed.core.interfaces import Recorder
from testbed.core.outcome import Finished
from testbed.core.request import Request


@mypyc_attr(allow_interpreted_subclasses=True)
class NoRecords:
    """A `Recorder` that keeps nothing; a subclass keeps what it says."""

    def arrived(self, request: Request, now_ns: int, step: int) -> None: ...
    def aborted(self, request_id: str, now_ns: int, step: int) -> None: ...
    def committed(self, step: StepView) -> None: ...
    def ended(self, finished: list[Finished], now_ns: int) -> None: ...


class Recorders:
    """Shows the loop's events to several recorders, in order."""

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders = recorders

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        for recorder in self._recorders:
            recorder.arrived(request, now_ns, step)

    def aborted(self, request_id: str, now_ns: int, step: int) -> None:
        for recorder in self._recorders:
            recorder.aborted(request_id, now_ns, step)

    def committed(self, step: StepView) -> None:
        for recorder in self._recorders:
            recorder.committed(step)

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        for recorder in self._recorders:
            recorder.ended(finished, now_ns)


def together(recorders: Sequence[Recorder]) -> Recorder:
    """All of them as one."""
    return recorders[0] if len(recorders) == 1 else Recorders(*recorders)


class Progress(NoRecords):
    """Finished requests, with rate and time left: a bar on a terminal, elsewhere a line every LINE_S seconds on
    standard error. A `Recorder`."""

    LINE_S: ClassVar[float] = 30.0

    def __init__(self, total: int | None, label: str) -> None:
        self._total, self._label, self._num = total, label, 0
        self._began = time.monotonic()
        self._next = self._began + self.LINE_S
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm  # not at the top: nobody may look

            self._bar = tqdm(total=total, desc=label, unit="req", leave=False, delay=0.5)

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        self._num += len(finished)
        if self._bar is not None:
            self._bar.update(len(finished))
        elif time.monotonic() >= self._next:
            self._next += self.LINE_S
            print(self._line(time.monotonic() - self._began), file=sys.stderr, flush=True)

    def _line(self, spent_s: float) -> str:
        of = "" if self._total is None else f" of {self._total:,}"
        left = "" if self._total is None else f", {(self._total - self._num) * spent_s / self._num:.0f} s left"
        return f"{self._label}: {self._num:,}{of} requests in {spent_s:.0f} s, {self._num / spent_s:,.0f} req/s{left}"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
