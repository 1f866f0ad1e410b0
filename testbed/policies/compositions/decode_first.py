"""Decode first with chunked prefill: one mixed batch under one token budget."""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

from testbed.blocks.demand import AllocStatus
from testbed.core.plan import BlockedBy
from testbed.core.sequence import Sequence
from testbed.core.step import Step

MAX_PASSED_OVER: Final = 128  # long prompts that a step passes over in search of a shorter one


@mypyc_attr(allow_interpreted_subclasses=True)
class DecodeFirst:
    """Decodes, then unfinished prefills, then swapped-out sequences, then new prefills in chunks of the budget left.

    Source: Agrawal et al., Sarathi-Serve, OSDI 2024; vLLM 0.8.5's chunked scheduler. Up to `max_num_partial_prefills`
    prompts share the budget evenly. If that is more than one, at most `max_long_partial_prefills` of them are longer
    than `long_prefill_token_threshold` (0: 4 % of max_model_len), and shorter ones may overtake up to 128 long ones.

    admits_after_preemption: whether a step that preempted still admits (0.8.5), or leaves the blocks to running ones.
    in_running_order: whether running sequences get tokens in running order, and those that found no budget come first
    in the next step (0.8.5), or decodes come first.
    """

    own_rules = ("chunks_fill_blocks",)  # the KV rules that this composition reads itself

    def __init__(self, *, admits_after_preemption: bool = False, in_running_order: bool = False) -> None:
        self._admits_after_preemption = admits_after_preemption
        self._in_running_order = in_running_order

    def compose(self, step: Step) -> None:
        num_long = sum(1 for seq in step.prefilling.values() if step.is_long(seq))
        share = self._share(step, num_long)
        prefilling = list(step.prefilling.values())
        decodes = [seq for seq in step.running() if not seq.is_prefilling] if prefilling else []
        finishing: list[Sequence] = []
        unfinished: list[Sequence] = []
        least = self._least(step)
        if prefilling and self._in_running_order:
            self._run_in_order(step, share, least)
        else:
            step.decode(min_budget=least)
            for seq in prefilling:
                self._go_on(step, seq, share)
        if prefilling:
            for seq, start, num_tokens in step.rows:
                if seq.is_prefilling:
                    (finishing if start + num_tokens == seq.num_tokens else unfinished).append(seq)
        swapped_in: list[Sequence] = []
        if not step.preempted:
            swapped_in = sorted(self._swap_in(step), key=lambda seq: seq.is_prefilling)
        self._keep_order(step, [*swapped_in, *decodes, *finishing, *unfinished])
        if step.preempted and not self._admits_after_preemption:
            if step.num_waiting:
                step.blocked(BlockedBy.PREEMPTION)
        else:
            self._admit(step, share, num_long)

    def _run_in_order(self, step: Step, share: int, least: int) -> None:
        for seq in step.running():
            if seq.is_prefilling:
                if not self._go_on(step, seq, share):
                    return
            elif step.token_budget < max(least, seq.num_together):
                return
            elif step.reserve(seq, 1):
                step.schedule(seq, 1)

    def _go_on(self, step: Step, seq: Sequence, share: int) -> bool:
        """Schedules the next chunk of an unfinished prefill; returns False if no budget is left."""
        num_tokens = self._chunk(step, seq.num_tokens - seq.num_computed_tokens, share)
        if num_tokens and step.reserve(seq, num_tokens):
            step.schedule(seq, num_tokens)
        return num_tokens > 0

    def _keep_order(self, step: Step, wanted: list[Sequence]) -> None:
        """Reorders the running sequences: prefills that end in this step come before unfinished ones, as they decode
        next. With `in_running_order`, sequences that found no budget come first."""
        if not step.prefilling and not step.swapped_in and not self._in_running_order:
            return
        running = {seq.unit_id: seq for seq in step.running()}
        if self._in_running_order:
            scheduled = {seq.unit_id for seq in step.batch.seqs}
            wanted = [*(seq for seq in running.values() if seq.unit_id not in scheduled), *wanted]
        order = [seq for seq in wanted if running.pop(seq.unit_id, None) is not None]
        step.reorder([*order, *running.values()])

    def _swap_in(self, step: Step) -> list[Sequence]:
        brought: list[Sequence] = []
        for seq in step.swapped():
            status = step.can_swap_in(seq)
            if status is AllocStatus.NEVER:
                continue
            num_tokens = step.next_chunk(seq)
            is_full = step.num_running + seq.num_seqs > step.limits.max_num_seqs
            if status is AllocStatus.LATER or is_full or not num_tokens:
                break
            step.bring_in(seq)
            brought.append(seq)
            step.resume(seq, num_tokens)
        return brought

    def _admit(self, step: Step, share: int, num_long: int) -> None:
        limits = step.limits
        if step.token_budget == 0 and step.num_waiting:
            return step.blocked(BlockedBy.TOKEN_BUDGET)
        while (seq := step.head()) is not None:
            is_long = step.is_long(seq)
            if is_long and limits.max_num_partial_prefills > 1 and num_long >= limits.max_long_partial_prefills:
                step.blocked(BlockedBy.PARTIAL_PREFILLS)
                if len(step.deferred) == MAX_PASSED_OVER:
                    return None
                step.defer(seq)
                continue
            hit = step.blocks.lookup(seq)
            num_tokens = self._chunk(step, seq.num_tokens - hit.num_tokens, share)
            status = step.can_admit(seq, hit.num_tokens + num_tokens, hit)
            if status is AllocStatus.NEVER:
                continue
            if status is AllocStatus.LATER:
                if step.make_room():
                    continue
                return None
            if num_tokens == 0:
                return step.blocked(BlockedBy.TOKEN_BUDGET)
            if step.num_running + seq.num_seqs > limits.max_num_seqs:
                if step.make_room():
                    continue
                return step.blocked(BlockedBy.MAX_NUM_SEQS)
            num_long += is_long
            step.admit(seq, hit, num_tokens)
        return None

    # --- the budget ---

    def _share(self, step: Step, num_long: int) -> int:
        """Returns the tokens that one prefill may take from the budget: an equal share if several may be partial."""
        limits = step.limits
        if limits.max_num_partial_prefills == 1:
            return limits.max_num_batched_tokens
        num_short = len(step.prefilling) + step.num_waiting - step.num_long_waiting
        num_prefills = num_short + min(step.num_long_waiting, max(0, limits.max_long_partial_prefills - num_long))
        share = limits.max_num_batched_tokens // max(1, min(num_prefills, limits.max_num_partial_prefills))
        return max(self._least(step), share)

    def _chunk(self, step: Step, missing: int, share: int) -> int:
        """Returns how many of a sequence's missing tokens this step computes."""
        allowed = min(step.token_budget, share)
        if step.blocks.fills_blocks:
            allowed -= allowed % step.blocks.block_size
        return min(missing, allowed)

    def _least(self, step: Step) -> int:
        """Returns the budget that a decode requires: one token, or a block if chunks fill blocks (vLLM 0.8.5)."""
        return step.blocks.block_size if step.blocks.fills_blocks else 1
