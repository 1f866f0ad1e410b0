"""The admission, preemption and victim policies of a step, built-in or a user's. Checks all answers except victims."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from testbed.core.interfaces import AdmissionPolicy, PreemptionChoice, VictimChoice
from testbed.core.plan import PreemptionMode
from testbed.core.sequence import Sequence


class Policies:
    """The policies of one scheduler."""

    def __init__(self, admission: AdmissionPolicy, preemption: PreemptionChoice, victims: VictimChoice) -> None:
        self.victims = victims
        self.admission: Any = admission
        self._preemption: Any = preemption
        self._timed: list[Any] = [one for one in (admission, preemption, victims) if hasattr(one, "now_ns")]

    def tell_time(self, now_ns: int) -> None:
        """Passes the instant of the next step to the policies that have `now_ns`."""
        for policy in self._timed:
            policy.now_ns = now_ns

    def mode(self, victim: Sequence, num_blocks: int) -> PreemptionMode:
        """Returns how to preempt the victim. A policy may answer with a mode's name; others raise ValueError."""
        return PreemptionMode(self._preemption.mode(victim, num_blocks))


def allows(admission: Any, seq: Sequence, running: Collection[Sequence]) -> bool:
    """Whether the admission policy lets `seq` start. Raises TypeError if its answer is not a bool."""
    answer = admission.allows(seq, running)
    if not isinstance(answer, bool):
        raise TypeError(f"allows() returned {answer!r}, not True or False")
    return answer
