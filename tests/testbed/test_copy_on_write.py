"""Forks share every block; who writes first into a shared block copies it, who writes last has it."""

from __future__ import annotations

import pytest

from testbed.blocks.config import KVRules
from testbed.blocks.kv_sequence import num_distinct
from testbed.blocks.manager import BlockManager
from testbed.core.request import SamplingParams
from testbed.core.sequence import Sequence
from tests.testbed.core_kit import make_blocks, make_request, make_scheduler
from tests.testbed.stepping import add, step, steps


def forked(blocks: BlockManager, num_tokens: int, num_members: int) -> list[Sequence]:
    """Members of one group whose prompt of `num_tokens` tokens is computed; each has emitted one token."""
    sampling = SamplingParams(n=num_members)
    parent = Sequence(0, make_request("a", num_tokens, None, sampling=sampling), 4096)
    blocks.admit(parent, num_tokens, blocks.lookup(parent))
    parent.num_computed_tokens = num_tokens
    members = [parent]
    for seq_id in range(1, num_members):
        child = parent.fork(seq_id, 7)
        blocks.fork(parent, child)
        members.append(child)
    parent.emit(7)
    for seq in members:
        seq.siblings = tuple(members)
    blocks.check_invariants([*members])
    return members


def tables(seqs: list[Sequence]) -> list[list[int]]:
    return [seq.block_table[:] for seq in seqs]


def grow(blocks: BlockManager, *seqs: Sequence) -> list[tuple[int, int]]:
    """A step that grows each by one token; its copies, (source, destination)."""
    for seq in seqs:
        blocks.grow(seq, 1)
    return list(blocks.planned())


def test_a_fork_shares_every_block_and_takes_none() -> None:
    blocks = make_blocks(num_blocks=8, block_size=4)
    members = forked(blocks, 6, 3)
    assert tables(members) == [[0, 1]] * 3
    assert blocks.num_free_blocks == 6
    assert num_distinct(tables(members)) == 2
    assert not blocks.planned()


def test_all_but_the_last_writer_copy_the_shared_block() -> None:
    blocks = make_blocks(num_blocks=8, block_size=4)
    first, second, third = members = forked(blocks, 6, 3)
    # position 6 is slot 2 of block 1, which three share
    assert grow(blocks, first) == [(1, 2)]
    assert grow(blocks, second) == [(1, 3)]
    assert grow(blocks, third) == [], "nobody else has it any more: written in place"
    assert tables(members) == [[0, 2], [0, 3], [0, 1]]
    assert blocks.num_free_blocks == 4
    for seq in members:
        seq.num_computed_tokens += 1
    assert grow(blocks, *members) == []  # position 7: everyone's own block has a slot left
    for seq in members:
        seq.num_computed_tokens += 1
    assert grow(blocks, *members) == []  # position 8: a new block each
    assert tables(members) == [[0, 2, 4], [0, 3, 5], [0, 1, 6]]
    assert blocks.num_free_blocks == 1
    blocks.check_invariants([*members])


@pytest.mark.parametrize(("num_blocks", "expected"), [(4, True), (3, False)])
def test_a_group_can_grow_if_there_are_blocks_for_its_copies(num_blocks: int, expected: bool) -> None:
    """Of three that share a block two copy it: 2 blocks beside the prompt's 2."""
    blocks = make_blocks(num_blocks=num_blocks, block_size=4)
    members = forked(blocks, 6, 3)
    assert blocks.can_grow(members[0], 1) is expected
    if expected:
        grow(blocks, *members)
        assert blocks.num_free_blocks == 0


def test_a_prompt_that_fills_its_blocks_is_never_copied() -> None:
    blocks = make_blocks(num_blocks=5, block_size=4)
    members = forked(blocks, 8, 3)
    assert blocks.can_grow(members[0], 1)
    assert grow(blocks, *members) == []
    assert tables(members) == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert not make_group_fit(num_blocks=4)


def make_group_fit(num_blocks: int) -> bool:
    """Whether three that share two full blocks can grow by a token."""
    blocks = make_blocks(num_blocks=num_blocks, block_size=4)
    return blocks.can_grow(forked(blocks, 8, 3)[0], 1)


def test_freeing_a_member_leaves_the_others_their_blocks() -> None:
    blocks = make_blocks(num_blocks=8, block_size=4)
    first, second, third = forked(blocks, 6, 3)
    blocks.free(first)
    blocks.check_invariants([second, third])
    assert tables([second, third]) == [[0, 1]] * 2
    assert blocks.num_free_blocks == 6, "still referenced"
    assert grow(blocks, second) == [(1, 2)]
    assert grow(blocks, third) == [], "two are left, so one copies"
    blocks.free(third)
    assert tables([second]) == [[0, 2]]
    assert blocks.num_free_blocks == 6  # block 1 was the third's alone
    blocks.free(second)
    assert blocks.num_free_blocks == 8


def test_a_member_that_copied_and_forks_again_shares_its_copy() -> None:
    blocks = make_blocks(num_blocks=8, block_size=4)
    first, second = forked(blocks, 6, 2)
    assert grow(blocks, first, second) == [(1, 2)]
    for seq in (first, second):
        seq.num_computed_tokens += 1
        seq.emit(8)
    third = first.fork(2, 9)
    blocks.fork(first, third)
    assert tables([first, second, third]) == [[0, 2], [0, 1], [0, 2]]
    # position 7: two share block 2, nobody block 1
    assert grow(blocks, first, second, third) == [(2, 3)]
    assert tables([first, second, third]) == [[0, 3], [0, 1], [0, 2]]
    blocks.check_invariants([first, second, third])


def test_one_block_for_each_sequence_is_the_other_growth_test() -> None:
    rules = KVRules(growth_test="one_per_sequence")
    for num_blocks, expected in ((5, True), (4, False)):  # 2 of the prompt, and 3 free or 2
        blocks = make_blocks(num_blocks=num_blocks, block_size=4, rules=rules)
        assert blocks.can_grow(forked(blocks, 6, 3)[0], 1) is expected


def test_copies_come_out_with_the_plan_of_the_step_that_writes() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    add(scheduler, make_request("a", 6, 4, sampling=SamplingParams(n=3)))
    seen = [
        (plan.num_scheduled, plan.copies, plan.shape.num_blocks_copied, scheduler.free_gpu_blocks)
        for plan, _ in steps(scheduler)
    ]
    three = [("a", 1)] * 3
    assert seen == [
        ([("a", 6)], (), 0, 6),
        (three, ((1, 2), (1, 3)), 2, 4),  # position 6
        (three, (), 0, 4),  # position 7
        (three, (), 0, 1),  # position 8: a block each
    ]
    assert scheduler.blocks.num_free_blocks == 8


def test_a_copy_holds_what_its_source_held_and_is_cached_once_it_is_full() -> None:
    scheduler = make_scheduler(num_blocks=12, block_size=4)
    add(scheduler, make_request("a", range(6), [50, 51, 52, 53], sampling=SamplingParams(n=2)))
    for _ in range(3):
        step(scheduler)  # positions 0 to 7 are computed: 2 full blocks of each, of which the first is shared
    add(scheduler, make_request("b", [*range(6), 50, 51, 9], 1))
    plan, _ = step(scheduler)
    assert [(item.request_id, item.num_cached_tokens) for item in plan.admitted] == [("b", 8)]
