"""Victims: whom each rule picks, and that those that promise progress keep the promise on a pool that is too small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.core.sequence import Sequence
from testbed.errors import ConfigError
from testbed.policies.oracle import NoOracle
from testbed.policies.queue_order import FCFS
from testbed.policies.victim import (
    LastInQueueOrder,
    LeastProgress,
    LongestRemaining,
    LowestPriority,
    MostBlocks,
    MostRecentlyAdmitted,
)
from tests.testbed.admission_kit import Says, bound, forked, make_pool, make_seq
from tests.testbed.core_kit import TakesTheFirst

BLOCK_SIZE = 4


class Ranks(FCFS):
    """A queue with ranks."""

    def __init__(self, rank: Callable[[Sequence, int], Any]) -> None:
        super().__init__()
        self.rank = rank


def chosen(policy: Any, *running: Sequence) -> int:
    return policy.choose({seq.seq_id: seq for seq in running}).seq_id


def test_the_most_recently_admitted_is_the_last_of_the_running() -> None:
    assert chosen(MostRecentlyAdmitted(), make_seq(3), make_seq(7), make_seq(1)) == 1


def test_last_in_queue_order_is_the_latest_arrival_where_the_queue_has_no_ranks() -> None:
    policy = LastInQueueOrder()
    policy.bind_queue(FCFS())
    assert chosen(policy, make_seq(3), make_seq(7), make_seq(1)) == 7


def test_last_in_queue_order_has_the_largest_rank_then_arrived_last() -> None:
    policy = LastInQueueOrder()
    policy.bind_queue(Ranks(lambda seq, now_ns: (seq.request.priority, 0)))
    assert chosen(policy, make_seq(3, priority=2), make_seq(5, priority=2), make_seq(7, priority=1)) == 5


def test_last_in_queue_order_ranks_at_the_instant_of_the_step() -> None:
    """Ageing: the older one overtakes after a second."""
    policy = LastInQueueOrder()
    policy.bind_queue(Ranks(lambda seq, now_ns: seq.request.priority if now_ns < seq.request.arrival_ns + 10**9 else 0))
    running = [make_seq(0, priority=2, arrival_ns=0), make_seq(1, priority=1, arrival_ns=10**9)]
    assert chosen(policy, *running) == 0
    policy.now_ns = 15 * 10**8
    assert chosen(policy, *running) == 1


def test_least_progress_is_the_fewest_emitted_tokens_then_the_latest_arrival() -> None:
    emitted = {4: 3, 2: 1, 5: 1, 3: 2}
    assert chosen(LeastProgress(), *(make_seq(seq_id, num_output_tokens=n) for seq_id, n in emitted.items())) == 5


def test_most_blocks_is_the_most_room_then_the_latest_arrival() -> None:
    tables = {4: 4, 2: 8, 5: 8, 3: 11}
    assert chosen(MostBlocks(), *(make_seq(seq_id, num_blocks=n) for seq_id, n in tables.items())) == 3
    assert chosen(MostBlocks(), *(make_seq(seq_id, num_blocks=min(n, 8)) for seq_id, n in tables.items())) == 5


def test_a_group_counts_with_all_its_members() -> None:
    """Two members of 8 + 4 and 8 + 8 slots share a prompt of 8: 20 together, more than 16; and emitted 3 + 3."""
    members = forked(*(make_seq(i, 8, num_output_tokens=3, num_blocks=3 + i, num_seqs=2) for i in (0, 1)))
    other = make_seq(2, 8, num_output_tokens=5, num_blocks=4)
    assert chosen(MostBlocks(), members[0], other) == 0
    assert chosen(LeastProgress(), members[0], other) == 2


def test_longest_remaining_is_what_the_oracle_says_less_what_is_emitted() -> None:
    policy = bound(LongestRemaining(), make_pool(0), Says({0: 20, 1: 12, 2: 14}))
    assert (
        chosen(
            policy,
            make_seq(0, num_output_tokens=10),
            make_seq(1, num_output_tokens=1),
            make_seq(2, num_output_tokens=3),
        )
        == 2
    )


def test_longest_remaining_takes_what_is_declared_where_the_oracle_has_no_opinion() -> None:
    policy = bound(LongestRemaining(), make_pool(0), Says({0: 20}))
    assert chosen(policy, make_seq(0), make_seq(1, max_tokens=19)) == 0
    assert chosen(policy, make_seq(0), make_seq(1, max_tokens=21)) == 1
    assert chosen(policy, make_seq(0), make_seq(1, max_tokens=None)) == 1  # as long as the model allows


class SaysNothing:
    """A user's own oracle that says so."""

    is_none = True

    def predict(self, seq: Sequence) -> int | None:
        return None


def test_longest_remaining_needs_an_oracle() -> None:
    with pytest.raises(ConfigError, match=r"'longest_remaining', but scheduler\.oracle is none; choose an oracle"):
        bound(LongestRemaining(), make_pool(0), NoOracle())
    with pytest.raises(ConfigError, match=r"scheduler\.oracle is none"):
        bound(LongestRemaining(), make_pool(0), SaysNothing())


def test_lowest_priority_is_the_largest_value_then_the_latest_arrival() -> None:
    keys = {5: (1, 9), 3: (2, 4), 2: (2, 7), 4: (2, 7), 6: (0, 99)}
    running = [make_seq(seq_id, priority=priority, arrival_ns=arrival) for seq_id, (priority, arrival) in keys.items()]
    assert chosen(LowestPriority(), *running) == 4
    assert chosen(LowestPriority(), *running[:3]) == 2


# --- progress ---


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


class Pressure:
    """fcfs on a pool that is too small: victims are recomputed from the front of the queue, and keep what they emitted.

    Each step computes at most `chunk` tokens of each running sequence. Blocks are allocated for all known tokens on
    admission (`whole`) or for each chunk. Nothing is admitted in a step that preempted.
    """

    def __init__(self, victims: Any, lengths: list[tuple[int, int, int]], chunk: int, whole: bool) -> None:
        self.victims, self.chunk, self.whole = victims, chunk, whole
        self.outputs = [output for _, output, _ in lengths]
        self.waiting = [
            make_seq(index, prompt, output, priority=priority)
            for index, (prompt, output, priority) in enumerate(lengths)
        ]
        self.running: dict[int, Sequence] = {}
        self.computed = dict.fromkeys(range(len(lengths)), 0)

    def runs_to_its_end(self, num_gpu_blocks: int, max_steps: int = 5000) -> bool:
        self.free = num_gpu_blocks
        for _ in range(max_steps):
            self.step()
            if not self.waiting and not self.running:
                return self.free == num_gpu_blocks
        return False

    def step(self) -> None:
        has_preempted = False
        for seq in list(self.running.values()):
            while seq.seq_id in self.running and not self.grow(seq, self.wanted(seq)):
                victim = self.victims.choose(self.running)
                self.give_up(victim)
                self.waiting.insert(0, victim)
                has_preempted = True
        while self.waiting and not has_preempted:
            seq = self.waiting[0]
            if not self.grow(seq, seq.num_tokens if self.whole else self.wanted(seq)):
                break
            self.running[seq.seq_id] = self.waiting.pop(0)
        for seq in list(self.running.values()):
            self.computed[seq.seq_id] = self.wanted(seq)
            if self.computed[seq.seq_id] == seq.num_tokens:
                seq.emit(0)
            if seq.num_output_tokens == self.outputs[seq.seq_id]:
                self.give_up(seq)

    def wanted(self, seq: Sequence) -> int:
        return min(self.computed[seq.seq_id] + self.chunk, seq.num_tokens)

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        missing = max(num_blocks(num_tokens) - len(seq.block_table), 0)
        if missing > self.free:
            return False
        self.free -= missing
        seq.block_table += [0] * missing
        return True

    def give_up(self, seq: Sequence) -> None:
        del self.running[seq.seq_id]
        self.free += len(seq.block_table)
        self.computed[seq.seq_id] = 0
        seq.block_table = []


def in_order_of_arrival() -> LastInQueueOrder:
    policy = LastInQueueOrder()
    policy.bind_queue(FCFS())
    return policy


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 2)), min_size=1, max_size=6)


def least_pool(lengths: list[tuple[int, int, int]]) -> int:
    return max(num_blocks(prompt + output) for prompt, output, _ in lengths)


@pytest.mark.parametrize(
    ("make", "allocations"),
    [
        (MostRecentlyAdmitted, (True, False)),
        (in_order_of_arrival, (True, False)),
        (LeastProgress, (True, False)),
        (MostBlocks, (True,)),
        (lambda: bound(LongestRemaining(), make_pool(0), Says({})), (True, False)),
        (LowestPriority, (True, False)),
    ],
)
@given(lengths=LENGTHS, extra=st.integers(0, 6), chunk=st.integers(1, 16))
def test_everything_ends_on_a_pool_that_holds_little_more_than_one(
    make: Any, allocations: tuple[bool, ...], lengths: list[tuple[int, int, int]], extra: int, chunk: int
) -> None:
    for whole in allocations:
        assert Pressure(make(), lengths, chunk, whole).runs_to_its_end(least_pool(lengths) + extra)


@pytest.mark.parametrize("rule", [TakesTheFirst, MostBlocks])
def test_a_rule_that_spares_nobody_may_let_two_prompts_take_turns_for_ever(rule: Any) -> None:
    """Why the docstrings speak of progress: by chunks of 5, neither prompt gets to its end before it is preempted."""
    lengths = [(8, 18, 0), (10, 16, 0)]
    assert not Pressure(rule(), lengths, chunk=5, whole=False).runs_to_its_end(least_pool(lengths))
    assert Pressure(rule(), lengths, chunk=5, whole=True).runs_to_its_end(least_pool(lengths))
    assert Pressure(MostRecentlyAdmitted(), lengths, chunk=5, whole=False).runs_to_its_end(least_pool(lengths))
