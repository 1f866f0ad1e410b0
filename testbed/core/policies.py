"""The small policies that a step asks, of ours or of a user's own. Checks answers, but for victims: those must run."""

from __future__ import annotations

from typing import Any

from testbed.core.interfaces import AdmissionPolicy, PreemptionChoice, VictimChoice
from testbed.core.plan import PreemptionMode
from testbed.core.sequence import Sequence


class Policies:
    """Of one scheduler."""

    def __init__(self, admission: AdmissionPolicy, preemption: PreemptionChoice, victims: VictimChoice) -> None:
        self.victims = victims
        self._admission: Any = admission
        self._preemption: Any = preemption
        self._timed: Any = victims if hasattr(victims, "now_ns") else None

    def tell_time(self, now_ns: int) -> None:
        """A step is about to be decided."""
        if self._timed is not None:
            self._timed.now_ns = now_ns

    def allows(self, seq: Sequence, running: dict[int, Sequence]) -> bool:
        """Raises TypeError for an answer that is none: a user's class may forget to answer."""
        answer = self._admission.allows(seq, running.values())
        if not isinstance(answer, bool):
            raise TypeError(f"allows() returned {answer!r}, not True or False")
        return answer

    def mode(self, victim: Sequence, num_blocks: int) -> PreemptionMode:
        """How to preempt it; the answer may be a mode's name. Raises ValueError for one that is none."""
        return PreemptionMode(self._preemption.mode(victim, num_blocks))
