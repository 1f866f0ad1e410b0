"""Arrivals that come together: recorded in batches, or with a coarse clock, they queue as no single ones would."""

from __future__ import annotations

from collections.abc import Iterable

from testbed.traces.schema import TraceRequest

_FEW = 0.05  # a share of arrivals that needs no word


class Batches:
    """Of rows that come one after the other, those that have an arrival of their own."""

    def __init__(self) -> None:
        self._latest_ns = -1
        self._num = self._num_equal = 0

    def add(self, row: TraceRequest) -> None:
        if row.think_ns is None:
            self._num += 1
            self._num_equal += row.arrival_ns == self._latest_ns
            self._latest_ns = row.arrival_ns

    @property
    def note(self) -> str | None:
        """What to know of them; None: few come together, or all at one instant."""
        num_gaps = self._num - 1
        if not _FEW * num_gaps < self._num_equal < num_gaps:
            return None
        return (
            f"{self._num_equal / num_gaps:.0%} of arrivals at the instant of the one before; "
            "trace.transforms=[{name: spread}] spreads them (mooncake: trace.spread_batches=true)"
        )


def batches_of(rows: Iterable[TraceRequest]) -> Batches:
    """Goes through the rows once."""
    batches = Batches()
    for row in rows:
        batches.add(row)
    return batches
