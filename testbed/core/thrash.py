"""Tells when running sequences take KV blocks from each other for ever: steps go by, and nobody gets a token.

Each of these plans is full of work, so no empty one gives it away. What does is the state: as long as nothing is
emitted and nothing ends, a step that preempts finds the same sequences, as far computed as before. Once may be chance
(a policy that goes by time, a prefix that is evicted later); `MAX_RETURNS` times is for ever.
"""

from __future__ import annotations

from array import array
from typing import ClassVar

import xxhash

from testbed.core.plan import BatchPlan
from testbed.core.scheduler import Scheduler
from testbed.core.state import SequenceState
from testbed.foreign_text import some


class Thrash:
    """Watches from a step that preempts and emits nothing to the next step that emits, or in which something ends."""

    MAX_RETURNS: ClassVar = 200

    def __init__(self) -> None:
        self._returns: dict[int, int] = {}  # of each state in which a step preempted
        self._victims: dict[str, None] = {}
        self._message: str | None = None

    def committed(self, plan: BatchPlan, scheduler: Scheduler, *, has_ended: bool) -> str | None:
        """What to say once a state has come back too often, until something gets on; None: it has not."""
        if scheduler.emitters or has_ended:
            if self._victims:
                self._returns, self._victims, self._message = {}, {}, None
        elif plan.preempted and self._message is None:
            self._preempted(plan, scheduler)
        return self._message

    def _preempted(self, plan: BatchPlan, scheduler: Scheduler) -> None:
        self._victims |= dict.fromkeys([victim.request_id for victim in plan.preempted])
        state = array("q")
        for seq in scheduler.unfinished():
            if seq.state is not SequenceState.WAITING:
                state.extend((seq.seq_id, seq.state, seq.num_tokens, seq.num_computed_tokens))
        key = xxhash.xxh64_intdigest(state.tobytes())
        self._returns[key] = self._returns.get(key, 0) + 1
        if self._returns[key] > self.MAX_RETURNS:
            self._message = (
                f"requests take KV blocks from each other and get nowhere: {some(list(self._victims))}; "
                f"{self.MAX_RETURNS} times in the same state without a token. Give them more blocks "
                "(cache.num_gpu_blocks) or larger chunks, run fewer at a time (scheduler.max_num_seqs), or choose "
                "another scheduler.victim"
            )
