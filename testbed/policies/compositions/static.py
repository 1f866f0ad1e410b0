"""Request-level batching: a batch runs until its last member ends. A common baseline."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from testbed.blocks.demand import AllocStatus
from testbed.core.plan import BlockedBy
from testbed.core.step import Step
from testbed.policies.compositions.swap_in import take_all_back


@mypyc_attr(allow_interpreted_subclasses=True)
class Static:
    """Admits only while nothing runs: unsplit prompts, up to a limit; then decodes until every member has ended.

    A member that ends early leaves its place empty (Yu et al., Orca, OSDI 2022, section 3, on request-level
    scheduling). Prompts beyond `max_num_batched_tokens` wait for the next batch. A single prompt that exceeds it is a
    batch of its own.
    """

    unused_limits = ("long_prefill_token_threshold", "max_num_partial_prefills", "max_long_partial_prefills")
    splits_prompts = False

    def compose(self, step: Step) -> None:
        if step.num_running or step.num_swapped:
            step.decode()
            if not step.preempted:
                take_all_back(step)
            if step.num_waiting:
                step.blocked(BlockedBy.BATCH)
        else:
            self._admit(step)

    def _admit(self, step: Step) -> None:
        while (seq := step.head()) is not None:
            if step.num_running + seq.num_seqs > step.limits.max_num_seqs:
                return step.blocked(BlockedBy.MAX_NUM_SEQS)
            hit = step.blocks.lookup(seq)
            num_tokens = seq.num_tokens - hit.num_tokens
            if num_tokens > step.token_budget and step.batch.seqs:
                return step.blocked(BlockedBy.TOKEN_BUDGET)
            status = step.can_admit(seq, seq.num_tokens, hit)
            if status is AllocStatus.LATER:
                return None
            if status is AllocStatus.OK:
                step.admit(seq, hit, num_tokens)
        return None
