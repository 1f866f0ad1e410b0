"""A prefix that nobody else has asked for has neither keys nor entries yet, and nobody can tell."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.configuration.policies import POLICIES
from testbed.blocks.config import KVRules
from testbed.blocks.demand import AllocStatus
from testbed.blocks.interfaces import EvictionPolicy
from testbed.blocks.keys import TokenKeys
from testbed.blocks.manager import BlockManager
from testbed.blocks.prefixes import PrefixHit
from testbed.core.sequence import Sequence
from testbed.policies.context import PolicyContext
from testbed.policies.oracle import NoOracle
from tests.properties.policies import Prices
from tests.testbed.core_kit import make_blocks, make_limits, make_request
from tests.testbed.kv_kit import compute, num_hit, sequence

NUM_BLOCKS = 24


class Counting(TokenKeys):
    """How many keys were made."""

    def __init__(self, block_size: int, *, are_unique: bool = True) -> None:
        super().__init__(block_size, are_unique=are_unique)
        self.num_made = 0

    def extend(self, keys: list[int], contents: list[bytes], tokens: array[int], num_blocks: int, salt: str) -> None:
        self.num_made += max(0, num_blocks - len(keys))
        super().extend(keys, contents, tokens, num_blocks, salt)


class World:
    """A block manager and the sequences that have blocks of it, under random calls that a scheduler could make."""

    def __init__(self, seed: int, *, lists_late: bool) -> None:
        self.rng = rng = random.Random(seed)
        block_size = rng.choice((1, 2, 3))
        rules = KVRules(
            allocate=rng.choice(("whole", "chunk")), hits_visible=rng.choice(("commit", "allocation")),
            hit_cap=rng.choice(("last_block", "last_token")), free_order=rng.choice(("uncached_first", "one_queue")),
        )  # fmt: skip
        eviction: EvictionPolicy = rng.choice([*POLICIES["cache.eviction"].values()])()
        self.keys = Counting(block_size, are_unique=lists_late)
        self.blocks = make_blocks(
            num_blocks=NUM_BLOCKS, num_cpu_blocks=8, block_size=block_size, rules=rules, eviction=eviction,
            key_source=self.keys, sliding_window=rng.choice((None, None, 5)),
        )  # fmt: skip
        if hasattr(eviction, "bind"):
            eviction.bind(PolicyContext(self.blocks, make_limits(), NoOracle(), Prices(), 0))
        self.num_tokens = rng.choice((2, 2, 4))  # different ones: the fewer, the more is shared
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_seqs = 0
        self.seen: list[object] = []

    def live(self, num_calls: int) -> World:
        for _ in range(num_calls):
            self.call()
            seqs = [*self.waiting, *self.running, *self.swapped]
            self.blocks.check_invariants([*seqs])
            self.seen.append([(seq.block_table, seq.cpu_table, seq.num_computed_tokens) for seq in seqs])
            self.seen.append((self.blocks.num_free_blocks, self.blocks.prefixes.num_hit_tokens))
        return self

    def call(self) -> None:
        choice = self.rng.random()
        if choice < 0.2 or not (self.waiting or self.running or self.swapped):
            self.arrive()
        elif choice < 0.45 and self.waiting:
            self.admit(self.waiting[self.rng.randrange(len(self.waiting))])
        elif choice < 0.8 and self.running:
            self.advance(self.pick(self.running))
        elif choice < 0.87 and self.running:
            self.leave(self.pick(self.running), comes_back=self.rng.random() < 0.5)
        elif choice < 0.9 and self.running:
            self.swap_out(self.pick(self.running))
        elif choice < 0.95 and self.swapped:
            self.swap_in(self.pick(self.swapped))
        elif choice < 0.97 and self.running:
            self.fork(self.pick(self.running))
        elif self.waiting:
            self.look_up(self.pick(self.waiting))

    def pick(self, seqs: list[Sequence]) -> Sequence:
        return seqs[self.rng.randrange(len(seqs))]

    def arrive(self) -> None:
        prompt = [self.rng.randrange(self.num_tokens) for _ in range(self.rng.randint(1, 12))]
        salt = self.rng.choice(("", "", "x"))
        request = make_request(str(self.num_seqs), prompt, [self.rng.randrange(2) for _ in range(20)], salt=salt)
        self.waiting.append(Sequence(self.num_seqs, request, 4096))
        self.num_seqs += 1

    def look_up(self, seq: Sequence) -> PrefixHit:
        hit = self.blocks.lookup(seq)
        self.seen.append((hit.num_tokens, hit.blocks, hit.num_unreferenced))
        return hit

    def admit(self, seq: Sequence) -> None:
        blocks, hit = self.blocks, self.look_up(seq)
        num_tokens = self.rng.randint(hit.num_tokens + 1, seq.num_tokens)
        if blocks.can_admit(seq, num_tokens, hit, is_idle=False) is not AllocStatus.OK:
            return
        blocks.admit(seq, num_tokens, hit)
        seq.restart(hit.num_tokens)
        self.waiting.remove(seq)
        self.running.append(seq)
        self.compute(seq, num_tokens - hit.num_tokens, may_be_withdrawn=False)  # no step takes back whom it admitted

    def advance(self, seq: Sequence) -> None:
        missing = seq.num_tokens - seq.num_computed_tokens
        num_tokens = self.rng.randint(1, missing)
        self.blocks.release_outside_window(seq)
        if not self.blocks.can_grow(seq, num_tokens):
            self.leave(seq, comes_back=True)
            return
        self.blocks.grow(seq, num_tokens)
        self.compute(seq, num_tokens, may_be_withdrawn=True)

    def compute(self, seq: Sequence, num_tokens: int, *, may_be_withdrawn: bool) -> None:
        end = seq.num_computed_tokens + num_tokens
        if self.blocks.publishes_early:
            self.blocks.prefixes.publish(seq, end)
        if may_be_withdrawn and self.rng.random() < 0.1:  # preempted before it is computed
            self.blocks.prefixes.withdraw(seq, seq.num_computed_tokens)
            self.leave(seq, comes_back=True)
            return
        self.seen.append(self.blocks.planned())
        seq.advance(num_tokens)
        self.blocks.prefixes.publish(seq, end)
        if end == seq.num_tokens:
            if seq.num_tokens == seq.token_limit:
                self.leave(seq, comes_back=False)
            else:
                seq.emit(0)

    def leave(self, seq: Sequence, *, comes_back: bool) -> None:
        self.running.remove(seq)
        self.blocks.free(seq)
        seq.restart()
        if comes_back:
            seq.num_preemptions += 1
            self.waiting.append(seq)
        else:
            self.blocks.forget(seq)

    def swap_out(self, seq: Sequence) -> None:
        if self.blocks.swapping.can_swap_out(seq.together):
            self.seen.append(self.blocks.swapping.swap_out(seq.together))
            self.running.remove(seq)
            self.swapped.append(seq)

    def swap_in(self, seq: Sequence) -> None:
        if self.blocks.swapping.can_swap_in(seq.together) is AllocStatus.OK:
            self.seen.append(self.blocks.swapping.swap_in(seq.together))
            self.swapped.remove(seq)
            self.running.append(seq)
            self.seen.append(self.blocks.planned())

    def fork(self, seq: Sequence) -> None:
        """Its blocks are shared for a while: a member that ends at once."""
        child = seq.fork(1000 + self.num_seqs, 1)
        self.blocks.fork(seq, child)
        self.seen.append(child.block_table[:])
        self.blocks.free(child)
        self.blocks.forget(child)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_answer_and_every_block_is_the_same_as_if_all_were_listed_at_once(seed: int) -> None:
    late, at_once = World(seed, lists_late=True).live(120), World(seed, lists_late=False).live(120)
    for index, (found, expected) in enumerate(zip(late.seen, at_once.seen, strict=False)):
        assert found == expected, f"answer {index} of seed {seed}"
    assert len(late.seen) == len(at_once.seen)


def test_these_lives_are_busy_and_some_of_their_keys_are_never_made() -> None:
    late = [World(seed, lists_late=True).live(120) for seed in range(40)]
    at_once = [World(seed, lists_late=False).live(120) for seed in range(40)]
    assert sum(world.keys.num_made for world in late) < 0.95 * sum(world.keys.num_made for world in at_once)
    assert sum(world.blocks.prefixes.num_hit_tokens for world in late) > 300
    assert sum(seq.num_preemptions for world in late for seq in world.waiting) > 50
    assert sum(len(world.swapped) for world in late) > 20


def made(blocks_keys: Counting, blocks: BlockManager, tokens: Seq[int]) -> int:
    """Keys that are made while a sequence of these tokens is admitted and computed."""
    before = blocks_keys.num_made
    compute(blocks, sequence(len(tokens) + tokens[0], tokens))
    return blocks_keys.num_made - before


@pytest.mark.parametrize(("are_unique", "num_made"), [(True, 1), (False, 10)])
def test_a_prompt_that_shares_nothing_has_one_key_made(are_unique: bool, num_made: int) -> None:
    keys = Counting(4, are_unique=are_unique)
    blocks = make_blocks(key_source=keys)
    assert made(keys, blocks, range(100, 140)) == num_made
    assert made(keys, blocks, range(200, 240)) == num_made


def test_who_asks_for_its_first_block_has_it_listed_and_finds_all_of_it() -> None:
    keys = Counting(4)
    blocks = make_blocks(key_source=keys)
    compute(blocks, sequence(0, range(40)))
    assert num_hit(blocks, [*range(30), 99, 98]) == 28
    assert keys.num_made == 10 + 7  # of the one that has it, and of the one that asks: 31 tokens are 7 blocks
    assert num_hit(blocks, [1, *range(1, 40)]) == 0


def test_what_is_evicted_of_an_unlisted_prefix_is_not_found_and_the_rest_is() -> None:
    blocks = make_blocks(num_blocks=4, block_size=4)
    first = sequence(0, range(16))
    compute(blocks, first)
    blocks.free(first)
    compute(blocks, sequence(1, range(100, 108)))  # takes its two deepest
    assert num_hit(blocks, range(17)) == 8
    filler = sequence(2, range(200, 208))
    compute(blocks, filler)
    assert num_hit(blocks, range(17)) == 0
