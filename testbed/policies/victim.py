"""Victim choice: who is preempted when a running sequence cannot grow."""

from __future__ import annotations

from typing import Protocol

from testbed.sequence import Sequence


class VictimChoice(Protocol):
    """A user's own class with this method plugs in by `_target_`."""

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        """One of the running sequences, given by id in order of admission; never empty."""
        ...


class MostRecentlyAdmitted:
    """The sequence that was admitted last has the least to lose."""

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        return running[next(reversed(running))]
