"""Rows of a plan without a batch of the core: they were received from another process, or made by hand."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from testbed.core.plan import Rows, ScheduledSequence


class MadeRows(Rows):
    """Rows that exist already. names: the request id of each row; a device needs none."""

    def __init__(self, rows: tuple[ScheduledSequence, ...], names: Seq[str] = ()) -> None:
        self._rows = rows
        self._names = names

    def make(self) -> tuple[ScheduledSequence, ...]:
        return self._rows

    def num_scheduled(self) -> list[tuple[str, int]]:
        return [(name, row.num_tokens) for name, row in zip(self._names, self._rows, strict=True)]
