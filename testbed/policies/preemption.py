"""Preemption mode: how a victim's KV is given up, by recompute or by swap."""

from __future__ import annotations

from typing import Protocol

from testbed.plan import PreemptionMode
from testbed.sequence import Sequence


class PreemptionChoice(Protocol):
    """A user's own class with this method plugs in by `_target_`. It may have `bind(context: PolicyContext)`."""

    def mode(self, seq: Sequence, num_blocks: int) -> PreemptionMode:
        """How to preempt the victim, whose group holds `num_blocks` distinct GPU blocks.

        It is a wish: where the CPU pool has no room, the mechanism recomputes; a group of several beams it cannot.
        """
        ...


class Auto:
    """Recompute where one sequence runs alone, swap where a group has several (vLLM's first engine)."""

    def mode(self, seq: Sequence, num_blocks: int) -> PreemptionMode:
        return PreemptionMode.RECOMPUTE if seq.num_seqs == 1 else PreemptionMode.SWAP
