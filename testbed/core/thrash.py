"""Detects thrashing: running sequences preempt each other forever, and no request gets a token.

None of these plans is empty, so the loop does not see that it is stuck. It is visible in the state: while nothing is
emitted and nothing ends, steps that preempt find the same sequences with the same computed tokens as before. A few
times may be chance (a policy that depends on time, a prefix that is evicted later); more than `MAX_RETURNS` are not.
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
    """Counts recurring states from a step that preempts and emits nothing until a step emits or a request ends."""

    MAX_RETURNS: ClassVar = 200

    def __init__(self) -> None:
        self._returns: dict[int, int] = {}  # by hash of a state: how many steps preempted in it
        self._victims: dict[str, None] = {}
        self.message: str | None = None  # the error, once a state has recurred too often and until there is progress

    def committed(self, plan: BatchPlan, scheduler: Scheduler, *, has_ended: bool) -> None:
        if scheduler.emitters or has_ended:
            if self._victims:
                self._returns, self._victims, self.message = {}, {}, None
        elif plan.preempted and self.message is None:
            self._preempted(plan, scheduler)

    def _preempted(self, plan: BatchPlan, scheduler: Scheduler) -> None:
        self._victims |= dict.fromkeys([victim.request_id for victim in plan.preempted])
        state = array("q")
        for seq in scheduler.unfinished():
            if seq.state is not SequenceState.WAITING:
                state.extend((seq.seq_id, seq.state, seq.num_tokens, seq.num_computed_tokens))
        key = xxhash.xxh64_intdigest(state.tobytes())
        self._returns[key] = self._returns.get(key, 0) + 1
        if self._returns[key] > self.MAX_RETURNS:
            self.message = (
                f"requests take KV blocks from each other and get nowhere: {some(list(self._victims))}; "
                f"{self.MAX_RETURNS} times in the same state without a token. Give them more blocks "
                "(cache.num_gpu_blocks) or larger chunks, run fewer at a time (scheduler.max_num_seqs), or choose "
                "another scheduler.victim"
            )
