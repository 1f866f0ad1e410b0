"""Swap: blocks move to the CPU and back, shared ones once; the sequence keeps what it has computed."""

from __future__ import annotations

import pytest

from testbed.blocks.config import KVRules
from testbed.blocks.demand import AllocStatus
from testbed.blocks.manager import BlockManager
from testbed.core.outcome import FinishReason
from testbed.core.plan import BatchPlan, BatchShape, BlockedBy, PreemptionMode, PrefillChunk, Rows
from testbed.core.request import SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.core.sequence import Sequence
from testbed.core.state import SequenceState
from testbed.policies.preemption import Swap
from tests.testbed.core_kit import ALL_COMPOSITIONS, make_blocks, make_limits, make_request, make_scheduler
from tests.testbed.kv_kit import LATER, NEVER, OK, compute, sequence
from tests.testbed.stepping import add, cached, drain, preempted, rows, scheduled, step, steps

# --- block manager ---


def holding(blocks: BlockManager, seq_id: int, num_tokens: int) -> Sequence:
    """A sequence whose `num_tokens` tokens are computed."""
    seq = sequence(seq_id, num_tokens)
    blocks.admit(seq, num_tokens, blocks.lookup(seq))
    seq.num_computed_tokens = num_tokens
    return seq


def test_blocks_move_out_and_in_as_pairs() -> None:
    blocks = make_blocks(num_blocks=6, num_cpu_blocks=4, block_size=4, caching=False)
    other, seq = holding(blocks, 0, 4), holding(blocks, 1, 10)
    assert seq.block_table == [1, 2, 3]
    assert blocks.swapping.swap_out(seq.together) == ((1, 0), (2, 1), (3, 2))
    blocks.check_invariants([other, seq])
    assert (seq.cpu_table, blocks.num_free_blocks, blocks.num_free_cpu_blocks) == ([0, 1, 2], 5, 1)
    assert (seq.block_table, seq.num_computed_tokens) == ([], 10)
    third = holding(blocks, 2, 4)  # takes a block that was the sequence's
    pairs = blocks.swapping.swap_in(seq.together)
    blocks.check_invariants([other, seq, third])
    assert [source for source, _ in pairs] == [0, 1, 2]
    assert [target for _, target in pairs] == seq.block_table
    assert not set(seq.block_table) & {*other.block_table, *third.block_table}
    assert (blocks.num_free_blocks, seq.cpu_table) == (1, [])
    assert blocks.num_free_cpu_blocks == 1, "what the step empties is not filled by it"
    for one in (other, seq, third):
        blocks.free(one)
    blocks.planned()
    assert (blocks.num_free_blocks, blocks.num_free_cpu_blocks) == (6, 4)


def test_a_swapped_sequence_that_is_freed_gives_its_cpu_blocks_back() -> None:
    blocks = make_blocks(num_cpu_blocks=4, block_size=4)
    seq = holding(blocks, 0, 10)
    blocks.swapping.swap_out(seq.together)
    blocks.free(seq)
    assert blocks.num_free_cpu_blocks == 1, "a device may still read them"
    blocks.reuse_cpu_blocks()
    blocks.check_invariants([])
    assert blocks.num_free_cpu_blocks == 4


@pytest.mark.parametrize(
    ("num_cpu_blocks", "taken", "expected"), [(3, 0, True), (5, 3, False), (6, 3, True), (2, 0, False)]
)
def test_a_swap_out_needs_as_many_cpu_blocks_as_are_held(num_cpu_blocks: int, taken: int, expected: bool) -> None:
    blocks = make_blocks(num_cpu_blocks=num_cpu_blocks, block_size=4)
    if taken:
        blocks.swapping.swap_out(holding(blocks, 0, 4 * taken).together)
    assert blocks.swapping.can_swap_out(holding(blocks, 1, 10).together) is expected  # 3 blocks


@pytest.mark.parametrize(
    ("used", "watermark", "expected"),
    [
        (6, 0.0, OK),  # of 10 blocks 4 are free: its 3 and one to grow
        (7, 0.0, LATER),
        (5, 0.1, OK),
        (6, 0.1, LATER),
        (0, 0.6, OK),  # 10 - 4 = 6
        (0, 0.7, NEVER),  # not even on an empty pool
    ],
)
def test_a_swap_in_leaves_the_watermark_and_a_block_to_grow(used: int, watermark: float, expected: AllocStatus) -> None:
    blocks = make_blocks(num_blocks=10, num_cpu_blocks=4, block_size=4, watermark=watermark, caching=False)
    seq = holding(blocks, 0, 10)
    blocks.swapping.swap_out(seq.together)
    if used:
        holding(blocks, 1, 4 * used)
    assert blocks.swapping.can_swap_in(seq.together) is expected


def test_some_systems_swap_in_below_the_watermark() -> None:
    rules = KVRules(watermark_for_swapped_in=False)
    blocks = make_blocks(num_blocks=10, num_cpu_blocks=4, block_size=4, watermark=0.7, caching=False, rules=rules)
    seq = holding(blocks, 0, 10)
    blocks.swapping.swap_out(seq.together)
    holding(blocks, 1, 24)
    assert blocks.swapping.can_swap_in(seq.together) is OK  # 4 of 10 are free


def test_what_fills_the_whole_pool_never_comes_back() -> None:
    blocks = make_blocks(num_blocks=3, num_cpu_blocks=4, block_size=4)
    seq = holding(blocks, 0, 10)
    blocks.swapping.swap_out(seq.together)
    assert blocks.swapping.can_swap_in(seq.together) is NEVER, "3 blocks and one to grow"


# --- scheduler ---


def pressed(composition: str = "prefill_first", num_cpu_blocks: int = 4, **options: object) -> Scheduler:
    """4 blocks of 2 tokens, of which `a` and `b` take 2 each; position 4 of `a` wants one of b's."""
    scheduler = make_scheduler(
        composition, num_blocks=4, block_size=2, num_cpu_blocks=num_cpu_blocks, preemption=Swap(), **options
    )  # type: ignore[arg-type]
    add(scheduler, make_request("a", 4, 5), make_request("b", 4, [31, 32, 33, 34]))
    return scheduler


def test_a_victim_waits_on_the_cpu_and_goes_on_where_it_was() -> None:
    scheduler = pressed(caching=False)
    assert rows(step(scheduler)[0]) == [("a", 4), ("b", 4)]
    add(scheduler, make_request("c", 1, 1))
    plan, _ = step(scheduler)  # c waits for blocks; then a's position 4 takes b's
    assert [(item.request_id, item.mode, item.num_computed_tokens) for item in plan.preempted] == [
        ("b", PreemptionMode.SWAP, 4)
    ]
    assert (plan.swap_out, plan.shape.num_blocks_swapped_out, rows(plan)) == (((2, 0), (3, 1)), 2, [("a", 1)])
    assert (scheduler.free_gpu_blocks, scheduler.free_cpu_blocks) == (1, 2)
    b = scheduler.unfinished()[1]
    assert (b.state, b.num_computed_tokens, b.num_tokens) == (SequenceState.SWAPPED, 4, 5)
    for free in (1, 0, 0):  # b needs 2 blocks and one to grow; c would fit, but nothing overtakes what is swapped
        plan, _ = step(scheduler)
        assert (rows(plan), plan.blocked_by, plan.swap_in) == ([("a", 1)], BlockedBy.SWAPPED_FIRST, ())
        assert (scheduler.free_gpu_blocks, scheduler.free_cpu_blocks) == (free, 2)
    plan, _ = step(scheduler)  # a has ended
    assert (rows(plan), plan.swapped_in, plan.blocked_by) == ([("b", 1)], ("b",), BlockedBy.SWAPPED_FIRST)
    assert [source for source, _ in plan.swap_in] == [0, 1]
    assert plan.shape.decode_context_tokens == 5, "nothing is computed again"
    assert (scheduler.free_gpu_blocks, plan.shape.num_blocks_swapped_in) == (1, 2)
    assert scheduler.blocks.num_free_cpu_blocks == 4
    assert rows(step(scheduler)[0]) == [("c", 1)]
    finished = drain(scheduler)
    assert [list(item.output_token_ids) for item in finished] == [[31, 32, 33, 34]]
    assert (scheduler.blocks.num_free_blocks, scheduler.blocks.num_free_cpu_blocks) == (4, 4)


@pytest.mark.parametrize("num_cpu_blocks", [0, 1])
def test_a_full_cpu_pool_means_recompute(num_cpu_blocks: int) -> None:
    scheduler = pressed(num_cpu_blocks=num_cpu_blocks, caching=False)
    step(scheduler)
    plan, _ = step(scheduler)
    assert [(item.request_id, item.mode) for item in plan.preempted] == [("b", PreemptionMode.RECOMPUTE)]
    assert plan.swap_out == ()
    assert (scheduler.num_swapped, scheduler.num_waiting) == (0, 1)
    assert [item.reason for item in drain(scheduler)] == [FinishReason.LENGTH] * 2


def test_swapped_sequences_come_back_in_the_order_they_left() -> None:
    """6 blocks of 2, 2 each for a, b and c, all without caching.

    step 2: position 4 of a takes c's (2 free, then 1, and b's position 4 the last); step 4: position 6 of a takes b's 3
    (3 free, then 2); c needs 2 and 1 to grow. Step 6: a has ended; c takes 3 of 6, and b needs 3 and 1 to grow.
    """
    scheduler = make_scheduler(
        "prefill_first", num_blocks=6, block_size=2, num_cpu_blocks=9, preemption=Swap(), caching=False
    )
    add(scheduler, make_request("a", 4, 5), make_request("b", 4, 6), make_request("c", 4, 3))
    gone, back = [], []
    for plan, _ in steps(scheduler):
        gone.append(preempted(plan))
        back.append(plan.swapped_in)
    assert gone[:4] == [[], ["c"], [], ["b"]]
    assert back[5:8] == [("c",), (), ("b",)]
    assert scheduler.blocks.num_free_cpu_blocks == 9


def test_what_can_never_come_back_ends_at_once_and_says_why() -> None:
    scheduler = make_scheduler("prefill_first", num_blocks=2, block_size=2, num_cpu_blocks=4, preemption=Swap())
    add(scheduler, make_request("a", 3, 9))
    finished = drain(scheduler)
    (done,) = finished
    assert done.reason is FinishReason.IGNORED
    assert "2 swapped-out KV blocks" in done.message
    assert "exceed the pool of 2" in done.message
    assert done.num_output_tokens == 2  # at 3, and after position 3
    assert scheduler.blocks.num_free_cpu_blocks == 4


def test_what_comes_back_is_cached_again() -> None:
    """a takes both blocks that were b's, whose content is so forgotten on the GPU; swapped in, b has it once more."""
    scheduler = pressed()
    for _ in range(6):
        plan, _ = step(scheduler)
    assert plan.swapped_in == ("b",)
    b = next(seq for seq in scheduler.unfinished() if seq.request.request_id == "b")
    add(scheduler, make_request("d", [*b.tokens[:4], 77], 1))
    plan, _ = step(scheduler)
    assert (cached(plan), scheduled(plan)) == ({"d": 4}, {"d": 1})
    drain(scheduler)


def test_what_was_swapped_out_may_be_hit_while_its_blocks_are_not_taken() -> None:
    blocks = make_blocks(num_cpu_blocks=4, block_size=4)
    seq = Sequence(0, make_request("a", range(8)), 4096)
    blocks.admit(seq, 8, blocks.lookup(seq))
    seq.num_computed_tokens = 8
    blocks.prefixes.publish(seq, 8)
    blocks.swapping.swap_out(seq.together)
    again = Sequence(1, make_request("b", range(9)), 4096)
    assert blocks.lookup(again).num_tokens == 8
    blocks.check_invariants([seq])


def test_a_prefill_that_was_swapped_out_goes_on() -> None:
    """5 blocks of 2. Step 2: a has 3 and b, with 3 of its 6 tokens, 2; its last 3 want one more."""
    rules, limits = KVRules(allocate="chunk"), make_limits(budget=4)
    scheduler = make_scheduler(
        "unified", num_blocks=5, block_size=2, num_cpu_blocks=4, preemption=Swap(), caching=False, rules=rules,
        limits=limits,
    )  # fmt: skip
    add(scheduler, make_request("a", 4, 3), make_request("b", 6, 2))
    assert [rows(step(scheduler)[0]) for _ in range(2)] == [[("a", 4)], [("a", 1), ("b", 3)]]
    plan, _ = step(scheduler)
    assert [(item.request_id, item.mode, item.num_computed_tokens) for item in plan.preempted] == [
        ("b", PreemptionMode.SWAP, 3)
    ]
    plan, _ = step(scheduler)
    assert (plan.swapped_in, rows(plan), plan.shape.prefills) == (("b",), [("b", 3)], (PrefillChunk(3, 3),))
    assert rows(step(scheduler)[0]) == [("b", 1)]
    assert not scheduler.has_work


@pytest.mark.parametrize("composition", ALL_COMPOSITIONS)
def test_every_composition_brings_back_what_it_swapped_out(composition: str) -> None:
    scheduler = make_scheduler(
        composition, num_blocks=6, block_size=2, num_cpu_blocks=12, preemption=Swap(), caching=False
    )
    add(scheduler, *(make_request(name, 4, 5) for name in "abc"))
    gone: list[str] = []
    back: list[str] = []
    computed = 0
    for plan, _ in steps(scheduler):
        assert not plan.is_empty
        assert not (plan.swap_out and plan.swap_in), "one direction a step"
        gone += preempted(plan)
        back += plan.swapped_in
        computed += sum(num_tokens for _, num_tokens in rows(plan))
    assert gone
    assert sorted(gone) == sorted(back)
    assert computed == 3 * 8, "nothing is computed twice"
    assert (scheduler.blocks.num_free_blocks, scheduler.blocks.num_free_cpu_blocks) == (6, 12)


def half_prefilled(blocks: BlockManager) -> Sequence:
    """2 blocks for 7 tokens, of which 3 are computed: no block is full."""
    seq = Sequence(0, make_request("a", 7, 9), 4096)
    blocks.admit(seq, 7, blocks.lookup(seq))
    seq.is_prefilling = True
    seq.num_computed_tokens = 3
    return seq


# vLLM 0.8.5 counts full blocks, and crashes where more are moved
FULL = KVRules(swap_test="full_blocks")


def test_a_swap_out_of_an_unfinished_prefill_needs_room_for_all_that_it_holds() -> None:
    blocks = make_blocks(num_cpu_blocks=1, block_size=4, caching=False, rules=FULL)
    assert blocks.swapping.can_swap_out(half_prefilled(blocks).together) is False


def test_a_swap_in_of_an_unfinished_prefill_needs_room_for_all_that_it_held() -> None:
    blocks = make_blocks(num_blocks=4, num_cpu_blocks=4, block_size=4, caching=False, rules=FULL)
    seq = half_prefilled(blocks)
    blocks.swapping.swap_out(seq.together)
    holding(blocks, 1, 12)  # 1 of 4 is left
    assert blocks.swapping.can_swap_in(seq.together) is LATER


def test_full_blocks_are_counted_with_one_to_grow_for_each_sequence() -> None:
    """vLLM 0.8.5: 2 full blocks of 10 tokens, and one more for each sequence: 3, where all blocks and one are 4."""
    for rules, expected in ((FULL, OK), (KVRules(), LATER)):
        blocks = make_blocks(num_blocks=5, num_cpu_blocks=4, block_size=4, caching=False, rules=rules)
        seq = holding(blocks, 0, 10)
        blocks.swapping.swap_out(seq.together)
        holding(blocks, 1, 8)  # 3 of 5 are left
        assert blocks.swapping.can_swap_in(seq.together) is expected


@pytest.mark.parametrize(("num_blocks", "expected"), [(6, LATER), (7, OK)])
def test_a_block_that_a_copy_of_this_step_is_still_to_be_made_from_is_not_there_for_a_swap_in(
    num_blocks: int, expected: AllocStatus
) -> None:
    """A device swaps in before it copies. Of the group's two, one copies block 1 and the other is gone: it is free, and
    what it holds is read after the swap. The swapped-out sequence wants 2 blocks and one to grow."""
    blocks = make_blocks(num_blocks=num_blocks, num_cpu_blocks=4, block_size=4, caching=False)
    out = holding(blocks, 9, 8)
    blocks.swapping.swap_out(out.together)
    blocks.planned()
    holding(blocks, 2, 4)
    parent = Sequence(0, make_request("g", 6, None, sampling=SamplingParams(n=2)), 4096)
    blocks.admit(parent, 6, blocks.lookup(parent))
    parent.num_computed_tokens = 6
    child = parent.fork(1, 7)
    blocks.fork(parent, child)
    parent.emit(7)
    blocks.grow(parent, 1)
    given_up = child.block_table[1]
    blocks.free(child)
    assert blocks.num_free_blocks == num_blocks - 3  # 3 or 4, of which one is not to be written
    assert blocks.swapping.can_swap_in(out.together) is expected
    if expected is OK:
        assert given_up not in [target for _, target in blocks.swapping.swap_in(out.together)]


def test_a_block_that_a_copy_of_this_step_still_goes_into_is_not_swapped_into() -> None:
    """Equal full blocks become one: of three that write the same token behind a shared prefix, two copy the block that
    they share; what the second has copied, and then filled, gives way to the first one's. A device swaps in first."""
    rules = KVRules(duplicates="merged", hits_visible="plan", swap_test="full_blocks")
    blocks = make_blocks(num_blocks=8, num_cpu_blocks=4, block_size=4, rules=rules)
    out = holding(blocks, 9, 6)
    blocks.swapping.swap_out(out.together)
    blocks.planned()
    parent = Sequence(0, make_request("g", 7, None, sampling=SamplingParams(n=3)), 4096)
    blocks.admit(parent, 7, blocks.lookup(parent))
    blocks.prefixes.publish(parent, 7)
    blocks.planned()
    parent.num_computed_tokens = 7
    members = [parent, parent.fork(1, 5), parent.fork(2, 5)]
    for child in members[1:]:
        blocks.fork(parent, child)
    parent.emit(5)
    for member in members:
        blocks.grow(member, 1)
        blocks.prefixes.publish(member, 8)
    assert members[0].block_table == members[1].block_table == members[2].block_table, "one block for all"
    assert blocks.swapping.can_swap_in(out.together) is OK
    swapped_in = {target for _, target in blocks.swapping.swap_in(out.together)}
    assert not swapped_in & {target for _, target in blocks.planned()}


def test_equal_blocks_of_two_victims_are_one_on_the_cpu() -> None:
    rules = KVRules(duplicates="merged", hits_visible="plan", swap_test="full_blocks")
    blocks = make_blocks(num_blocks=8, num_cpu_blocks=8, block_size=4, rules=rules)
    seqs = [sequence(0, [1] * 8 + [2]), sequence(1, [1] * 8 + [3])]
    tables = [compute(blocks, seq) for seq in seqs]
    moved = [dict(blocks.swapping.swap_out(seq.together)) for seq in seqs]
    blocks.check_invariants(seqs)
    assert [[to[block] for block in table] for to, table in zip(moved, tables, strict=True)] == [
        seq.cpu_table for seq in seqs
    ]
    (*shared, last), (*again, other) = (seq.cpu_table for seq in seqs)
    assert (shared, last != other, blocks.num_free_cpu_blocks) == (again, True, 8 - 4)


def test_a_plan_that_only_brings_somebody_back_is_not_empty() -> None:
    """Behind a sliding window there may be no block to move: a loop that took it for nothing would end the run."""
    assert not BatchPlan(0, BatchShape(0, 0, (), 0), Rows(), swapped_in=("a",)).is_empty
    assert BatchPlan(0, BatchShape(0, 0, (), 0), Rows()).is_empty
