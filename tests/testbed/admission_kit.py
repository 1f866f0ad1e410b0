"""Sequences and pools as admission policies and victims see them: real ones, put into the state that is asked."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Any

from testbed.blocks.config import KVRules
from testbed.blocks.manager import BlockManager
from testbed.blocks.prefixes import NO_HIT
from testbed.core.request import Request, SamplingParams
from testbed.core.sequence import Sequence
from testbed.policies.context import PolicyContext, bind
from testbed.policies.oracle import NoOracle
from tests.testbed.core_kit import make_blocks, make_limits

LIMITS = make_limits(model_len=512)


def make_seq(
    seq_id: int,
    num_prompt_tokens: int = 8,
    max_tokens: int | None = 4,
    *,
    num_output_tokens: int = 0,
    num_blocks: int = 0,
    num_seqs: int = 1,
    request_id: str = "",
    prompt: Collection[int] = (),
    **fields: Any,
) -> Sequence:
    """num_blocks: in its table, of its own, but of no pool. num_seqs: that will part from its prompt."""
    request = Request(
        request_id or str(seq_id),
        array("i", prompt or range(1000 * seq_id, 1000 * seq_id + num_prompt_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens, n=num_seqs),
        **fields,
    )
    seq = Sequence(seq_id, request, 1 << 20)
    for _ in range(num_output_tokens):
        seq.emit(0)
    seq.block_table = list(range(1000 * seq_id, 1000 * seq_id + num_blocks))
    return seq


def forked(*seqs: Sequence) -> list[Sequence]:
    """These are the members of one group, which its prompt has made."""
    first = seqs[0]
    assert first.group is not None
    first.group.has_forked = True
    for seq in seqs:
        seq.group, seq.unit_id = first.group, first.unit_id
        seq.join(seqs)
    first.group.members = [*seqs]
    return [*seqs]


def make_pool(num_blocks: int, *, num_free: int | None = None, block_size: int = 4, lookahead: int = 0) -> BlockManager:
    """num_free: so many are left by one whom no test looks at."""
    blocks = make_blocks(
        num_blocks=num_blocks, block_size=block_size, lookahead_slots=lookahead, rules=KVRules(allocate="chunk")
    )
    if num_free is not None:
        leave(blocks, num_free)
    return blocks


def leave(blocks: BlockManager, num_free: int) -> None:
    """Takes all blocks but so many."""
    num_tokens = (blocks.num_free_blocks - num_free) * blocks.block_size
    if num_tokens:
        blocks.admit(make_seq(99, num_tokens), num_tokens, NO_HIT)


def compute(blocks: BlockManager, seq: Sequence) -> Sequence:
    """The sequence runs, and what it knows is computed and cached."""
    blocks.admit(seq, seq.num_tokens, blocks.lookup(seq))
    seq.num_computed_tokens = seq.num_tokens
    blocks.prefixes.publish(seq, seq.num_tokens)
    return seq


class Says:
    """An oracle that gives the same answer to every question about a sequence."""

    def __init__(self, lengths: dict[int, int]) -> None:
        self.lengths = lengths

    def predict(self, seq: Sequence) -> int | None:
        return self.lengths.get(seq.seq_id)


def bound(policy: Any, blocks: BlockManager, oracle: Any = None) -> Any:
    bind(policy, PolicyContext(blocks, LIMITS, oracle or NoOracle(), None, 0))
    return policy
