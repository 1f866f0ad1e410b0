"""The policies of a scheduler, built-in or a user's. Asks them, checks all answers except victims, and tells them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from testbed.composites import with_parts
from testbed.core.batch import Batch
from testbed.core.interfaces import VictimChoice
from testbed.core.plan import PreemptionMode
from testbed.core.sequence import Sequence
from testbed.core.state import FINISHED


class Policies:
    """The policies of one scheduler. others: those that are told, and not asked. left: their methods of this name."""

    def __init__(self, admission: Any, preemption: Any, victims: VictimChoice, *others: Any) -> None:
        self.victims, self.admission, self._preemption = victims, admission, preemption  # Any: answers are checked here
        told = with_parts(others) + (asked := with_parts((admission, preemption, victims)))
        self._timed: list[Any] = [one for one in asked if hasattr(one, "now_ns")]
        self._served: list[Callable[..., object]] = [*filter(callable, [getattr(x, "served", None) for x in told])]
        self.left: list[Callable[..., object]] = [*filter(callable, [getattr(x, "left", None) for x in told])]

    def tell_time(self, now_ns: int) -> None:
        """Passes the instant of the next step to the policies that have `now_ns`."""
        for policy in self._timed:
            policy.now_ns = now_ns

    def tell_served(self, batch: Batch, emitters: list[Sequence], now_ns: int) -> None:
        """Passes what each live sequence got to those that have `served`. New members of a group got a token."""
        if not self._served:
            return
        got = {seq: batch.counts[index] for index, seq in enumerate(batch.seqs) if seq.state is not FINISHED}
        emitted = dict.fromkeys(emitters, 0)
        for seq, num_tokens in (got | {seq: 0 for seq in emitted if seq not in got}).items():
            for served in self._served:
                served(seq, num_tokens, int(seq in emitted), now_ns)

    def mode(self, victim: Sequence, num_blocks: int) -> PreemptionMode:
        """Returns how to preempt the victim. A policy may answer with a mode's name; others raise ValueError."""
        return PreemptionMode(self._preemption.mode(victim, num_blocks))


def allows(admission: Any, seq: Sequence, running: Collection[Sequence]) -> bool:
    """Whether the admission policy lets `seq` start. Raises TypeError if its answer is not a bool."""
    answer = admission.allows(seq, running)
    if not isinstance(answer, bool):
        raise TypeError(f"allows() returned {answer!r}, not True or False")
    return answer
