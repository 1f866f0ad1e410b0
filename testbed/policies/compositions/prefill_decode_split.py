"""Prefills or decodes, never both, as in nano-vllm: prefills come first, and the first of a batch may be split."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from testbed.blocks.demand import AllocStatus
from testbed.core.plan import BlockedBy
from testbed.core.step import Step


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefillDecodeSplit:
    """A step computes prefills if there are any; otherwise it decodes.

    Source: nano-vllm, April 2026. As there, `max_num_seqs` limits each batch, not the running sequences: those beyond
    it wait for a place in a decode batch. caps_running: it limits both, as SGLang's max_running_requests does.
    """

    unused_limits = ("long_prefill_token_threshold", "max_num_partial_prefills", "max_long_partial_prefills")

    def __init__(self, *, caps_running: bool = False) -> None:
        self.caps_batches_only = not caps_running

    def compose(self, step: Step) -> None:
        for seq in list(step.prefilling.values()):  # the one that an earlier step has started
            num_tokens = min(seq.num_tokens - seq.num_computed_tokens, step.token_budget)
            if num_tokens and step.reserve(seq, num_tokens):
                step.schedule(seq, num_tokens)
        if step.preempted and step.num_waiting:
            step.blocked(BlockedBy.PREEMPTION)
        elif not step.num_swapped:
            self._admit(step)
        elif step.num_waiting:
            step.blocked(BlockedBy.SWAPPED_FIRST)
        if not step.batch.seqs:
            self._decode(step)
            if not step.preempted:
                self._swap_in(step)
            elif step.num_waiting:
                step.blocked(BlockedBy.PREEMPTION)

    def _admit(self, step: Step) -> None:
        num_seqs = len(step.batch.seqs) if self.caps_batches_only else step.num_running
        while (seq := step.head()) is not None:
            if num_seqs + seq.num_seqs > step.limits.max_num_seqs:
                return step.blocked(BlockedBy.MAX_NUM_SEQS)
            if step.token_budget == 0:
                return step.blocked(BlockedBy.TOKEN_BUDGET)
            hit = step.blocks.lookup(seq)
            status = step.can_admit(seq, seq.num_tokens, hit)
            if status is AllocStatus.LATER:
                return None
            if status is AllocStatus.NEVER:
                continue
            missing = seq.num_tokens - hit.num_tokens
            if missing > step.token_budget and step.batch.seqs:
                return step.blocked(BlockedBy.TOKEN_BUDGET)
            step.admit(seq, hit, min(missing, step.token_budget))
            num_seqs += seq.num_seqs
        return None

    def _swap_in(self, step: Step) -> None:
        """Adds swapped-out sequences to the decodes while there is room; nano-vllm does not swap."""
        for seq in step.swapped():
            num_seqs = len(step.batch.seqs) if self.caps_batches_only else step.num_running
            if num_seqs + seq.num_seqs > step.limits.max_num_seqs:
                return
            num_tokens = step.next_chunk(seq)
            if not num_tokens:
                return
            if step.take_back(seq, num_tokens) is AllocStatus.LATER:
                return

    def _decode(self, step: Step) -> None:
        if step.num_running <= min(step.limits.max_num_seqs, step.token_budget):
            return step.decode()
        num_seqs = 0
        for seq in step.running():
            if num_seqs + seq.num_together > step.limits.max_num_seqs:
                return None
            if step.reserve(seq, 1):
                num_seqs += seq.num_together
                step.schedule(seq, 1)
        return None
