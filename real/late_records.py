"""Records that are written while the device computes. Knows events and their order; needs no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from testbed.core.commands import Recorder, StepView
from testbed.core.outcome import Finished
from testbed.core.request import Request


class LateRecords(Recorder):
    """Keeps a run's events until it catches up: then `recorder` sees them, in their order.

    Who drives the loop catches up when it has launched a step, and when there is nothing to launch. An event is seen
    once, also if the recorder raises. The recorder is not closed here.
    """

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._events: deque[Callable[[], None]] = deque()

    def of(self, recorder: Recorder) -> LateRecords:
        """This, with the recorder that it shows events to."""
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

    def committed(self, step: StepView) -> None:
        self._events.append(partial(self.recorder.committed, step))

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        self._events.append(partial(self.recorder.ended, finished, now_ns))

    def catch_up(self) -> None:
        """Raises what the recorder raises; what comes behind that is still to be seen."""
        while self._events:
            self._events.popleft()()

    def close(self) -> None:
        """Nothing more will come: all that is kept is seen. Raises what the recorder raised first."""
        failure: Exception | None = None
        while self._events:
            try:
                self.catch_up()
            except Exception as error:  # noqa: BLE001  (raised when the rest has been seen)
                failure = failure or error
        if failure is not None:
            raise failure
