"""Prefill first, as vLLM's first engine: a step is all prompts or all decodes."""

from __future__ import annotations

from testbed.blocks.manager import Verdict
from testbed.plan import BlockedBy
from testbed.step import Step


class PrefillFirst:
    """Admits waiting prompts, whole, in one prompt-only batch; decodes only if none could be admitted.

    Source: Kwon et al., SOSP 2023, and vLLM's first scheduler. It differs in two ways: the token budget counts only
    tokens that are computed, not padding; and a preempted sequence that has outgrown the budget meanwhile is admitted
    alone instead of being ended half served.
    """

    unused_limits = ("long_prefill_token_threshold", "max_num_partial_prefills")  # prompts are not split

    def compose(self, step: Step) -> None:
        self._admit(step)
        if not step.rows:
            self._decode(step)

    def _admit(self, step: Step) -> None:
        while (seq := step.head()) is not None:
            if step.num_running >= step.limits.max_num_seqs:
                return step.blocked(BlockedBy.MAX_NUM_SEQS)
            hit = step.blocks.lookup(seq)
            num_tokens = len(seq.tokens) - hit.num_tokens
            is_oversize = num_tokens > step.limits.max_num_batched_tokens
            if is_oversize and not seq.num_preemptions:
                step.ignore(
                    seq,
                    f"{num_tokens} tokens to prefill exceed max_num_batched_tokens "
                    f"({step.limits.max_num_batched_tokens}), and prefill_first does not split a prompt",
                )
                continue
            if num_tokens > step.token_budget and (step.rows or not is_oversize):
                return step.blocked(BlockedBy.TOKEN_BUDGET)
            verdict = step.can_admit(seq, len(seq.tokens), hit)
            if verdict is Verdict.LATER:
                return step.blocked(BlockedBy.KV_BLOCKS)
            if verdict is Verdict.OK:
                step.admit(seq, hit, num_tokens)
        return None

    def _decode(self, step: Step) -> None:
        step.decode(step.running())
        if step.preempted and step.blocked_by is None:
            step.blocked(BlockedBy.PREEMPTION)
