"""Sequences that a step takes out of the running ones, or out of the swapped-out ones, before they are done.

That is rare, and the other half of a step's mechanism: what a composition decides with is `Step`. A victim is
preempted, by recompute or by swap, or ends as ignored because it can never go on. What is done to a sequence is done to
those with it (`Sequence.together`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from testbed.blocks.manager import BlockManager, Verdict
from testbed.core.plan import Preemption, PreemptionMode
from testbed.core.running import Core
from testbed.core.sequence import Sequence, SequenceState

if TYPE_CHECKING:
    from testbed.core.step import Step


def preempt(step: Step, core: Core, seq: Sequence) -> None:
    """Takes a running sequence's blocks away, by recompute or by swap as the policy wishes and memory allows."""
    blocks = core.blocks
    was_scheduled = step.withdraw(seq)
    core.stop(seq)
    wish = PreemptionMode(core.preemption.mode(seq, blocks.num_held_blocks(seq)))
    can_recompute = seq.siblings is None or not (seq.group is not None and seq.group.is_beam)
    wants_swap = wish is PreemptionMode.SWAP and seq.num_computed_tokens > 0
    # what was merged in this step is computed after the swap out, by others
    can_swap = not (was_scheduled and blocks.merges_content)
    if (wants_swap or not can_recompute) and can_swap and blocks.can_swap_out(seq) is Verdict.OK:
        _swap_out(step, core, seq)
    elif can_recompute:
        _recompute(step, core, seq)
    else:
        _end(step, blocks, seq, _lost_beams_reason(seq, blocks))


def give_up(step: Step, core: Core, seq: Sequence) -> None:
    """Ends a running sequence that finds no room although nothing else runs."""
    blocks = core.blocks
    reason = (
        f"{seq.num_tokens} tokens find no room to go on although nothing else runs: {blocks.num_free_blocks} "
        f"of {blocks.num_gpu_blocks} KV blocks are free (growth_test={blocks.rules.growth_test})"
    )
    step.withdraw(seq)
    core.stop(seq)
    _end(step, blocks, seq, reason)


def give_up_swapped(step: Step, core: Core, seq: Sequence) -> None:
    """Ends a swapped-out sequence whose blocks never fit again."""
    blocks = core.blocks
    num_blocks = len(dict.fromkeys(block for one in seq.together for block in blocks.cpu_table(one.seq_id)))
    reason = (
        f"{num_blocks} swapped-out KV blocks, room to grow and a watermark of {blocks.watermark_blocks} "
        f"exceed the pool of {blocks.num_gpu_blocks}"
    )
    del core.swapped[seq.unit_id]
    _end(step, blocks, seq, reason)


def _recompute(step: Step, core: Core, seq: Sequence) -> None:
    """Several members are recomputed as so many sequences, each from its own first token."""
    for one in reversed(seq.together):
        _note(step, one, PreemptionMode.RECOMPUTE)
        core.blocks.free(one)
        one.num_computed_tokens = 0
        one.enter(SequenceState.WAITING)
        one.siblings, one.unit_id = None, one.seq_id
        if core.blocks.rules.victims_return == "this_step":
            core.push_back(one)
        else:
            step.held.append(one)


def _swap_out(step: Step, core: Core, seq: Sequence) -> None:
    for one in seq.together:
        _note(step, one, PreemptionMode.SWAP)
        one.enter(SequenceState.SWAPPED)
    step.swap_out += core.blocks.swap_out(seq)
    core.swapped[seq.unit_id] = seq


def _note(step: Step, seq: Sequence, mode: PreemptionMode) -> None:
    step.preempted.append(Preemption(seq.seq_id, seq.request.request_id, mode, seq.num_computed_tokens))
    seq.num_preemptions += 1


def _end(step: Step, blocks: BlockManager, seq: Sequence, reason: str) -> None:
    for one in seq.together:
        blocks.free(one, is_planning=True)
    step.end(seq, reason)


def _lost_beams_reason(seq: Sequence, blocks: BlockManager) -> str:
    return (
        f"{len(seq.together)} beams were preempted, which cannot be recomputed, and the CPU pool of "
        f"{blocks.num_cpu_blocks} blocks had no room to swap them out "
        f"({blocks.num_free_cpu_blocks} free); raise cache.num_cpu_blocks"
    )
