"""Victims: whom each rule picks, and that those that promise progress keep the promise on a pool that is too small."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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

BLOCK_SIZE = 4


@dataclass(eq=False)
class Seq:
    """What a policy may read of a sequence, settable."""

    seq_id: int
    num_prompt_tokens: int = 8
    num_output_tokens: int = 0
    num_slots: int = 0
    priority: int = 0
    arrival_ns: int = 0
    max_tokens: int | None = None
    num_seqs: int = 1
    together: list[Seq] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def request(self) -> Any:
        sampling = SimpleNamespace(max_tokens=self.max_tokens)
        return SimpleNamespace(priority=self.priority, arrival_ns=self.arrival_ns, sampling=sampling)


class Says:
    """An oracle that has an opinion on some sequences."""

    def __init__(self, lengths: dict[int, int]) -> None:
        self.lengths = lengths

    def predict(self, seq: Seq) -> int | None:
        return self.lengths.get(seq.seq_id)


def chosen(policy: Any, *running: Seq) -> int:
    return policy.choose({seq.seq_id: seq for seq in running}).seq_id


def bound(policy: Any, oracle: Any) -> Any:
    policy.bind(SimpleNamespace(limits=SimpleNamespace(max_model_len=100), oracle=oracle))
    return policy


def test_the_most_recently_admitted_is_the_last_of_the_running() -> None:
    assert chosen(MostRecentlyAdmitted(), Seq(3), Seq(7), Seq(1)) == 1


def test_last_in_queue_order_is_the_latest_arrival_where_the_queue_has_no_ranks() -> None:
    policy = LastInQueueOrder()
    policy.bind_queue(FCFS())
    assert chosen(policy, Seq(3), Seq(7), Seq(1)) == 7


def test_last_in_queue_order_has_the_largest_rank_then_arrived_last() -> None:
    policy = LastInQueueOrder()
    queue: Any = SimpleNamespace(rank=lambda seq, now_ns: (seq.priority, 0))
    policy.bind_queue(queue)
    assert chosen(policy, Seq(3, priority=2), Seq(5, priority=2), Seq(7, priority=1)) == 5


def test_last_in_queue_order_ranks_at_the_instant_of_the_step() -> None:
    """Ageing: the older one overtakes after a second."""
    policy = LastInQueueOrder()
    queue: Any = SimpleNamespace(rank=lambda seq, now_ns: seq.priority if now_ns < seq.arrival_ns + 10**9 else 0)
    policy.bind_queue(queue)
    running = [Seq(0, priority=2, arrival_ns=0), Seq(1, priority=1, arrival_ns=10**9)]
    assert chosen(policy, *running) == 0
    policy.now_ns = 15 * 10**8
    assert chosen(policy, *running) == 1


def test_least_progress_is_the_fewest_emitted_tokens_then_the_latest_arrival() -> None:
    emitted = {4: 3, 2: 1, 5: 1, 3: 2}
    assert chosen(LeastProgress(), *(Seq(seq_id, num_output_tokens=n) for seq_id, n in emitted.items())) == 5


def test_most_blocks_is_the_most_room_then_the_latest_arrival() -> None:
    slots = {4: 16, 2: 32, 5: 32, 3: 48 - 4}
    assert chosen(MostBlocks(), *(Seq(seq_id, num_slots=n) for seq_id, n in slots.items())) == 3
    assert chosen(MostBlocks(), *(Seq(seq_id, num_slots=min(n, 32)) for seq_id, n in slots.items())) == 5


def test_a_group_counts_with_all_its_members() -> None:
    """Two members of 8 + 4 and 8 + 8 slots share a prompt of 8: 20 together, more than 16; and emitted 3 + 3."""
    members = [Seq(0, 8, 3, num_slots=12, num_seqs=2), Seq(1, 8, 3, num_slots=16, num_seqs=2)]
    members[0].together = members
    other = Seq(2, 8, 5, num_slots=16)
    assert chosen(MostBlocks(), members[0], other) == 0
    assert chosen(LeastProgress(), members[0], other) == 2


def test_longest_remaining_is_what_the_oracle_says_less_what_is_emitted() -> None:
    policy = bound(LongestRemaining(), Says({0: 20, 1: 12, 2: 14}))
    assert chosen(policy, Seq(0, num_output_tokens=10), Seq(1, num_output_tokens=1), Seq(2, num_output_tokens=3)) == 2


def test_longest_remaining_takes_what_is_declared_where_the_oracle_has_no_opinion() -> None:
    policy = bound(LongestRemaining(), Says({0: 20}))
    assert chosen(policy, Seq(0), Seq(1, max_tokens=19)) == 0
    assert chosen(policy, Seq(0), Seq(1, max_tokens=21)) == 1
    assert chosen(policy, Seq(0), Seq(1)) == 1  # as long as the model allows


def test_longest_remaining_needs_an_oracle() -> None:
    with pytest.raises(ConfigError, match=r"'longest_remaining', but scheduler\.oracle is none; choose an oracle"):
        bound(LongestRemaining(), NoOracle())
    with pytest.raises(ConfigError, match=r"scheduler\.oracle is none"):
        bound(LongestRemaining(), SimpleNamespace(is_none=True, predict=lambda seq: None))


def test_lowest_priority_is_the_largest_value_then_the_latest_arrival() -> None:
    keys = {5: (1, 9), 3: (2, 4), 2: (2, 7), 4: (2, 7), 6: (0, 99)}
    running = [Seq(seq_id, priority=priority, arrival_ns=arrival) for seq_id, (priority, arrival) in keys.items()]
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
            Seq(index, prompt, priority=priority, max_tokens=output)
            for index, (prompt, output, priority) in enumerate(lengths)
        ]
        self.running: dict[int, Seq] = {}
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
            seq.num_output_tokens += self.computed[seq.seq_id] == seq.num_tokens
            if seq.num_output_tokens == self.outputs[seq.seq_id]:
                self.give_up(seq)

    def wanted(self, seq: Seq) -> int:
        return min(self.computed[seq.seq_id] + self.chunk, seq.num_tokens)

    def grow(self, seq: Seq, num_tokens: int) -> bool:
        missing = max(num_blocks(num_tokens) - seq.num_slots // BLOCK_SIZE, 0)
        if missing > self.free:
            return False
        self.free -= missing
        seq.num_slots += missing * BLOCK_SIZE
        return True

    def give_up(self, seq: Seq) -> None:
        del self.running[seq.seq_id]
        self.free += seq.num_slots // BLOCK_SIZE
        self.computed[seq.seq_id] = seq.num_slots = 0


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
        (lambda: bound(LongestRemaining(), Says({})), (True, False)),
        (LowestPriority, (True, False)),
    ],
)
@given(lengths=LENGTHS, extra=st.integers(0, 6), chunk=st.integers(1, 16))
def test_everything_ends_on_a_pool_that_holds_little_more_than_one(
    make: Any, allocations: tuple[bool, ...], lengths: list[tuple[int, int, int]], extra: int, chunk: int
) -> None:
    for whole in allocations:
        assert Pressure(make(), lengths, chunk, whole).runs_to_its_end(least_pool(lengths) + extra)


class Oldest:
    """The counter-example: whoever was admitted first."""

    def choose(self, running: dict[int, Seq]) -> Seq:
        return next(iter(running.values()))


@pytest.mark.parametrize("rule", [Oldest, MostBlocks])
def test_a_rule_that_spares_nobody_may_let_two_prompts_take_turns_for_ever(rule: Any) -> None:
    """Why the docstrings speak of progress: by chunks of 5, neither prompt gets to its end before it is preempted."""
    lengths = [(8, 18, 0), (10, 16, 0)]
    assert not Pressure(rule(), lengths, chunk=5, whole=False).runs_to_its_end(least_pool(lengths))
    assert Pressure(rule(), lengths, chunk=5, whole=True).runs_to_its_end(least_pool(lengths))
    assert Pressure(MostRecentlyAdmitted(), lengths, chunk=5, whole=False).runs_to_its_end(least_pool(lengths))
