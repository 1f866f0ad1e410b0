"""Delays the writing of records until the device computes. Knows events and their order; needs no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from testbed.core.commands import Recorder, StepView
from testbed.core.outcome import Finished
from testbed.core.request import Request


class LateRecords(Recorder):
    """Keeps a run's events until `catch_up`, which passes them to `recorder` in their order.

    The driver of the loop calls it after launching a step, and when there is nothing to launch. Each event is passed
    once, even if the recorder raises. The recorder is not closed here.
    """

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._events: deque[Callable[[], None]] = deque()

    def of(self, recorder: Recorder) -> LateRecords:
        """Sets the recorder that gets the events; returns self."""
        self._recorder = recorder
        return self

    @property
    def recorder(self) -> Recorder:
        assert self._recorder is not None, "nobody is to see the events"
        return self._recorder

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        self._events.append(partial(self.recorder.arrived, request, now_ns, step))

    def aborted(self, request_id: str, now_ns: int, step: int) -> None:
        self._events.append(partial(self.recorder.aborted, request_id, now_ns, step))

    def prefixes_reset(self, now_ns: int, step: int) -> None:
        self._events.append(partial(self.recorder.prefixes_reset, now_ns, step))

    def launched(self, step: StepView) -> None:
        self._events.append(partial(self.recorder.launched, step))

    def committed(self, step: StepView) -> None:
        self._events.append(partial(self.recorder.committed, step))

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        self._events.append(partial(self.recorder.ended, finished, now_ns))

    def catch_up(self) -> None:
        """Passes on all kept events. If the recorder raises, the later events stay kept."""
        while self._events:
            self._events.popleft()()

    def close(self) -> None:
        """Passes on all kept events at the end of a run, even if some fail. Raises the recorder's first error."""
        failure: Exception | None = None
        while self._events:
            try:
                self.catch_up()
            except Exception as error:  # noqa: BLE001  (raised when the rest has been seen)
                failure = failure or error
        if failure is not None:
            raise failure
