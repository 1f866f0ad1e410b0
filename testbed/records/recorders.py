"""Several recorders as one."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.core.commands import Recorder, StepView
from testbed.core.outcome import Finished
from testbed.core.request import Request


class Recorders(Recorder):
    """Passes the loop's events to several recorders, in order."""

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders = recorders

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        for recorder in self._recorders:
            recorder.arrived(request, now_ns, step)

    def aborted(self, request_id: str, now_ns: int, step: int) -> None:
        for recorder in self._recorders:
            recorder.aborted(request_id, now_ns, step)

    def prefixes_reset(self, now_ns: int, step: int) -> None:
        for recorder in self._recorders:
            recorder.prefixes_reset(now_ns, step)

    def launched(self, step: StepView) -> None:
        for recorder in self._recorders:
            recorder.launched(step)

    def committed(self, step: StepView) -> None:
        """Raises the first error once all recorders have the step: a tape without it could not be replayed further."""
        failure: Exception | None = None
        for recorder in self._recorders:
            try:
                recorder.committed(step)
            except Exception as error:  # noqa: BLE001  (raised below)
                failure = failure or error
        if failure is not None:
            raise failure

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        for recorder in self._recorders:
            recorder.ended(finished, now_ns)


def together(recorders: Sequence[Recorder]) -> Recorder:
    """Returns one recorder for all of them."""
    return recorders[0] if len(recorders) == 1 else Recorders(*recorders)
