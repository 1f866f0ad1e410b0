"""The return of swapped-out sequences, as several compositions have it."""

from __future__ import annotations

from testbed.blocks.demand import AllocStatus
from testbed.core.step import Step


def take_all_back(step: Step) -> None:
    """Swaps sequences in, in the order swapped out, while the budget, `max_num_seqs` and the blocks allow it."""
    for seq in step.swapped():
        num_tokens = step.next_chunk(seq)
        if not num_tokens or step.num_running + seq.num_seqs > step.limits.max_num_seqs:
            return
        if step.take_back(seq, num_tokens) is AllocStatus.LATER:
            return
