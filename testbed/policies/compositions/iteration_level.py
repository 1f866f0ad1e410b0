"""Iteration-level scheduling, as in Orca: sequences may join and leave after every step; prompts are never split."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from testbed.blocks.demand import AllocStatus
from testbed.core.plan import BlockedBy
from testbed.core.step import Step
from testbed.policies.compositions.swap_in import take_all_back


@mypyc_attr(allow_interpreted_subclasses=True)
class IterationLevel:
    """One mixed batch: every running sequence decodes, and waiting prompts join whole.

    Source: Yu et al., Orca, OSDI 2022. Orca's memory rule, which reserves room for the longest possible sequence on
    admission, is the admission policy `no_evict`. A prompt longer than the token budget joins an otherwise empty batch.
    """

    unused_limits = ("long_prefill_token_threshold", "max_num_partial_prefills", "max_long_partial_prefills")
    splits_prompts = False

    def compose(self, step: Step) -> None:
        step.decode()
        if not step.preempted:
            take_all_back(step)
        self._admit(step)

    def _admit(self, step: Step) -> None:
        while (seq := step.head()) is not None:
            if step.is_closed():
                return None
            if step.num_running + seq.num_seqs > step.limits.max_num_seqs:
                if step.make_room():
                    continue
                return step.blocked(BlockedBy.MAX_NUM_SEQS)
            hit = step.blocks.lookup(seq)
            num_tokens = seq.num_tokens - hit.num_tokens
            is_alone = step.token_budget == step.limits.max_num_batched_tokens
            if num_tokens > step.token_budget and not is_alone:
                return step.blocked(BlockedBy.TOKEN_BUDGET)
            status = step.can_admit(seq, seq.num_tokens, hit)
            if status is AllocStatus.LATER:
                if step.make_room():
                    continue
                return None
            if status is AllocStatus.OK:
                step.admit(seq, hit, num_tokens)
        return None
