"""Blocks are handed out once, counted, and misuse is loud."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from testbed.blocks.manager import BlockManager
from testbed.blocks.pool import BlockPool
from testbed.core.sequence import Sequence
from tests.testbed.core_kit import make_blocks, make_request


def allocate(pool: BlockPool, num_blocks: int) -> list[int]:
    return [pool.allocate() for _ in range(num_blocks)]


def test_lowest_ids_come_first_and_returned_ones_are_used_again() -> None:
    pool = BlockPool(4)
    assert allocate(pool, 3) == [0, 1, 2]
    assert pool.drop(1)
    pool.put_back(1)
    assert allocate(pool, 2) == [1, 3]
    assert pool.num_free == 0


def test_free_blocks_are_handed_out_in_an_order_that_is_told() -> None:
    blocks = make_blocks(num_blocks=5)
    first, seq = (Sequence(num, make_request(str(num), num_tokens), 4096) for num, num_tokens in enumerate((3, 9)))
    blocks.admit(first, 3, blocks.lookup(first))
    for wrong in ([3, 1, 2], [3, 1, 1, 2], [3, 1, 0, 2], [4, 3, 1, 2, 0]):
        with pytest.raises(AssertionError, match="not the blocks that are free"):
            blocks.hand_out_in(wrong)
    blocks.hand_out_in([3, 1, 4, 2])
    blocks.admit(seq, 9, blocks.lookup(seq))
    assert (first.block_table, seq.block_table) == ([0], [3, 1, 4])
    blocks.check_invariants([first, seq])


@pytest.mark.parametrize("num_blocks", [0, 2])
def test_over_allocation_raises_and_takes_nothing(num_blocks: int) -> None:
    pool = BlockPool(num_blocks)
    allocate(pool, num_blocks)
    with pytest.raises(AssertionError, match="no block is free"):
        pool.allocate()
    assert pool.num_free == 0
    assert list(pool.ref_counts) == [1] * num_blocks


@pytest.mark.parametrize(("use", "message"), [(BlockPool.drop, "freed twice"), (BlockPool.share, "nobody references")])
def test_use_after_free_raises(use: Callable[[BlockPool, int], object], message: str) -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    assert pool.drop(block)
    with pytest.raises(AssertionError, match=message):
        use(pool, block)


def test_a_referenced_block_can_neither_be_returned_nor_revived() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="a referenced block is put back"):
        pool.put_back(block)
    with pytest.raises(AssertionError, match="revived that is referenced"):
        pool.revive(block)


def test_a_shared_block_is_free_with_its_last_reference() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.share(block)
    assert not pool.drop(block)
    assert pool.drop(block)


def test_a_block_that_somebody_kept_is_referenced_again_and_is_not_free_meanwhile() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    assert pool.drop(block)
    assert (pool.num_free, pool.allocate()) == (1, 1), "kept: nobody else gets it"
    pool.revive(block)
    assert list(pool.ref_counts) == [1, 1]
    assert pool.drop(block)
    pool.put_back(block)
    assert pool.free == [0]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pool: pool.put_back(1), "free twice"),
        (lambda pool: pool.free.append(0), "a free block is referenced"),
        (lambda pool: pool.free.pop(), "a block is lost"),
        (lambda pool: pool.share(0), "reference counts differ"),
        (lambda pool: setattr(pool, "num_repeats", 1), "references are miscounted"),
    ],
)
def test_a_pool_that_does_not_add_up_is_found(spoil: Callable[[BlockPool], object], message: str) -> None:
    pool = BlockPool(3)
    table = [pool.allocate()]
    pool.check_invariants([table], 0)
    spoil(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_invariants([table], 0)


@pytest.mark.parametrize("block_size", [1, 3, 16, 512])
def test_position_p_is_slot_p_mod_b_of_block_p_div_b(block_size: int) -> None:
    blocks = make_blocks(num_blocks=1200 // block_size + 1, block_size=block_size)
    seq = Sequence(0, make_request("a", 1100), 4096)
    blocks.admit(seq, 1100, blocks.lookup(seq))
    table = seq.block_table
    slots = [table[p // block_size] * block_size + p % block_size for p in range(1100)]
    assert len(table) == -(-1100 // block_size)
    assert len(set(slots)) == 1100
    assert all(0 <= slot < blocks.num_gpu_blocks * block_size for slot in slots)


def test_a_table_grows_when_its_last_block_is_full_and_not_before() -> None:
    blocks = make_blocks(num_blocks=3, block_size=4)
    seq = Sequence(0, make_request("a", 3), 4096)
    blocks.admit(seq, 3, blocks.lookup(seq))
    for num_computed, table in ((2, [0]), (3, [0]), (4, [0, 1]), (7, [0, 1])):  # positions 2, 3, 4 and 7 come next
        seq.num_computed_tokens = num_computed
        assert blocks.can_grow(seq, 1)
        blocks.grow(seq, 1)
        assert seq.block_table == table
    blocks.check_invariants([seq])


def test_growth_without_room_changes_nothing() -> None:
    blocks = make_blocks(num_blocks=2, block_size=4)
    seq = Sequence(0, make_request("a", 4), 4096)
    blocks.admit(seq, 4, blocks.lookup(seq))
    assert blocks.can_grow(seq, 8)  # 1 more wanted, 1 free
    assert not blocks.can_grow(seq, 9)  # 2 more
    assert seq.block_table == [0]
    assert blocks.num_free_blocks == 1
    blocks.check_invariants([seq])


def test_a_table_is_given_and_released_once() -> None:
    blocks = make_blocks()
    seq = Sequence(0, make_request("a", 4), 4096)
    blocks.admit(seq, 4, blocks.lookup(seq))
    with pytest.raises(AssertionError, match="has a table already"):
        blocks.admit(seq, 4, blocks.lookup(seq))
    with pytest.raises(AssertionError, match="still has blocks"):
        blocks.forget(seq)
    blocks.free(seq)
    assert (seq.block_table, blocks.num_free_blocks) == ([], blocks.num_gpu_blocks)
    blocks.free(seq)  # it holds nothing
    assert blocks.num_free_blocks == blocks.num_gpu_blocks
    blocks.check_invariants([seq])


def admitted(num_tokens: int = 8) -> tuple[BlockManager, Sequence]:
    blocks = make_blocks(num_blocks=6)
    seq = Sequence(0, make_request("a", num_tokens), 4096)
    blocks.admit(seq, num_tokens, blocks.lookup(seq))
    seq.num_computed_tokens = num_tokens
    blocks.prefixes.publish(seq, num_tokens)
    blocks.check_invariants([seq])
    return blocks, seq


def test_invariants_find_a_block_that_two_have_and_one_reference_counts() -> None:
    blocks, seq = admitted()
    thief = Sequence(1, seq.request, 4096)
    thief.block_table = seq.block_table[:]
    with pytest.raises(AssertionError, match="differ from the tables"):
        blocks.check_invariants([seq, thief])


def test_invariants_find_a_block_that_nobody_has() -> None:
    blocks, seq = admitted()
    seq.block_table.pop()
    with pytest.raises(AssertionError, match="differ from the tables"):
        blocks.check_invariants([seq])


@pytest.mark.parametrize(("num_tokens", "index"), [(8, 0), (7, 1)])  # evictable; free
def test_invariants_find_a_table_with_a_block_that_was_given_up(num_tokens: int, index: int) -> None:
    blocks, seq = admitted(num_tokens)
    block = seq.block_table[index]
    blocks.free(seq)
    blocks.check_invariants([seq])
    seq.block_table = [block]
    with pytest.raises(AssertionError, match="differ from the tables"):
        blocks.check_invariants([seq])


def test_invariants_find_a_sequence_on_both_sides() -> None:
    blocks = make_blocks(num_blocks=6, num_cpu_blocks=4)
    seq = Sequence(0, make_request("a", 4), 4096)
    blocks.admit(seq, 4, blocks.lookup(seq))
    blocks.swapping.swap_out(seq.together)
    twin = Sequence(1, seq.request, 4096)
    blocks.admit(twin, 4, blocks.lookup(twin))
    blocks.check_invariants([seq, twin])
    twin.cpu_table = seq.cpu_table
    with pytest.raises(AssertionError, match="on both sides"):
        blocks.check_invariants([seq, twin])
