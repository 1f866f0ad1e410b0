"""Unified, as in vLLM V1: no phases; the computed tokens of every sequence catch up with its tokens so far."""

from __future__ import annotations

from mypy_extensions import i64, mypyc_attr

from testbed.blocks.demand import AllocStatus
from testbed.core.plan import BlockedBy
from testbed.core.state import RUNNING
from testbed.core.step import Step
from testbed.policies.compositions.swap_in import take_all_back


@mypyc_attr(allow_interpreted_subclasses=True)
class Unified:
    """Gives the token budget to running, then swapped-out, then waiting sequences, in their order; splits any prompt.

    No sequence is admitted if the step preempted for lack of blocks, or while sequences are swapped out.

    Source: vLLM's V1 core. threshold_when_alone: whether the long-prefill threshold also holds while at most one
    request is in the system (up to 0.30), or not (since 0.31). own_victim_ends_round: whether a running sequence that
    preempted itself ends the round (up to 0.32), or the running sequences behind it may use the freed blocks (0.33).
    """

    unused_limits = ("max_num_partial_prefills", "max_long_partial_prefills")

    def __init__(self, *, threshold_when_alone: bool = False, own_victim_ends_round: bool = False) -> None:
        self._threshold_when_alone = threshold_when_alone
        self._own_victim_ends_round = own_victim_ends_round

    def compose(self, step: Step) -> None:
        threshold: i64 = step.limits.long_prefill_token_threshold
        if threshold and not self._threshold_when_alone and step.num_running + step.num_waiting <= 1:
            threshold = 0
        for seq in step.running():
            if seq.state is not RUNNING or step.token_budget < seq.num_together:
                continue  # a victim of this step, or no budget for the whole group
            num_tokens = min(_capped(seq.num_tokens - seq.num_computed_tokens, threshold), step.token_budget)
            if step.reserve(seq, num_tokens):
                step.schedule(seq, num_tokens)
            elif self._own_victim_ends_round:
                break
        if step.num_swapped and not step.preempted:
            take_all_back(step)  # vLLM V1 never swaps; here groups of several do, and others by the `preemption` mode
        self._admit(step, threshold)

    def _admit(self, step: Step, threshold: int) -> None:
        while (seq := step.head()) is not None:
            if step.is_closed():
                return None
            if step.token_budget == 0:
                return step.blocked(BlockedBy.TOKEN_BUDGET)
            if step.num_running + seq.num_seqs > step.limits.max_num_seqs:
                if step.make_room():
                    continue
                return step.blocked(BlockedBy.MAX_NUM_SEQS)
            hit = step.blocks.lookup(seq)
            num_tokens = min(_capped(seq.num_tokens - hit.num_tokens, threshold), step.token_budget)
            status = step.can_admit(seq, hit.num_tokens + num_tokens, hit)
            if status is AllocStatus.LATER:
                if step.make_room():
                    continue
                return None
            if status is AllocStatus.OK:
                step.admit(seq, hit, num_tokens)
        return None


def _capped(num_tokens: i64, threshold: i64) -> i64:
    return min(num_tokens, threshold) if threshold else num_tokens
