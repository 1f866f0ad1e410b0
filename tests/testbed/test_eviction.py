"""Eviction: each policy by hand, and all of them against a list that is searched from end to end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.configuration.policies import POLICIES, make_policy
from testbed.blocks.eviction import FIFO, LFU, LRU, LRUByLastStep, evictor
from testbed.blocks.interfaces import EvictionPolicy
from testbed.core.plan import BatchShape
from testbed.errors import ConfigError
from testbed.policies.context import PolicyContext
from testbed.policies.cost_aware import CostAware
from testbed.policies.oracle import NoOracle
from tests.testbed.core_kit import make_blocks, make_limits

BLOCK_SIZE = 16


class PricePerDepth:
    """An estimator by which a block at depth d costs d + 1; counts how often it is asked."""

    def __init__(self) -> None:
        self.num_calls = 0

    def step_ns(self, shape: BatchShape) -> int:
        raise AssertionError("no policy of ours asks")

    def recompute_ns(self, start: int, num_tokens: int) -> int:
        assert num_tokens == BLOCK_SIZE
        self.num_calls += 1
        return start // BLOCK_SIZE + 1

    def swap_ns(self, num_blocks: int) -> int:
        raise AssertionError("eviction moves nothing")


def bound(policy: CostAware, estimator: PricePerDepth) -> CostAware:
    policy.bind(PolicyContext(make_blocks(block_size=BLOCK_SIZE), make_limits(), NoOracle(), estimator, 0))
    return policy


def release(policy: EvictionPolicy, *blocks: int, depth: int = 0, last_step: int = 0) -> None:
    """Blocks of one prefix, given from its first one (at `depth`) on."""
    for offset in reversed(range(len(blocks))):
        policy.add(blocks[offset], depth + offset, last_step)


def drain(policy: EvictionPolicy) -> list[int]:
    return [policy.pop() for _ in range(len(policy))]


class NotOurs:
    """Of a user's class, which is none of ours; a victim may be NumPy's integer."""

    def __init__(self) -> None:
        self._policy = LFU()
        self.add, self.hit, self.remove = self._policy.add, self._policy.hit, self._policy.remove

    def pop(self) -> np.int64:
        return np.int64(self._policy.pop())

    def __len__(self) -> int:
        return len(self._policy)


def of_a_user() -> EvictionPolicy:
    policy: Any = NotOurs()
    return evictor(policy)


EVERY = {
    **POLICIES["cache.eviction"],
    "of_a_user": of_a_user,
    "lru_by_last_step": LRUByLastStep,
    "cost_aware": lambda: bound(CostAware(), PricePerDepth()),
}


# --- what they share ---


@pytest.mark.parametrize("name", EVERY)
def test_blocks_released_together_go_deepest_first(name: str) -> None:
    policy = EVERY[name]()
    release(policy, 4, 9, 2, 7)
    assert drain(policy) == [7, 2, 9, 4]


@pytest.mark.parametrize("name", EVERY)
def test_a_block_that_is_referenced_again_is_no_victim(name: str) -> None:
    policy = EVERY[name]()
    release(policy, 1, 2, 3)
    policy.remove(3)
    assert len(policy) == 2
    assert drain(policy) == [2, 1]


@pytest.mark.parametrize("name", EVERY)
def test_memory_is_bounded_by_the_blocks_whatever_comes_and_goes(name: str) -> None:
    policy: Any = EVERY[name]()
    for step in range(3000):
        release(policy, 0, 1, 2, last_step=step)
        for block in (0, 1, 2):
            policy.remove(block)
        policy.hit(1)
    heap = getattr(policy, "_heap", None)
    assert heap is None or len(heap._entries) <= 2 * 3 + 64 + 1


# --- each by hand ---


def test_lru_goes_by_release_and_ignores_steps() -> None:
    policy = LRU()
    release(policy, 1, 2, last_step=9)
    release(policy, 3, last_step=5)
    policy.remove(2)
    policy.add(2, 1, 9)
    assert drain(policy) == [1, 3, 2]


def ring_of(lru: LRU) -> list[int]:
    """Its blocks in the order in which they would be given up."""
    blocks: list[int] = []
    place = lru._behind[0]
    while place:
        blocks.append(place - 1)
        place = lru._behind[place]
    return blocks


@given(seed=st.integers(0, 2**32))
def test_lru_is_a_line_from_which_anything_may_be_taken_out(seed: int) -> None:
    """Long lives over many blocks: whole tables come, some of them are referenced again, some are given up."""
    rng = random.Random(seed)
    lru, line, outside = LRU(), [], rng.sample(range(1000), 300)
    for _ in range(400):
        action = rng.random()
        if action < 0.3 and outside:
            for _ in range(rng.randint(1, min(40, len(outside)))):
                line.append(outside.pop(rng.randrange(len(outside))))
                lru.add(line[-1], rng.randrange(9), rng.randrange(9))
        elif action < 0.7 and line:
            outside.append(line.pop(rng.randrange(len(line))))
            lru.remove(outside[-1])
        elif line:
            outside.append(line.pop(0))
            assert lru.pop() == outside[-1]
        assert len(lru) == len(line)
        assert ring_of(lru) == line
    assert drain(lru) == line
    with pytest.raises(AssertionError):
        lru.pop()


def test_lru_by_last_step_goes_by_owner_then_depth_then_id() -> None:
    policy = LRUByLastStep()
    release(policy, 10, 11, 12, last_step=7)
    release(policy, 20, 21, last_step=3)
    policy.add(5, 1, 3)
    policy.add(30, 0, -1)  # never scheduled
    assert drain(policy) == [30, 5, 21, 20, 12, 11, 10]


def test_lru_by_last_step_forgets_the_step_of_an_earlier_release() -> None:
    policy = LRUByLastStep()
    policy.add(1, 0, 2)
    policy.remove(1)
    policy.add(1, 0, 8)
    policy.add(2, 0, 5)
    assert drain(policy) == [2, 1]


def test_fifo_goes_by_the_first_release_of_the_content() -> None:
    policy = FIFO()
    release(policy, 1)
    release(policy, 2)
    policy.hit(1)
    policy.remove(1)
    release(policy, 3)
    release(policy, 1)  # not renewed
    assert policy.pop() == 1
    release(policy, 1)  # another content
    assert drain(policy) == [2, 3, 1]


def test_lfu_goes_by_hits_then_by_release() -> None:
    policy = LFU()
    for block in (1, 2, 2, 4):  # while their first owners still run
        policy.hit(block)
    for block in (4, 2, 3, 1):
        release(policy, block)
    assert drain(policy) == [3, 4, 1, 2]


@pytest.mark.parametrize("name", ["lfu", "cost_aware"])
def test_hits_count_anew_once_the_content_is_gone(name: str) -> None:
    policy = EVERY[name]()
    policy.hit(1)
    release(policy, 1)
    assert policy.pop() == 1
    release(policy, 1)
    release(policy, 2)
    assert drain(policy) == [1, 2]


def test_a_deep_block_costs_more_than_a_shallow_one_of_another_prefix() -> None:
    policy = bound(CostAware(), PricePerDepth())
    policy.add(1, 4, 0)
    policy.add(2, 1, 0)
    policy.add(3, 6, 0)
    assert drain(policy) == [2, 1, 3]


def test_a_hit_doubles_what_a_block_is_worth() -> None:
    policy = bound(CostAware(), PricePerDepth())
    policy.hit(1)
    policy.add(1, 3, 0)  # 4, twice that with its hit
    policy.add(2, 6, 0)  # 7
    assert drain(policy) == [2, 1]


def test_a_prefix_is_worth_what_hangs_on_it() -> None:
    policy = bound(CostAware(), PricePerDepth())
    release(policy, 1, 2, 3)  # all worth 3, the worth of the deepest
    policy.add(4, 1, 0)  # 2
    assert drain(policy) == [4, 3, 2, 1]


def test_a_block_that_was_dear_but_is_not_used_leaves_in_the_end() -> None:
    policy = bound(CostAware(), PricePerDepth())
    policy.add(0, 9, 0)  # 10
    for block in range(1, 20):  # cheap ones come and go: 5, 10 (a tie, and younger) …
        policy.add(block, 4, 0)
        victim = policy.pop()
        if victim == 0:
            break
    assert (victim, block) == (0, 2)


def test_the_estimator_is_asked_once_for_each_depth() -> None:
    prices = PricePerDepth()
    policy = bound(CostAware(), prices)
    for _ in range(3):
        release(policy, 1, 2, 3)
        drain(policy)
    assert prices.num_calls == 3


def test_cost_aware_takes_no_costs_of_its_own() -> None:
    """They had no effect: a run always has an estimator."""
    with pytest.raises(ConfigError, match="no parameter 'token_cost'"):
        make_policy("cache.eviction", {"_target_": "testbed.policies.cost_aware.CostAware", "token_cost": 1})


# --- all of them against a naive model ---


@dataclass
class Naive:
    """What a policy should do, told in the plainest way: facts of each block, and a minimum over all of them."""

    name: str
    free: dict[int, tuple[int, ...]] = field(default_factory=dict)  # block: depth, last_step, release, priority
    hits: dict[int, int] = field(default_factory=dict)
    firsts: dict[int, int] = field(default_factory=dict)
    clock: int = 0
    inflation: int = 0
    neighbour: tuple[int, int] | None = None  # depth and worth of the block released by the call before

    def add(self, block: int, depth: int, last_step: int) -> None:
        self.clock += 1
        self.firsts.setdefault(block, self.clock)
        floor = self.neighbour[1] if self.neighbour and self.neighbour[0] == depth + 1 else 0
        worth = max(floor, (1 + self.hits.get(block, 0)) * (depth + 1))
        self.free[block] = (depth, last_step, self.clock, self.inflation + worth)
        self.neighbour = (depth, worth)

    def hit(self, block: int) -> None:
        self.neighbour = None
        self.hits[block] = self.hits.get(block, 0) + 1

    def remove(self, block: int) -> None:
        self.neighbour = None
        del self.free[block]

    def key(self, block: int) -> tuple[int, ...]:
        depth, last_step, released, priority = self.free[block]
        return {
            "lru": (released,),
            "lru_by_last_step": (last_step, -depth, block),
            "fifo": (self.firsts[block],),
            "cost_aware": (priority, released),
        }.get(self.name, (self.hits.get(block, 0), released))

    def pop(self) -> int:
        self.neighbour = None
        block = min(self.free, key=self.key)
        self.inflation = self.free.pop(block)[3]
        self.hits.pop(block, None)
        del self.firsts[block]
        return block


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["add", "chain", "remove", "hit", "pop"]),
        st.integers(0, 11),
        st.integers(0, 5),
        st.integers(-1, 3),
    ),
    max_size=200,
)


@pytest.mark.parametrize("name", EVERY)
@given(calls=CALLS)
def test_a_policy_evicts_what_a_search_over_all_blocks_would(name: str, calls: list[tuple[str, int, int, int]]) -> None:
    policy, naive = EVERY[name](), Naive(name)
    for call, block, depth, step in calls:
        if call == "add" and block not in naive.free:
            policy.add(block, depth, step)
            naive.add(block, depth, step)
        elif call == "chain":  # a whole prefix, as a sequence that ends releases it
            blocks = [item for item in range(block, block + depth) if item not in naive.free]
            release(policy, *blocks, last_step=step)
            release(naive, *blocks, last_step=step)  # type: ignore[arg-type]
        elif call in ("remove", "hit") and block in naive.free:
            policy.remove(block)
            naive.remove(block)
        if call == "hit":  # by who references it now, or beside others
            policy.hit(block)
            naive.hit(block)
        elif call == "pop" and naive.free:
            victim = policy.pop()
            assert (type(victim), victim) == (int, naive.pop())
        assert len(policy) == len(naive.free)
    assert drain(policy) == [naive.pop() for _ in range(len(naive.free))]
