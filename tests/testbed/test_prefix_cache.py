"""Full blocks are found again by what they hold, and by nothing else."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import product
from typing import Any

import pytest

from testbed.blocks.config import KVRules
from testbed.blocks.eviction import LFU
from testbed.blocks.keys import TokenKeys
from testbed.blocks.manager import BlockManager
from testbed.core.plan import PrefillChunk
from testbed.core.sequence import Sequence
from testbed.policies.context import PolicyContext
from testbed.policies.cost_aware import CostAware
from testbed.policies.oracle import NoOracle
from tests.properties.policies import Prices
from tests.testbed.core_kit import TakesTheFirst, WeakKeys, make_blocks, make_limits, make_request, make_scheduler
from tests.testbed.kv_kit import compute, num_hit, sequence
from tests.testbed.stepping import add, cached, drain, preempted, scheduled, step


def test_a_step_knows_the_positions_that_several_decodes_read() -> None:
    """Of blocks that several hold, all but one of each; not those that only its prompts share with a decode."""
    scheduler = make_scheduler(caching=True, block_size=4, num_blocks=64)

    def repeated(*prompts: Seq[int]) -> tuple[int, int, int]:
        for prompt in prompts:
            add(scheduler, make_request(f"r{prompt}", prompt, 30))
        shape = step(scheduler)[0].shape
        return shape.num_decodes, len(shape.prefills), shape.repeated_context_tokens

    assert repeated(range(9)) == (0, 1, 0)
    assert repeated([*range(8), 50]) == (1, 1, 0)  # it found two blocks, which one decode reads
    assert repeated() == (2, 0, 8)
    assert repeated([*range(8), 60], range(100, 113)) == (2, 2, 8)
    assert repeated() == (4, 0, 16)
    assert repeated([*range(100, 112), 70]) == (4, 1, 16)
    assert repeated() == (5, 0, 16 + 12)


def test_a_hit_whose_blocks_were_taken_since_is_refused() -> None:
    """What a composition may do that looks up, gives another sequence blocks, and then admits."""
    blocks = make_blocks(num_blocks=4, block_size=4)
    first, second, other = sequence(0, range(9)), sequence(1, range(9)), sequence(2, range(100, 114))
    compute(blocks, first)
    blocks.free(first)
    hit = blocks.lookup(second)
    assert hit.num_tokens == 8
    compute(blocks, other)
    with pytest.raises(AssertionError, match="hold something else by now"):
        blocks.admit(second, 9, hit)


def test_only_full_blocks_are_hit() -> None:
    blocks = make_blocks(block_size=4)
    compute(blocks, sequence(0, range(10)))  # 2 full blocks, 2 tokens over
    assert num_hit(blocks, range(20)) == 8
    assert num_hit(blocks, [*range(7), 99, 98]) == 4
    assert num_hit(blocks, [99, *range(1, 20)]) == 0


@pytest.mark.parametrize(("block_size", "num_cached"), [(4, 4), (1, 7)])
def test_the_last_block_of_a_wholly_cached_prompt_is_computed(block_size: int, num_cached: int) -> None:
    scheduler = make_scheduler(block_size=block_size)
    add(scheduler, make_request("a", range(8), 1))
    drain(scheduler)
    add(scheduler, make_request("b", range(8), 1))
    plan, _ = step(scheduler)
    assert (cached(plan), scheduled(plan)) == ({"b": num_cached}, {"b": 8 - num_cached})
    assert plan.shape.prefills == (PrefillChunk(num_cached, 8 - num_cached),)


def test_a_later_turn_hits_the_blocks_that_decoding_filled() -> None:
    scheduler = make_scheduler(block_size=4)
    prompt, output = list(range(6)), list(range(100, 107))
    add(scheduler, make_request("turn 1", prompt, output))
    drain(scheduler)
    # 6 + 7 = 13 tokens are known; the last one is never computed, so 12 are: 3 full blocks
    add(scheduler, make_request("turn 2", [*prompt, *output, 1, 2, 3], 1))
    plan, _ = step(scheduler)
    assert cached(plan) == {"turn 2": 12}


@pytest.mark.parametrize(("hits_visible", "within_step"), [("commit", 0), ("allocation", 8)])
def test_a_block_is_hit_once_its_step_is_committed_or_from_its_allocation(hits_visible: str, within_step: int) -> None:
    scheduler = make_scheduler(block_size=4, rules=KVRules(hits_visible=hits_visible))
    add(scheduler, make_request("a", range(9), 5), make_request("b", range(9), 5))
    plan, _ = step(scheduler)
    assert (cached(plan), scheduled(plan)) == ({"a": 0, "b": within_step}, {"a": 9, "b": 9 - within_step})
    add(scheduler, make_request("c", range(9), 5))
    plan, _ = step(scheduler)
    assert cached(plan) == {"c": 8}


def test_blocks_published_for_a_row_that_was_preempted_in_the_same_step_are_not_hit() -> None:
    scheduler = make_scheduler(
        num_blocks=8, block_size=2, rules=KVRules("chunk", hits_visible="allocation"), victims=TakesTheFirst(),
        limits=make_limits(threshold=4),
    )  # fmt: skip
    add(scheduler, make_request("a", 12, 2), make_request("b", 3, 3))
    assert scheduled(step(scheduler)[0]) == {"a": 4, "b": 3}
    assert scheduled(step(scheduler)[0]) == {"a": 4, "b": 1}
    plan, _ = step(scheduler)  # a gets its last 4 tokens, 2 blocks of them; then b needs a block
    assert preempted(plan) == ["a"]
    assert scheduled(plan) == {"b": 1}
    plan, _ = step(scheduler)
    assert cached(plan) == {"a": 8}, "tokens 8 to 11 were never computed"


def test_salts_do_not_share() -> None:
    blocks = make_blocks(block_size=4)
    compute(blocks, sequence(0, range(8), salt="tenant a"))
    assert num_hit(blocks, range(9), salt="tenant a") == 8
    assert num_hit(blocks, range(9), salt="tenant b") == 0
    assert num_hit(blocks, range(9)) == 0


@pytest.mark.parametrize("num_values", [1, 2, 3])
def test_a_collision_of_keys_never_joins_different_contents(num_values: int) -> None:
    blocks = make_blocks(block_size=2, num_blocks=200, key_source=WeakKeys(2, num_values))
    holds: dict[int, tuple[str, tuple[int, ...]]] = {}  # no sequence is released, so a block keeps its content
    prompts = [(salt, tokens) for salt in ("", "x") for tokens in product((0, 1), repeat=4)]
    for number, (salt, tokens) in enumerate(prompts * 2):
        table = compute(blocks, sequence(number, (*tokens, 7), salt))
        for num_tokens, block in zip((2, 4, 5), table, strict=True):
            content = (salt, (*tokens, 7)[:num_tokens])
            assert holds.setdefault(block, content) == content
    assert blocks.prefixes.num_hit_tokens > 0, "nothing was shared, so nothing was shown"


def test_equal_tokens_of_two_salts_stay_apart_when_their_keys_collide() -> None:
    blocks = make_blocks(block_size=4, key_source=WeakKeys(4, 1))
    compute(blocks, sequence(0, range(4), salt="tenant a"))
    assert num_hit(blocks, range(5), salt="tenant a") == 4
    assert num_hit(blocks, range(5), salt="tenant b") == 0


def test_after_a_collision_a_sequence_works_on_uncached() -> None:
    scheduler = make_scheduler(block_size=2, key_source=WeakKeys(2, 1), num_blocks=20)
    add(scheduler, make_request("a", range(8), 6), make_request("b", range(50, 58), 6))
    assert [item.request.request_id for item in drain(scheduler)] == ["a", "b"]
    scheduler.check_invariants()


def test_a_sequence_that_collided_is_cached_when_it_comes_back_and_the_other_is_gone() -> None:
    blocks = make_blocks(num_blocks=2, block_size=2, key_source=WeakKeys(2, 1))
    first, second = sequence(0, (1, 2)), sequence(1, (3, 4))
    compute(blocks, first)
    compute(blocks, second)
    assert num_hit(blocks, (3, 4, 5)) == 0, "the key is taken"
    blocks.free(first)
    blocks.free(second)
    filler = sequence(2, (5, 6, 7, 8))
    blocks.admit(filler, 4, blocks.lookup(filler))  # takes both blocks, and so evicts the first's content
    blocks.free(filler)
    compute(blocks, second)
    assert num_hit(blocks, (3, 4, 5)) == 2


def test_a_sequence_that_collided_stays_uncached_until_it_comes_back_although_the_other_is_gone() -> None:
    blocks = make_blocks(num_blocks=8, block_size=2, key_source=WeakKeys(2, 1))
    first, second = sequence(0, (1, 2)), sequence(1, (3, 4, 5, 6))
    compute(blocks, first)
    blocks.admit(second, 4, blocks.lookup(second))
    blocks.prefixes.publish(second, 2)  # the key is taken
    blocks.free(first)
    filler = sequence(2, range(50, 62))
    blocks.admit(filler, 12, blocks.lookup(filler))  # all the others: the first's content is evicted
    blocks.free(filler)
    blocks.prefixes.publish(second, 4)
    assert num_hit(blocks, (3, 4, 5, 6, 7)) == 0
    blocks.check_invariants([second])


def test_a_key_depends_on_everything_before_it() -> None:
    def keys(tokens: Seq[int], salt: str = "") -> list[int]:
        found: list[int] = []
        TokenKeys(2).extend(found, [], array("i", tokens), len(tokens) // 2, salt)
        return found

    assert keys([1, 2, 3, 4])[0] == keys([1, 2, 9, 9])[0]
    assert keys([1, 2, 3, 4])[1] != keys([9, 2, 3, 4])[1]
    assert not set(keys([1, 2, 3, 4], "a")) & set(keys([1, 2, 3, 4], "b"))


def test_keys_are_extended_as_if_made_at_once() -> None:
    source, tokens = TokenKeys(2), array("i", range(12))
    keys: list[int] = []
    contents: list[bytes] = []
    for num_blocks in (1, 1, 4, 6):
        source.extend(keys, contents, tokens, num_blocks, "salt")
    at_once: tuple[list[int], list[bytes]] = ([], [])
    source.extend(*at_once, tokens, 6, "salt")
    assert (keys, contents) == at_once


def test_cached_blocks_that_nothing_references_count_as_free() -> None:
    blocks = make_blocks(num_blocks=4, block_size=4)
    seq = sequence(0, range(12))
    compute(blocks, seq)
    assert blocks.num_free_blocks == 1
    blocks.free(seq)
    assert blocks.num_free_blocks == 4
    assert num_hit(blocks, range(13)) == 12


def test_the_deepest_block_of_the_least_recently_released_prefix_is_evicted_first() -> None:
    blocks = make_blocks(num_blocks=6, block_size=1)
    old, new = sequence(0, (1, 2, 3)), sequence(1, (7, 8, 9))
    compute(blocks, old)
    compute(blocks, new)
    blocks.free(old)
    blocks.free(new)
    lengths = []
    for number, token in enumerate((100, 101, 102, 103, 104)):  # each takes one block and keeps it
        compute(blocks, sequence(10 + number, (token,)))
        lengths.append((num_hit(blocks, (1, 2, 3, 0)), num_hit(blocks, (7, 8, 9, 0))))
    assert lengths == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1)]


def test_a_hit_makes_a_prefix_recent_again() -> None:
    blocks = make_blocks(num_blocks=4, block_size=1)
    first, second = sequence(0, (1, 2)), sequence(1, (7, 8))
    for seq in (first, second):
        compute(blocks, seq)
        blocks.free(seq)
    again = sequence(2, (1, 2, 3))
    hit = blocks.lookup(again)
    assert (hit.num_tokens, hit.num_unreferenced) == (2, 2)
    blocks.admit(again, 3, hit)  # evicts 8 for its third token
    blocks.free(again)
    compute(blocks, sequence(3, (50, 51)))
    assert num_hit(blocks, (1, 2, 0)) == 2
    assert num_hit(blocks, (7, 8, 0)) == 0


class EvictsTheShallowest:
    """Gives up parents before their children, which LRU never does by itself."""

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}

    def add(self, block: int, depth: int, last_step: int) -> None:
        self._blocks[block] = None

    def hit(self, block: int) -> None: ...

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def pop(self) -> int:
        return self._blocks.popitem()[0]

    def __len__(self) -> int:
        return len(self._blocks)


def shallow_first(num_blocks: int) -> BlockManager:
    return BlockManager(
        block_size=1, num_gpu_blocks=num_blocks, num_cpu_blocks=0, watermark=0.0, rules=KVRules(),
        eviction=EvictsTheShallowest(), key_source=TokenKeys(1), max_model_len=64,
    )  # fmt: skip


def test_children_survive_their_parent_and_are_hit_when_it_is_published_again() -> None:
    blocks = shallow_first(4)
    seq = sequence(0, (1, 2, 3))
    compute(blocks, seq)
    blocks.free(seq)
    filler = sequence(1, (50, 51))
    compute(blocks, filler)  # takes the free block and evicts token 1
    assert num_hit(blocks, (1, 2, 3, 4)) == 0, "no hit without the parent"
    blocks.free(filler)
    blocks.check_invariants([])
    again = sequence(2, (1,))
    compute(blocks, again)  # evicts 50, the shallowest of those released last
    assert num_hit(blocks, (1, 2, 3, 4)) == 3
    assert num_hit(blocks, (2, 3, 4)) == 0
    blocks.check_invariants([again])


def test_entries_go_with_their_last_descendant() -> None:
    blocks = shallow_first(3)
    seq = sequence(0, (1, 2, 3))
    compute(blocks, seq)
    blocks.free(seq)
    filler = sequence(1, (50, 51, 52))
    compute(blocks, filler)
    blocks.check_invariants([filler])  # no entry stands for nothing
    assert num_hit(blocks, (50, 51, 52, 1)) == 3
    assert len(blocks._gpu.cache.entries) == 3


def test_two_sequences_that_compute_one_content_side_by_side_both_keep_it_findable() -> None:
    blocks = make_blocks(num_blocks=8, block_size=4)
    first, second = sequence(0, range(4)), sequence(1, range(4))
    for seq in (first, second):  # both admitted before either is published
        blocks.admit(seq, 4, blocks.lookup(seq))
    for seq in (first, second):
        blocks.prefixes.publish(seq, 4)
    assert first.block_table != second.block_table
    blocks.check_invariants([first, second])
    blocks.free(first)
    assert num_hit(blocks, range(5)) == 4
    fillers = sequence(2, range(100, 128))
    compute(blocks, fillers)  # 7 blocks: every one but the second's
    assert num_hit(blocks, range(5)) == 4
    blocks.check_invariants([second, fillers])


def test_sharing_costs_no_blocks_and_ends_with_the_last_user() -> None:
    scheduler = make_scheduler(block_size=4, num_blocks=8)
    add(scheduler, make_request("a", range(9), 9))
    step(scheduler)  # 3 blocks
    add(scheduler, make_request("b", range(9), 9))
    step(scheduler)  # 2 of them shared, 1 its own
    assert scheduler.blocks.num_free_blocks == 8 - 4
    scheduler.abort("a", 0)
    assert scheduler.blocks.num_free_blocks == 8 - 3
    scheduler.abort("b", 0)
    assert scheduler.blocks.num_free_blocks == 8


def test_hits_are_counted_in_tokens_and_only_at_the_first_admission() -> None:
    scheduler = make_scheduler("unified", block_size=4, num_blocks=4, rules=KVRules("chunk"))
    add(scheduler, make_request("a", 4, 8), make_request("b", 4, 8))
    drain(scheduler)
    assert scheduler.blocks.prefixes.num_queried_tokens == 8, "resumptions do not count"
    assert scheduler.blocks.prefixes.num_hit_tokens == 0
    add(scheduler, make_request("b", 4, 1), make_request("c", 4, 1))
    drain(scheduler)
    assert scheduler.blocks.prefixes.num_queried_tokens == 16


def test_without_caching_nothing_is_kept() -> None:
    scheduler = make_scheduler(caching=False, block_size=4)
    for name in ("a", "b"):
        add(scheduler, make_request(name, range(12), 1))
        plan, _ = step(scheduler)
        assert cached(plan) == {name: 0}
    assert scheduler.blocks.prefixes.num_hit_tokens == 0


# --- evictions see hits ---


@pytest.mark.parametrize("eviction", [LFU, CostAware])
def test_what_was_hit_outlives_what_was_not(eviction: Callable[[], Any]) -> None:
    """4 blocks of 4: "hot" (1 full block) is hit by a second request, "cold" (1 full block) comes later and is not.
    LRU would give up hot's block first; "big" needs 3 blocks and takes the 2 free ones and cold's."""
    policy = eviction()
    blocks = make_blocks(num_blocks=4, eviction=policy)
    scheduler = make_scheduler("prefill_first", blocks=blocks)
    if hasattr(policy, "bind"):
        policy.bind(PolicyContext(blocks, scheduler.limits, NoOracle(), Prices(), 0))
    hot, cold = list(range(5)), list(range(50, 55))
    for name, prompt in (("hot", hot), ("again", hot), ("cold", cold)):
        add(scheduler, make_request(name, prompt))
        drain(scheduler)
    add(scheduler, make_request("big", 12))
    drain(scheduler)
    assert blocks.lookup(Sequence(90, make_request("x", hot), 100)).num_tokens == 4
    assert blocks.lookup(Sequence(91, make_request("y", cold), 100)).num_tokens == 0
