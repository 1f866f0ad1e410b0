"""Rows of a plan without a batch of the core: they were received from another process, or made by hand."""

from __future__ import annotations

from testbed.core.plan import Rows, ScheduledSequence


class MadeRows(Rows):
    """Rows that exist already, for a device. They do not name their requests."""

    def __init__(self, rows: tuple[ScheduledSequence, ...]) -> None:
        self._rows = rows

    def make(self) -> tuple[ScheduledSequence, ...]:
        return self._rows
