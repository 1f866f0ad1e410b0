"""Blocks are handed out once, counted, and misuse is loud."""

from __future__ import annotations

import pytest

from testbed.blocks.manager import BlockManager
from testbed.blocks.pool import BlockPool
from testbed.core.sequence import Sequence
from tests.testbed.core_kit import make_blocks, make_request


def test_lowest_ids_come_first_and_returned_ones_are_used_again() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.drop(1)
    pool.put_back([1])
    assert pool.allocate(2) == [1, 3]
    assert pool.num_free == 0


def test_over_allocation_raises_and_takes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    assert pool.ref_counts == [0, 0]


def test_double_free_raises() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    assert pool.drop(block)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.drop(block)


def test_use_after_free_raises() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.drop(block)
    with pytest.raises(AssertionError, match="not referenced"):
        pool.share(block)


def test_a_referenced_block_can_neither_be_returned_nor_revived() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="still referenced"):
        pool.put_back([block])
    with pytest.raises(AssertionError, match="referenced already"):
        pool.revive(block)


def test_a_shared_block_is_free_with_its_last_reference() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.share(block)
    assert not pool.drop(block)
    assert pool.drop(block)


def test_a_lent_block_has_no_references_to_share_or_to_drop() -> None:
    pool = BlockPool(2)
    (block,) = pool.lend(1)
    with pytest.raises(AssertionError, match="not referenced"):
        pool.share(block)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.drop(block)


def test_a_table_gives_back_what_nobody_else_references() -> None:
    pool = BlockPool(4)
    table = pool.lend(4)
    assert pool.give_back(table[:], is_lent=True) == table
    pool.count(table[:2])
    pool.count(table[:2])  # they are counted already
    pool.share(0)
    assert pool.give_back(table, is_lent=True) == [1, 2, 3]
    assert pool.ref_counts == [1, 0, 0, 0]
    with pytest.raises(AssertionError, match="freed twice"):
        pool.give_back([0, 1], is_lent=False)
    assert pool.num_counted == 1


def test_a_block_that_is_free_twice_is_found() -> None:
    pool = BlockPool(2)
    pool.put_back([0])
    with pytest.raises(AssertionError, match="free twice"):
        pool.check_invariants()


def test_nothing_can_be_allocated_from_an_empty_pool() -> None:
    pool = BlockPool(0)
    assert pool.allocate(0) == []
    with pytest.raises(AssertionError):
        pool.allocate(1)


@pytest.mark.parametrize("num_blocks", [10, 1_000_000])
def test_allocation_touches_only_the_blocks_it_takes(num_blocks: int) -> None:
    """O(1) a block: the free list loses its tail, whatever its length."""
    pool = BlockPool(num_blocks)
    free = pool._free
    touched = []

    class Watched(list):  # type: ignore[type-arg]
        def __getitem__(self, key: object) -> object:
            taken = super().__getitem__(key)  # type: ignore[index]
            touched.append(len(taken) if isinstance(taken, list) else 1)
            return taken

    pool._free = Watched(free)
    assert pool.allocate(3) == [0, 1, 2]
    assert touched == [3]


@pytest.mark.parametrize("block_size", [1, 3, 16, 512])
def test_position_p_is_slot_p_mod_b_of_block_p_div_b(block_size: int) -> None:
    blocks = make_blocks(num_blocks=1200 // block_size + 1, block_size=block_size)
    seq = Sequence(0, make_request("a", 1100), 4096)
    blocks.admit(seq, 1100, blocks.lookup(seq))
    table = blocks.table(0)
    slots = [table[p // block_size] * block_size + p % block_size for p in range(1100)]
    assert len(table) == -(-1100 // block_size)
    assert len(set(slots)) == 1100
    assert all(0 <= slot < blocks.num_gpu_blocks * block_size for slot in slots)
    assert seq.num_slots == len(table) * block_size


def test_a_table_grows_when_its_last_block_is_full_and_not_before() -> None:
    blocks = make_blocks(num_blocks=3, block_size=4)
    seq = Sequence(0, make_request("a", 3), 4096)
    blocks.admit(seq, 3, blocks.lookup(seq))
    for num_computed, table in ((2, [0]), (3, [0]), (4, [0, 1]), (7, [0, 1])):  # positions 2, 3, 4 and 7 come next
        seq.num_computed_tokens = num_computed
        assert blocks.can_grow(seq, 1)
        blocks.grow(seq, 1)
        assert (blocks.table(0), seq.num_slots) == (table, 4 * len(table))
    blocks.check_invariants()


def test_growth_without_room_changes_nothing() -> None:
    blocks = make_blocks(num_blocks=2, block_size=4)
    seq = Sequence(0, make_request("a", 4), 4096)
    blocks.admit(seq, 4, blocks.lookup(seq))
    assert blocks.can_grow(seq, 8)  # 1 more wanted, 1 free
    assert not blocks.can_grow(seq, 9)  # 2 more
    assert blocks.table(0) == [0]
    assert blocks.num_free_blocks == 1
    assert seq.num_slots == 4
    blocks.check_invariants()


def test_a_table_is_given_and_released_once() -> None:
    blocks = make_blocks()
    seq = Sequence(0, make_request("a", 4), 4096)
    blocks.admit(seq, 4, blocks.lookup(seq))
    with pytest.raises(AssertionError, match="has a table already"):
        blocks.admit(seq, 4, blocks.lookup(seq))
    with pytest.raises(AssertionError, match="still has a table"):
        blocks.forget(seq)
    blocks.free(seq)
    with pytest.raises(KeyError):
        blocks.free(seq)


def test_invariants_find_a_block_in_two_places() -> None:
    def admitted(tokens: int = 8) -> tuple[BlockManager, Sequence]:
        blocks = make_blocks(num_blocks=6)
        seq = Sequence(0, make_request("a", tokens), 4096)
        blocks.admit(seq, tokens, blocks.lookup(seq))
        blocks.publish(seq, tokens)
        seq.num_computed_tokens = tokens
        blocks.check_invariants()
        return blocks, seq

    blocks, _ = admitted()
    blocks._tables[1] = blocks.table(0)[:]  # lent to two
    with pytest.raises(AssertionError, match="differ from the tables"):
        blocks.check_invariants()
    blocks, seq = admitted()
    other = Sequence(1, seq.request, 4096)
    assert blocks.lookup(other).num_tokens == 4  # now others may find them
    blocks._gpu.pool.ref_counts[0] = 0
    blocks._gpu.pool.num_counted -= 1
    with pytest.raises(AssertionError, match="is not counted"):
        blocks.check_invariants()
    blocks, seq = admitted(7)
    table = blocks.table(0)[:]
    blocks.free(seq)
    blocks.check_invariants()
    blocks._tables[1] = table[:1]  # evictable, and in a table
    blocks._gpu.pool._free.remove(table[1])  # so that the numbers agree
    blocks._gpu.num_free -= 1
    with pytest.raises(AssertionError, match="free or evictable"):
        blocks.check_invariants()
