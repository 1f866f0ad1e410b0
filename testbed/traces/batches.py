"""Counts arrivals at one instant: recorded in batches, or with a coarse clock, they queue more than in reality."""

from __future__ import annotations

from testbed.traces.schema import TraceRequest

_FEW = 0.05  # a share of arrivals that needs no note
_CLOSE_NS = 500  # recordings have microseconds at best
_FINE = 0.01  # with as many such gaps for each gap of 0, a process made them (gamma), rounded to whole ns


class Batches:
    """Counts the arrivals at the instant of the one before. Closed-loop turns have no arrival, and do not count."""

    def __init__(self) -> None:
        self._latest_ns = -1
        self.num = self._num_equal = self._num_close = 0  # arrivals

    def add(self, row: TraceRequest) -> None:
        if row.think_ns is None:
            self.num += 1
            self._num_equal += row.arrival_ns == self._latest_ns
            self._num_close += self._latest_ns >= 0 and 0 < row.arrival_ns - self._latest_ns <= _CLOSE_NS
            self._latest_ns = row.arrival_ns

    @property
    def note(self) -> str | None:
        """A note on these arrivals; None if they are few, if all arrivals are at one instant, or if shortest gaps show
        that no clock put them there."""
        num_gaps = self.num - 1
        if not _FEW * num_gaps < self._num_equal < num_gaps or self._num_close > _FINE * self._num_equal:
            return None
        return (
            f"{self._num_equal / num_gaps:.0%} of arrivals at the instant of the one before; "
            "trace.transforms=[{name: spread}] spreads them (mooncake: trace.spread_batches=true; a trace of your own: "
            "once `testbed trace freeze` has written it)"
        )
