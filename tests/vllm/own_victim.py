"""A user's policy, as it is named by `_target_`."""

from __future__ import annotations

from testbed.core.sequence import Sequence


class Youngest:
    """Preempts who came last."""

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        return max(running.values(), key=lambda seq: seq.seq_id)
