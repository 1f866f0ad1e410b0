"""Sequences and their blocks by hand, for tests of the rules in which systems differ."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from testbed.blocks.demand import AllocStatus
from testbed.blocks.manager import BlockManager
from testbed.core.sequence import Sequence
from tests.testbed.core_kit import make_request

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER


def sequence(seq_id: int, tokens: int | Seq[int], salt: str = "") -> Sequence:
    return Sequence(seq_id, make_request(str(seq_id), tokens, 9, salt=salt), 4096)


def compute(blocks: BlockManager, seq: Sequence) -> list[int]:
    """Admits a sequence and computes all it knows; its table."""
    blocks.admit(seq, seq.num_tokens, blocks.lookup(seq))
    if blocks.publishes_early:
        blocks.prefixes.publish(seq, seq.num_tokens)
    blocks.planned()
    seq.num_computed_tokens = seq.num_tokens
    blocks.prefixes.publish(seq, seq.num_tokens)
    return list(seq.block_table)


def num_hit(blocks: BlockManager, tokens: Seq[int], salt: str = "") -> int:
    seq = sequence(999, tokens, salt)
    hit = blocks.lookup(seq)
    blocks.forget(seq)
    return hit.num_tokens
