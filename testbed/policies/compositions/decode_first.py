"""Decode first with chunked prefill, as Sarathi-Serve: one mixed batch under one token budget."""

from __future__ import annotations

from testbed.blocks.manager import Verdict
from testbed.plan import BlockedBy
from testbed.sequence import Sequence
from testbed.step import Step


class DecodeFirst:
    """Decodes, then unfinished prefills, then new prefills, each in chunks of what is left of the budget.

    Source: Agrawal et al., Sarathi-Serve, OSDI 2024. At most `max_num_partial_prefills` prompts are part-way through
    their prefill at a time; they share the budget evenly.
    """

    def compose(self, step: Step) -> None:
        prefilling = list(step.prefilling.values())  # in order of admission
        step.decode(
            [seq for seq in step.running() if seq.seq_id not in step.prefilling] if prefilling else step.running()
        )
        for seq in prefilling:
            num_tokens = self._chunk(step, seq, seq.num_computed_tokens)
            if num_tokens and step.reserve(seq, num_tokens):
                step.schedule(seq, num_tokens)
        self._admit(step)

    def _admit(self, step: Step) -> None:
        while (seq := step.head()) is not None:
            if step.preempted:
                return step.blocked(BlockedBy.PREEMPTION)
            if step.num_running >= step.limits.max_num_seqs:
                return step.blocked(BlockedBy.MAX_NUM_SEQS)
            if step.token_budget == 0:
                return step.blocked(BlockedBy.TOKEN_BUDGET)
            hit = step.blocks.lookup(seq)
            num_tokens = self._chunk(step, seq, hit.num_tokens)
            is_partial = hit.num_tokens + num_tokens < len(seq.tokens)
            if is_partial and step.num_partial_prefills() >= step.limits.max_num_partial_prefills:
                return step.blocked(BlockedBy.PARTIAL_PREFILLS)
            verdict = step.can_admit(seq, hit.num_tokens + num_tokens, hit)
            if verdict is Verdict.LATER:
                return step.blocked(BlockedBy.KV_BLOCKS)
            if verdict is Verdict.OK:
                step.admit(seq, hit, num_tokens)
        return None

    def _chunk(self, step: Step, seq: Sequence, num_computed: int) -> int:
        """How many of the sequence's missing tokens this step computes."""
        limits = step.limits
        num_tokens = min(len(seq.tokens) - num_computed, step.token_budget)
        if limits.max_num_partial_prefills > 1:
            num_tokens = min(num_tokens, max(1, limits.max_num_batched_tokens // limits.max_num_partial_prefills))
        if limits.long_prefill_token_threshold:
            num_tokens = min(num_tokens, limits.long_prefill_token_threshold)
        return num_tokens
