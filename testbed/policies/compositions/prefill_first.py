"""Prefill first, as in vLLM's first engine: a step computes either prompts or decodes."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from testbed.blocks.demand import AllocStatus
from testbed.core.plan import BlockedBy
from testbed.core.sequence import Sequence
from testbed.core.step import Step


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefillFirst:
    """Admits waiting prompts, unsplit, in one prompt-only batch; decodes only if none can be admitted.

    No sequence is admitted while others are swapped out, and none is swapped in by a step that preempted.

    Source: Kwon et al., SOSP 2023; vLLM 0.2.7 and 0.8.5. `KVRules.budget` defines what a prompt takes from the budget.

    ignores_oversize_resumed: whether a preempted sequence that has outgrown the budget ends as ignored (0.2.7), or is
    admitted into a batch of its own. ignored_end_the_step: whether a step that ends prompts as ignored, and admits
    none, does not decode (0.2.7). sorts_by_arrival: whether running and swapped sequences are sorted by arrival before
    they decode (0.2.7). decodes_between: whether running sequences decode after each step of prompts (LightLLM; VTC, by
    Sheng et al., OSDI 2024), or steps of prompts may follow each other.
    """

    unused_limits = (
        "long_prefill_token_threshold", "max_num_partial_prefills", "max_long_partial_prefills"
    )  # prompts are not split # fmt: skip

    own_rules = ("budget",)  # the KV rules that this composition reads itself
    splits_prompts = False

    def __init__(
        self,
        *,
        ignores_oversize_resumed: bool = False,
        ignored_end_the_step: bool = False,
        sorts_by_arrival: bool = False,
        decodes_between: bool = False,
    ) -> None:
        self._ignores_oversize_resumed = ignores_oversize_resumed
        self._ignored_end_the_step = ignored_end_the_step
        self._sorts_by_arrival = sorts_by_arrival
        self._decodes_between = decodes_between
        self._owes_decodes = False  # whether the last step computed prompts, and decodes come before others

    def compose(self, step: Step) -> None:
        owes = self._owes_decodes and step.num_running > 0
        if owes:
            if step.num_waiting:
                step.blocked(BlockedBy.BATCH)
        elif not step.num_swapped:
            self._admit(step)
        elif step.num_waiting:
            step.blocked(BlockedBy.SWAPPED_FIRST)
        cannot_yet = owes and not step.running()  # all wait for the outcome of the step in flight
        self._owes_decodes = cannot_yet or (self._decodes_between and len(step.batch.seqs) > 0)
        if step.batch.seqs or (self._ignored_end_the_step and step.ignored):
            return
        if self._sorts_by_arrival:
            step.reorder(sorted(step.running(), key=_arrival))
        step.token_budget = max(step.token_budget, step.num_running)  # the budget limits prompts only
        step.decode()
        if not step.preempted:
            self._swap_in(step)
        elif step.blocked_by is None and step.num_waiting:
            step.blocked(BlockedBy.PREEMPTION)

    def _admit(self, step: Step) -> None:
        longest = 0  # the longest prompt of this batch, for the padded budget
        while (seq := step.head()) is not None:
            hit = step.blocks.lookup(seq)
            num_tokens = seq.num_tokens - (hit.num_tokens if step.blocks.rules.budget == "uncached" else 0)
            is_oversize = num_tokens > step.limits.max_num_batched_tokens
            if is_oversize and (not seq.num_preemptions or self._ignores_oversize_resumed):
                step.ignore(
                    seq,
                    f"{num_tokens} tokens to prefill exceed max_num_batched_tokens "
                    f"({step.limits.max_num_batched_tokens}), and prefill_first does not split a prompt",
                )
                continue
            status = step.can_admit(seq, seq.num_tokens, hit)
            if status is AllocStatus.NEVER:
                continue
            if status is AllocStatus.LATER:
                if step.make_room():
                    continue
                return None
            if step.num_running + seq.num_seqs > step.limits.max_num_seqs:
                if step.make_room():
                    continue
                return step.blocked(BlockedBy.MAX_NUM_SEQS)
            if not self._fits(step, num_tokens, longest) and step.batch.seqs:
                return step.blocked(BlockedBy.TOKEN_BUDGET)
            longest = max(longest, num_tokens)
            step.admit(seq, hit, seq.num_tokens - hit.num_tokens)
        return None

    def _fits(self, step: Step, num_tokens: int, longest: int) -> bool:
        if step.blocks.rules.budget == "padded":  # every prompt of the batch counts as the longest
            padded = (len(step.batch.seqs) + 1) * max(longest, num_tokens)
            return padded <= step.limits.max_num_batched_tokens
        if step.blocks.rules.budget == "sum":
            num_before = sum(start + count for _, start, count in step.rows)
            return num_before + num_tokens <= step.limits.max_num_batched_tokens
        return num_tokens <= step.token_budget

    def _swap_in(self, step: Step) -> None:
        swapped = step.swapped()
        for seq in sorted(swapped, key=_arrival) if self._sorts_by_arrival else swapped:
            status = step.can_swap_in(seq)
            if status is AllocStatus.NEVER:
                continue
            if status is AllocStatus.LATER or step.num_running + seq.num_seqs > step.limits.max_num_seqs:
                return
            step.bring_in(seq)
            step.resume(seq, seq.num_tokens - seq.num_computed_tokens)


def _arrival(seq: Sequence) -> tuple[int, int]:
    return seq.request.arrival_ns, seq.unit_id
