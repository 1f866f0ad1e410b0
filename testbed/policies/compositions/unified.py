"""Unified, as vLLM V1: no phases; the computed tokens of every sequence catch up with its known ones."""

from __future__ import annotations

from testbed.blocks.manager import Verdict
from testbed.plan import BlockedBy
from testbed.step import Step


class Unified:
    """Deals the token budget out in queue order: running sequences first, then waiting ones; any prompt may be split.

    Source: vLLM 0.33, V1 core. Nothing is admitted in a step that preempted; the long-prefill threshold is off while
    at most one request is in the system.
    """

    unused_limits = ("max_num_partial_prefills",)

    def compose(self, step: Step) -> None:
        threshold = step.limits.long_prefill_token_threshold
        if step.num_running + step.num_waiting <= 1:
            threshold = 0
        if step.prefilling:
            self._catch_up(step, threshold)
        else:
            step.decode(step.running())
        self._admit(step, threshold)

    def _catch_up(self, step: Step, threshold: int) -> None:
        for seq in step.running():
            if step.token_budget == 0:
                return
            num_tokens = min(_capped(len(seq.tokens) - seq.num_computed_tokens, threshold), step.token_budget)
            if step.reserve(seq, num_tokens):
                step.schedule(seq, num_tokens)

    def _admit(self, step: Step, threshold: int) -> None:
        while (seq := step.head()) is not None:
            if step.preempted:
                return step.blocked(BlockedBy.PREEMPTION)
            if step.token_budget == 0:
                return step.blocked(BlockedBy.TOKEN_BUDGET)
            if step.num_running >= step.limits.max_num_seqs:
                return step.blocked(BlockedBy.MAX_NUM_SEQS)
            hit = step.blocks.lookup(seq)
            num_tokens = min(_capped(len(seq.tokens) - hit.num_tokens, threshold), step.token_budget)
            verdict = step.can_admit(seq, hit.num_tokens + num_tokens, hit)
            if verdict is Verdict.LATER:
                return step.blocked(BlockedBy.KV_BLOCKS)
            if verdict is Verdict.OK:
                step.admit(seq, hit, num_tokens)
        return None


def _capped(num_tokens: int, threshold: int) -> int:
    return min(num_tokens, threshold) if threshold else num_tokens
