"""Makes the plan that a backend executes from a decided step."""

from __future__ import annotations

from testbed.core.plan import BatchPlan, Pair
from testbed.core.step import Step


def make_plan(step: Step, *, has_groups: bool) -> BatchPlan:
    """Returns the plan of a step. has_groups: whether any running sequence belongs to a group."""
    copies, swap_in = _last_into_each(step.blocks.planned()), _last_into_each(step.swap_in)
    blocks, num_out = step.blocks, len(step.leaving.swap_out)
    shape = step.batch.shape(blocks.sliding_window, blocks.num_repeated_tokens, num_out, len(swap_in), len(copies))
    has_beams = has_groups and any(seq.group is not None and seq.group.is_beam for seq in step.batch.seqs)
    return BatchPlan(
        step.number, shape, step.batch, step.admitted, step.leaving.preempted, step.leaving.swap_out, swap_in,
        step.swapped_in, copies, step.ignored, step.blocked_by, has_beams, step.leaving.preempted_for,
    )  # fmt: skip


def _last_into_each(pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """Keeps the last move into each block: an earlier owner released it, having found its content in another block."""
    if not pairs:
        return pairs
    sources = {destination: source for source, destination in pairs}
    return tuple([(source, destination) for source, destination in pairs if sources[destination] == source])
