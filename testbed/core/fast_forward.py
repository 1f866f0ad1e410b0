"""Fast forward: how many steps can be taken as one plan, because all of them would be decided as the first.

That is a run of decodes, in which every running sequence computes one token a step, or the chunks of one long prompt
beside them, from its admission on. Nothing changes such a decision but an arrival or an abort (the driver cuts the plan
there), an end (the plan stops at the first), a shortage of blocks (it stops before), or a change of mind about what
waits, which is what `_num_settled` is about. A policy whose mind may change by anything else is stepped: it is fast
forwarded only if it declares `is_time_dependent = False`.
"""

from __future__ import annotations

from testbed.core.plan import BlockedBy
from testbed.core.running import Core
from testbed.core.step import Step
from testbed.policies.admission import Watermark

FAST_FORWARD = 1 << 20  # steps that a plan may span at most: in effect, as many as are alike


def num_steps_ahead(step: Step, core: Core, max_steps: int) -> int:
    """How many steps, from the decided one on, would be decided alike; at least 1."""
    decodes, rows = core.decodes, step.rows
    if rows and (len(rows) > 1 or step.token_budget):
        return 1
    is_all = step.decoded is decodes.members and len(step.decoded) + len(rows) == len(core.running) > 0
    if not (is_all and step.is_eventless and not decodes.num_drawn and core.is_composition_steady):
        return 1
    num_steps = min(max_steps, decodes.num_steps_to_end()) if step.decoded else max_steps
    if rows:  # one that takes what is left of the budget; this step may have admitted it
        return _num_chunks(step, core, num_steps)
    if len(core.queue) or core.swapped:
        num_steps = min(num_steps, _num_settled(step, core, num_steps))
    if num_steps <= 1:
        return 1
    spare = 1 if core.blocks.rules.growth_test == "one_per_sequence" else 0
    return decodes.num_steps_with_room(core.blocks.num_free_blocks, spare, num_steps)


def _num_chunks(step: Step, core: Core, max_steps: int) -> int:
    """For how many steps one prompt goes on in equal chunks that leave no budget to anyone else; not its last chunk."""
    blocks = core.blocks
    seq, start, num_tokens = step.rows[0]
    is_chunk = (
        seq.is_prefilling
        and seq.group is None
        and step.limits.max_num_partial_prefills == 1
        and blocks.rules.growth_test == "exact"
        and (core.is_steady or not len(core.queue))
        # a step that admits looks further down the queue than those after it
        and not (step.admitted and step.blocked_by not in (None, BlockedBy.TOKEN_BUDGET))
    )
    if not is_chunk:
        return 1
    num_steps = min(max_steps, (seq.num_tokens - start - 1) // num_tokens)
    if num_tokens == 1 and start < seq.num_prompt_tokens:  # beyond the prompt such a chunk is priced as a decode
        num_steps = min(num_steps, seq.num_prompt_tokens - start)
    num_slots, left = seq.num_slots, blocks.num_free_blocks
    for index in range(1, num_steps):
        num_new = max(0, blocks.num_blocks_for(start + (index + 1) * num_tokens - num_slots))
        num_slots += num_new * blocks.block_size
        left -= num_new + core.decodes.num_crossing(index)
        if left < 0:
            return index
    return max(1, num_steps)


def _num_settled(step: Step, core: Core, max_steps: int) -> int:
    """For how many steps the answer to those that wait, or are swapped out, stays what it is."""
    if not len(core.queue):
        return max_steps  # swapped out, and the free blocks become fewer
    if not core.is_steady:
        return 1
    if not step.asked:
        return max_steps  # a limit keeps them out that decodes do not move
    if type(core.admission) is not Watermark:
        return 1
    if step.refused is not None and step.blocked_by is BlockedBy.KV_BLOCKS and _is_hit_settled(step, core):
        return max_steps  # the free blocks become fewer, and it needs as many as now
    return core.decodes.num_quiet_steps(max_steps)


def _is_hit_settled(step: Step, core: Core) -> bool:
    """Whether decodes neither lengthen nor shorten the cached prefix of the sequence that was refused.

    It is shortened by eviction of blocks that nothing references; lengthened by a block that follows on it, which only
    a sequence that is still within as many blocks can fill.
    """
    hit, blocks = step.refused, core.blocks
    assert hit is not None
    if not blocks.caches_prefixes:
        return True
    if hit.num_unreferenced or blocks.rules.hits_frozen:
        return False
    num_blocks = len(hit.blocks) + 1
    return all(len(blocks.table(seq.seq_id)) > num_blocks for seq in step.decoded)
