"""Queue orders against naive models: every order is compared with a plain sort or a plain scan of what waits."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import testbed.policies.orders as orders
from testbed.errors import ConfigError
from testbed.policies.config import Limits
from testbed.policies.context import PolicyContext
from testbed.policies.oracle import Noisy, NoOracle, Perfect
from testbed.policies.orders.heap import MIN_STALE, LazyHeap
from testbed.policies.queue_order import FCFS
from testbed.request import Request
from testbed.sequence import Sequence
from tests.testbed.core_kit import make_blocks

NS_PER_S = 1_000_000_000
MAX_MODEL_LEN = 1 << 20


class Hit(NamedTuple):
    num_tokens: int
    blocks: list[int]


class FakeBlocks:
    """Hits as a test says, by request id; None counts the lookups alone."""

    block_size = 4

    def __init__(self, hits: dict[str, Hit] | None = None) -> None:
        self.hits = hits or {}
        self.num_lookups = 0

    def lookup(self, seq: Sequence) -> Hit:
        self.num_lookups += 1
        return self.hits.get(seq.request.request_id, Hit(0, []))

    def salt_of(self, seq: Sequence) -> str:
        return seq.request.cache_salt


def bound(queue: Any, *, oracle: Any = None, blocks: Any = None, seed: int = 0) -> Any:
    context = PolicyContext(blocks or FakeBlocks(), Limits(8, 64, MAX_MODEL_LEN, 0, 1), oracle or Perfect(), None, seed)
    for part in (context.oracle, queue):
        if hasattr(part, "bind"):
            part.bind(context)
    return queue


def make_seq(
    seq_id: int, prompt: int | Iterable[int] = 10, output: int = 5, *, salt: str = "", **fields: Any
) -> Sequence:
    tokens = range(seq_id * 10_000, seq_id * 10_000 + prompt) if isinstance(prompt, int) else prompt
    request = Request(
        f"r{seq_id}", array("i", tokens), forced_output=array("i", range(output)), cache_salt=salt, **fields
    )
    return Sequence(seq_id, request, MAX_MODEL_LEN)


def emit(seq: Sequence, num_tokens: int = 1) -> None:
    for _ in range(num_tokens):
        seq.emit(0)


def drain(queue: Any, now_ns: int = 0) -> list[int]:
    """Ids in the order served at this instant."""
    ids = []
    while (seq := queue.head(now_ns)) is not None:
        queue.remove(seq)
        ids.append(seq.seq_id)
    assert len(queue) == 0
    return ids


def pushed(queue: Any, *seqs: Sequence) -> Any:
    for seq in seqs:
        queue.push(seq)
    return queue


# --- random calls ---


@dataclass
class World:
    """A queue under test, and what waits, runs and has been in it, as the scheduler would know it."""

    queue: Any
    waiting: dict[int, Sequence]
    running: dict[int, Sequence]
    now_ns: int = 0
    num_seqs: int = 0

    def push(self, draw: Callable[[int, int], int]) -> None:
        deadline = draw(0, 40)
        seq = make_seq(
            self.num_seqs,
            draw(1, 60),
            draw(1, 60),
            arrival_ns=max(0, self.now_ns - draw(0, 3) * NS_PER_S),
            priority=draw(-3, 3),
            tenant=(None, "a", "b", "c")[draw(0, 3)],
            deadline_ns=None if deadline > 30 else deadline * NS_PER_S,
        )
        self.num_seqs += 1
        self.queue.push(seq)
        self.waiting[seq.seq_id] = seq

    def admit(self, seq: Sequence | None) -> None:
        if seq is not None:
            self.queue.remove(self.waiting.pop(seq.seq_id))
            self.running[seq.seq_id] = seq

    def step(self, draw: Callable[[int, int], int]) -> None:
        """Some of the running advance; the finished leave."""
        self.now_ns += draw(1, 3 * NS_PER_S)
        for seq in list(self.running.values()):
            num_tokens = min(draw(0, 30), seq.num_tokens - seq.num_computed_tokens)
            if num_tokens == 0:
                continue
            seq.num_computed_tokens += num_tokens
            num_emitted = int(seq.num_computed_tokens == seq.num_tokens)
            emit(seq, num_emitted)
            if hasattr(self.queue, "served"):
                self.queue.served(seq, num_tokens, num_emitted, self.now_ns)
            if seq.num_output_tokens == len(seq.request.forced_output or ()):
                self.end(self.running.pop(seq.seq_id))

    def preempt(self, seq: Sequence) -> None:
        del self.running[seq.seq_id]
        seq.num_computed_tokens = 0
        self.queue.push_preempted(seq)
        self.waiting[seq.seq_id] = seq

    def abort(self, seq: Sequence) -> None:
        if self.waiting.pop(seq.seq_id, None):
            self.queue.remove(seq)
        else:
            del self.running[seq.seq_id]
        self.end(seq)

    def end(self, seq: Sequence) -> None:
        if hasattr(self.queue, "left"):
            self.queue.left(seq, self.now_ns)


def play(queue: Any, data: st.DataObject, check: Callable[[World], None]) -> World:
    """Random calls in an order that a scheduler could make; `check` after each."""
    world = World(queue, {}, {})

    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    def pick(seqs: dict[int, Sequence]) -> Sequence:
        return list(seqs.values())[draw(0, len(seqs) - 1)]

    for _ in range(draw(1, 40)):
        action = draw(0, 9)
        if action <= 4 or not (world.waiting or world.running):
            world.push(draw)
        elif action <= 6:
            world.admit(queue.head(world.now_ns))
        elif action == 7:
            world.step(draw)
        elif action == 8 and world.running:
            world.preempt(pick(world.running))
        elif world.waiting or world.running:
            world.abort(pick({**world.waiting, **world.running}))
        assert len(queue) == len(world.waiting)
        assert sorted(seq.seq_id for seq in queue) == sorted(world.waiting)
        check(world)
    return world


# --- orders by key ---


def aged(seq: Sequence, now_ns: int) -> Any:
    wait_s = Fraction(now_ns - seq.request.arrival_ns, NS_PER_S)
    return seq.request.priority - Fraction(1, 10) * wait_s, seq.request.arrival_ns, seq.seq_id


def to_come(seq: Sequence, now_ns: int) -> Any:
    output = len(seq.request.forced_output or ())
    return output - seq.num_output_tokens + seq.num_tokens - seq.num_computed_tokens, seq.seq_id


def late(seq: Sequence, now_ns: int) -> Any:
    deadline_ns = seq.request.deadline_ns
    return deadline_ns is None, deadline_ns or 0, seq.request.arrival_ns, seq.seq_id


def size(prompt: int, output: int, sign: int = 1) -> Callable[[Sequence, int], Any]:
    def key(seq: Sequence, now_ns: int) -> Any:
        return sign * (prompt * seq.num_prompt_tokens + output * len(seq.request.forced_output or ())), seq.seq_id

    return key


KEYED: dict[str, tuple[Callable[[], Any], Callable[[Sequence, int], Any]]] = {
    "lcfs": (orders.lcfs, lambda seq, now_ns: -seq.seq_id),
    "priority": (orders.priority, lambda seq, now_ns: (seq.request.priority, seq.request.arrival_ns, seq.seq_id)),
    "priority_aged": (lambda: orders.priority(ageing_per_s=0.1), aged),
    "edf": (orders.earliest_deadline, late),
    "sjf": (orders.shortest_job, size(1, 0)),
    "sjf_output": (lambda: orders.shortest_job("output"), size(0, 1)),
    "sjf_total": (lambda: orders.shortest_job("total"), size(1, 1)),
    "ljf": (orders.longest_job, size(1, 0, -1)),
    "ljf_output": (lambda: orders.longest_job("output"), size(0, 1, -1)),
    "srpt": (orders.shortest_remaining, to_come),
}


@pytest.mark.parametrize("name", KEYED)
@given(data=st.data())
def test_a_keyed_order_serves_as_a_plain_sort_does(name: str, data: st.DataObject) -> None:
    make, key = KEYED[name]
    queue = bound(make())

    def check(world: World) -> None:
        expected = min(world.waiting.values(), key=lambda seq: key(seq, world.now_ns), default=None)
        assert queue.head(world.now_ns) is expected

    world = play(queue, data, check)
    by_key = sorted(world.waiting.values(), key=lambda seq: key(seq, world.now_ns))
    assert list(queue) == by_key
    assert sorted(world.waiting.values(), key=lambda seq: queue.rank(seq, world.now_ns)) == by_key
    assert drain(queue, world.now_ns) == [seq.seq_id for seq in by_key]


@given(data=st.data())
def test_a_random_order_draws_each_place_once(data: st.DataObject) -> None:
    queue, other = bound(orders.random_order(), seed=3), bound(orders.random_order(seed=3), seed=4)
    world = play(queue, data, lambda world: None)
    for seq in reversed(world.waiting.values()):
        other.push(seq)
    assert drain(other) == drain(queue)


def test_a_random_order_depends_on_the_seed_and_looks_random() -> None:
    seqs = [make_seq(seq_id) for seq_id in range(200)]
    first = drain(pushed(bound(orders.random_order(), seed=1), *seqs))
    assert first != drain(pushed(bound(orders.random_order(), seed=2), *seqs))
    rises = sum(a < b for a, b in pairwise(first))
    assert 75 < rises < 125


def test_a_preempted_sequence_re_enters_by_its_key() -> None:
    old, new = make_seq(0, priority=5), make_seq(1, priority=1)
    queue = pushed(bound(orders.priority()), new)
    queue.push_preempted(old)
    assert drain(queue) == [1, 0]


# --- priority ---


def serve_while_urgent_requests_keep_coming(queue: Any) -> int | None:
    """One urgent request arrives and one request is served each second; when the patient one is served, in s."""
    patient = make_seq(0, priority=10)
    queue.push(patient)
    for second in range(200):
        queue.push(make_seq(second + 1, priority=0, arrival_ns=second * NS_PER_S))
        head = queue.head(second * NS_PER_S)
        queue.remove(head)
        if head is patient:
            return second
    return None


def test_with_ageing_nothing_starves() -> None:
    assert serve_while_urgent_requests_keep_coming(bound(orders.priority())) is None
    assert serve_while_urgent_requests_keep_coming(bound(orders.priority(ageing_per_s=0.1))) == 100
    assert serve_while_urgent_requests_keep_coming(bound(orders.priority(ageing_per_s=1))) == 10


def test_ageing_is_exact_where_floats_are_not() -> None:
    arrivals = [9_007_199_254_740_993, 9_007_199_254_740_992]  # ns, above 2^53
    seqs = [make_seq(seq_id, arrival_ns=arrival_ns) for seq_id, arrival_ns in enumerate(arrivals)]
    assert drain(pushed(bound(orders.priority(ageing_per_s=0.1)), *seqs)) == [1, 0]


# --- preemption on behalf of the head ---


def test_a_preemptive_order_names_the_running_sequence_that_goes_last() -> None:
    queue = bound(orders.priority(preemptive=True))
    running = [make_seq(seq_id, priority=priority) for seq_id, priority in enumerate((1, 7, 7, 3))]
    assert queue.yields(running, 0) is None, "nobody waits"
    queue.push(make_seq(9, priority=7))
    assert queue.yields(running, 0) is None, "equal priorities do not yield"
    queue.push(make_seq(10, priority=6))
    assert queue.yields(running, 0) is running[2]
    assert queue.yields([], 0) is None
    queue = pushed(bound(orders.priority()), make_seq(10, priority=6))
    assert queue.yields(running, 0) is None, "not unless it is asked for"


def test_srpt_preempts_who_has_most_left_and_he_does_not_preempt_back() -> None:
    queue = bound(orders.shortest_remaining(preemptive=True))
    running = make_seq(0, 40, 100)
    running.num_computed_tokens = 40
    emit(running)
    assert queue.rank(running, 0)[0] == 99 + 1
    queue.push(make_seq(1, 50, 50))
    assert queue.yields([running], 0) is None, "as much to do as is left"
    head = make_seq(2, 49, 50)
    queue.push(head)
    assert queue.yields([running], 0) is running
    queue.remove(head)
    running.num_computed_tokens = 0
    queue.push_preempted(running)
    assert queue.rank(running, 0)[0] == 99 + 41
    assert queue.yields([head], 0) is None


def test_a_prediction_that_was_too_low_leaves_one_token_to_come() -> None:
    class TooLow:
        def predict(self, seq: Sequence) -> int:
            return 2

    queue = bound(orders.shortest_remaining(), oracle=TooLow())
    seq = make_seq(0, 4, 50)
    emit(seq, 10)
    seq.num_computed_tokens = 13
    assert queue.rank(seq, 0)[0] == 2  # its newest token to compute, and one to emit


# --- foresight ---


@pytest.mark.parametrize("by", ["output", "total", "remaining"])
@pytest.mark.parametrize("make", [orders.shortest_job, orders.longest_job])
def test_ordering_by_what_no_oracle_tells_is_refused(make: Callable[[str], Any], by: str) -> None:
    with pytest.raises(ConfigError, match=rf"^scheduler\.queue_order goes by {by} tokens, .* scheduler\.oracle=none"):
        bound(make(by), oracle=NoOracle())
    bound(make("prompt"), oracle=NoOracle())


def test_a_sequence_without_a_prediction_counts_as_the_longest() -> None:
    class Partial:
        def predict(self, seq: Sequence) -> int | None:
            return None if seq.seq_id == 0 else 1000

    seqs = [make_seq(seq_id) for seq_id in range(3)]
    assert drain(pushed(bound(orders.shortest_job("output"), oracle=Partial()), *seqs)) == [1, 2, 0]
    assert drain(pushed(bound(orders.longest_job("output"), oracle=Partial()), *seqs)) == [0, 1, 2]


def test_noise_changes_the_order_and_no_order_reads_the_true_length() -> None:
    seqs = [make_seq(seq_id, 10, 50 + seq_id) for seq_id in range(50)]
    noisy = drain(pushed(bound(orders.shortest_job("output"), oracle=Noisy(sigma=1.0)), *seqs))
    assert noisy != list(range(50))
    for path in sorted(Path(orders.__file__).parent.glob("*.py")):
        source = path.read_text()
        for secret in ("forced", "token_limit", "max_tokens"):
            assert secret not in source, f"{path.name} looks at {secret}"


# --- highest response ratio next ---


def ratio(seq: Sequence, now_ns: int) -> Fraction:
    service = seq.num_prompt_tokens + len(seq.request.forced_output or ())
    return Fraction(max(0, now_ns - seq.request.arrival_ns), service)


@given(data=st.data())
def test_hrrn_serves_a_ratio_within_one_class_of_the_highest(data: st.DataObject) -> None:
    queue = bound(orders.HighestResponseRatioNext())

    def check(world: World) -> None:
        head = queue.head(world.now_ns)
        assert (head is None) == (not world.waiting)
        if head is not None:
            best = max(ratio(seq, world.now_ns) for seq in world.waiting.values())
            assert float(ratio(head, world.now_ns)) >= float(best) * 2**-0.25 - 1e-6

    play(queue, data, check)


@given(data=st.data())
def test_hrrn_with_fine_classes_is_exact(data: st.DataObject) -> None:
    queue = bound(orders.HighestResponseRatioNext(classes_per_doubling=256))

    def check(world: World) -> None:
        ranked = sorted(world.waiting.values(), key=lambda seq: (-ratio(seq, world.now_ns), seq.seq_id))
        head = queue.head(world.now_ns)
        assert not ranked or abs(ratio(head, world.now_ns) - ratio(ranked[0], world.now_ns)) < Fraction(1, 1 << 20)

    play(queue, data, check)


def test_hrrn_lets_a_short_job_pass_a_long_one_until_that_has_waited_enough() -> None:
    queue = bound(orders.HighestResponseRatioNext(), oracle=NoOracle())
    long, short = make_seq(0, 1000), make_seq(1, 10, arrival_ns=10 * NS_PER_S)
    pushed(queue, long, short)
    assert queue.head(10 * NS_PER_S) is long, "the short one has not waited yet"
    assert queue.head(12 * NS_PER_S) is short
    assert queue.rank(short, 12 * NS_PER_S) < queue.rank(long, 12 * NS_PER_S)
    queue.remove(short)
    late_short = make_seq(2, 10, arrival_ns=2000 * NS_PER_S)
    queue.push(late_short)
    assert queue.head(2010 * NS_PER_S) is long


# --- longest prefix first ---


def test_lpm_serves_the_longest_hit_first_and_ties_by_arrival() -> None:
    hits = {"r1": Hit(64, []), "r2": Hit(128, []), "r3": Hit(64, [])}
    queue = bound(orders.longest_prefix(), blocks=FakeBlocks(hits))
    assert drain(pushed(queue, *(make_seq(seq_id, 200) for seq_id in range(5)))) == [2, 1, 3, 0, 4]


def test_lpm_finds_what_the_block_manager_has_cached() -> None:
    blocks = make_blocks(num_blocks=64, block_size=4)
    done = make_seq(0, 40)
    blocks.admit(done, 40, blocks.lookup(done))
    blocks.publish(done, 40)
    blocks.free(done)
    queue = bound(orders.longest_prefix(duplicate_tokens=0), blocks=blocks)
    cold, warm, warmer = make_seq(1, 40), make_seq(2, range(10)), make_seq(3, range(30))
    assert drain(pushed(queue, cold, warm, warmer)) == [3, 2, 1]
    salted = make_seq(4, range(30), salt="other")
    assert drain(pushed(queue, cold, salted, warm)) == [2, 1, 4]


def test_lpm_is_first_come_first_served_over_its_window() -> None:
    blocks = FakeBlocks({"r2": Hit(64, [])})
    queue = bound(orders.longest_prefix(max_waiting=3), blocks=blocks)
    pushed(queue, *(make_seq(seq_id, 100) for seq_id in range(4)))
    assert queue.head(1).seq_id == 0
    assert blocks.num_lookups == 0, "beyond the window nothing is looked up"
    queue.remove(queue.head(1))
    assert queue.head(1).seq_id == 1, "the step goes on as it began"
    assert queue.head(2).seq_id == 2, "at the next step three wait"


def test_lpm_looks_up_once_a_step() -> None:
    blocks = FakeBlocks()
    queue = pushed(bound(orders.longest_prefix(), blocks=blocks), *(make_seq(seq_id, 100) for seq_id in range(5)))
    for _ in range(3):
        queue.remove(queue.head(1))
        queue.head(1)
    assert blocks.num_lookups == 5
    queue.head(2)
    assert blocks.num_lookups == 7
    queue.push(make_seq(9))
    queue.head(2)
    assert blocks.num_lookups == 10


def test_lpm_defers_duplicates_of_a_prefix_until_the_next_step() -> None:
    shared = list(range(50))
    blocks = FakeBlocks()
    queue = bound(orders.longest_prefix(), blocks=blocks)
    pushed(queue, make_seq(0, [*shared, 1]), make_seq(1, [*shared, 2]), make_seq(2, 40), make_seq(3, [*shared, 3]))
    assert queue.head(1).seq_id == 0
    queue.remove(queue.head(1))
    assert queue.head(1).seq_id == 2, "who shares what is computed in this step goes behind"
    blocks.hits = {"r1": Hit(48, []), "r3": Hit(48, [])}
    assert drain(queue, 2) == [1, 3, 2]


@pytest.mark.parametrize(
    ("num_shared", "num_cached", "salt", "order"),
    [
        (32, 0, "", [0, 2, 1]),
        (31, 0, "", [0, 1, 2]),
        (32, 32, "", [0, 2, 1]),  # hits of both; as SGLang, a hit of the very threshold still counts as little
        (64, 33, "", [0, 1, 2]),
        (32, 0, "other", [0, 1, 2]),
    ],
)
def test_lpm_thresholds_are_sglangs(num_shared: int, num_cached: int, salt: str, order: list[int]) -> None:
    shared = list(range(-num_shared, 0))
    hits = {f"r{seq_id}": Hit(num_cached, []) for seq_id in range(3)}
    queue = bound(orders.longest_prefix(), blocks=FakeBlocks(hits))
    pushed(
        queue, make_seq(0, [*shared, *range(40)]), make_seq(1, [*shared, *range(50, 90)], salt=salt), make_seq(2, 80)
    )
    assert drain(queue) == order


def test_lpm_does_not_see_tokens_that_are_still_to_come() -> None:
    first, second = make_seq(0, range(20), 30), make_seq(1, range(20), 30)  # equal outputs too, none emitted yet
    assert drain(pushed(bound(orders.longest_prefix()), first, second, make_seq(2, 9))) == [0, 1, 2]


# --- depth first ---


def test_depth_first_serves_the_heavier_subtree_first_and_a_nodes_own_ones_last() -> None:
    a, b, c = [1] * 4, [2] * 4, [3] * 4
    seqs = [
        make_seq(0, [9] * 4),
        make_seq(1, a),
        make_seq(2, [*a, *b]),
        make_seq(3, [*a, *c]),
        make_seq(4, [*a, *c, *b]),
    ]
    assert drain(pushed(bound(orders.depth_first()), *seqs)) == [4, 3, 2, 1, 0]


def walk(seqs: list[Sequence], depth: int) -> list[int]:
    """The definition, block by block."""
    own = [seq.seq_id for seq in seqs if seq.num_prompt_tokens // 4 == depth]
    children: dict[tuple[int, ...], list[Sequence]] = {}
    for seq in seqs:
        if seq.num_prompt_tokens // 4 > depth:
            children.setdefault(tuple(seq.tokens[depth * 4 : depth * 4 + 4]), []).append(seq)
    ids: list[int] = []
    for child in sorted(children.values(), key=lambda child: (-len(child), child[0].seq_id)):
        ids += walk(child, depth + 1)
    return ids + own


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=20))
def test_depth_first_is_a_walk_of_the_prefix_tree(paths: list[list[int]]) -> None:
    seqs = [make_seq(seq_id, [block for block in path for _ in range(4)]) for seq_id, path in enumerate(paths)]
    assert drain(pushed(bound(orders.depth_first()), *seqs)) == walk(seqs, 0)


def test_depth_first_through_the_cached_tree_knows_hits_alone() -> None:
    hits = {"r1": Hit(8, [5, 6]), "r2": Hit(4, [7]), "r3": Hit(8, [5, 8])}
    shared = [make_seq(seq_id, [1] * 20) for seq_id in range(4)]
    assert drain(pushed(bound(orders.depth_first(tree="cached"), blocks=FakeBlocks(hits)), *shared)) == [1, 3, 2, 0]
    assert drain(pushed(bound(orders.depth_first(tree="cached")), *shared)) == [0, 1, 2, 3]


def test_depth_first_keeps_salts_apart_and_takes_long_chains_of_prefixes() -> None:
    seqs = [make_seq(0, [1] * 8), make_seq(1, [1] * 8, salt="s"), make_seq(2, [1] * 12, salt="s")]
    assert drain(pushed(bound(orders.depth_first()), *seqs)) == [2, 1, 0]
    nested = [make_seq(seq_id, [1] * 4 * (seq_id + 1)) for seq_id in range(1500)]
    assert drain(pushed(bound(orders.depth_first(max_waiting=2000)), *nested)) == list(range(1499, -1, -1))


def test_depth_first_follows_a_sequence_that_comes_back_longer() -> None:
    queue = bound(orders.depth_first())
    seq, other, twin = make_seq(0, [1] * 4), make_seq(1, [2] * 4), make_seq(2, [1] * 4 + [0] * 4)
    pushed(queue, seq, other, twin)
    assert queue.head(1) is twin, "two share the first block; its own one comes last"
    queue.remove(seq)
    emit(seq, 4)
    queue.push_preempted(seq)
    path = [*seq.tokens[: seq.num_tokens]]
    assert path != [1] * 4
    assert drain(queue, 2) == [0, 2, 1]


# --- fair share ---


def serve(
    queue: Any, seqs: list[Sequence], num_slots: int, chunk: int, tenants: tuple[str, str]
) -> list[tuple[int, int]]:
    """Serves all in fixed slots; what each of two tenants has got after each step, while both have requests waiting."""
    pushed(queue, *seqs)
    got = dict.fromkeys(tenants, 0)
    history = []
    running: list[Sequence] = []
    for now_ns in range(1, 100_000):
        while len(running) < num_slots and (head := queue.head(now_ns)) is not None:
            queue.remove(head)
            running.append(head)
        if {seq.request.tenant for seq in queue} != {*tenants}:
            return history
        for seq in list(running):
            num_tokens = min(chunk, seq.num_tokens - seq.num_computed_tokens)
            got[str(seq.request.tenant)] += max(0, min(num_tokens, seq.num_prompt_tokens - seq.num_computed_tokens))
            seq.num_computed_tokens += num_tokens
            num_emitted = int(seq.num_computed_tokens == seq.num_tokens)
            emit(seq, num_emitted)
            got[str(seq.request.tenant)] += 2 * num_emitted
            if hasattr(queue, "served"):
                queue.served(seq, num_tokens, num_emitted, now_ns)
            if seq.num_output_tokens == len(seq.request.forced_output or ()):
                running.remove(seq)
                if hasattr(queue, "left"):
                    queue.left(seq, now_ns)
        history.append((got[tenants[0]], got[tenants[1]]))
    raise AssertionError("work is left")


def two_tenants(sizes: list[tuple[int, int, int, int]]) -> list[Sequence]:
    """The first tenant's requests all come before the second's."""
    greedy = [make_seq(seq_id, item[0], item[1], tenant="greedy") for seq_id, item in enumerate(sizes)]
    modest = [make_seq(len(sizes) + seq_id, item[2], item[3], tenant="modest") for seq_id, item in enumerate(sizes)]
    return greedy + modest


LENGTH = st.integers(1, 40)
SHORT = st.integers(1, 12)


@given(
    st.lists(st.tuples(LENGTH, LENGTH, LENGTH, LENGTH), min_size=10, max_size=40), st.integers(1, 6), st.integers(1, 50)
)
def test_vtc_keeps_two_backlogged_tenants_within_the_papers_bound(
    sizes: list[tuple[int, int, int, int]], num_slots: int, chunk: int
) -> None:
    tenants = ("greedy", "modest")
    history = [(0, 0), *serve(bound(orders.VirtualTokenCounter()), two_tenants(sizes), num_slots, chunk, tenants)]
    bound_of_counters = max(40, 2 * num_slots * 80)  # max(w_p * longest prompt, w_q * tokens in a batch)
    gaps = [first - second for first, second in history]
    assert max(gaps) - min(gaps) <= 2 * bound_of_counters


def test_fcfs_does_not() -> None:
    sizes = [(40, 40, 1, 1)] * 100
    tenants = ("greedy", "modest")
    history = serve(FCFS(), two_tenants(sizes), 2, 50, tenants)
    assert history[-1][0] - history[-1][1] > 2 * 2 * 2 * 80
    fair = serve(bound(orders.VirtualTokenCounter()), two_tenants(sizes), 2, 50, tenants)
    assert abs(fair[-1][0] - fair[-1][1]) <= 2 * 2 * 2 * 80


@given(data=st.data())
def test_vtc_serves_the_tenant_with_the_smallest_counter_then_the_oldest_head(data: st.DataObject) -> None:
    queue = bound(orders.VirtualTokenCounter())

    def check(world: World) -> None:
        heads: dict[str, Sequence] = {}
        for seq in queue:
            heads.setdefault(seq.request.tenant or "", seq)
        expected = min(
            heads.values(), key=lambda seq: (queue.counter(seq.request.tenant or ""), seq.seq_id), default=None
        )
        assert queue.head(world.now_ns) is expected

    play(queue, data, check)


@given(data=st.data())
def test_vtc_charges_each_prompt_token_once_and_each_emitted_token(data: st.DataObject) -> None:
    queue = bound(orders.VirtualTokenCounter(input_weight=3, output_weight=5))
    seqs = [make_seq(seq_id, data.draw(SHORT), data.draw(SHORT), tenant="a") for seq_id in range(2)]
    pushed(queue, *seqs)
    expected = 0
    for seq in seqs:
        queue.remove(seq)
        reached = 0
        while seq.num_output_tokens < len(seq.request.forced_output or ()):
            if data.draw(st.integers(0, 5)) == 0:
                seq.num_computed_tokens = 0
                queue.push_preempted(seq)
                queue.remove(seq)
            if seq.num_computed_tokens == 0:  # a hit
                seq.num_computed_tokens = data.draw(st.integers(0, seq.num_tokens - 1))
                reached = max(reached, min(seq.num_computed_tokens, seq.num_prompt_tokens))
            num_tokens = data.draw(st.integers(1, seq.num_tokens - seq.num_computed_tokens))
            seq.num_computed_tokens += num_tokens
            num_emitted = int(seq.num_computed_tokens == seq.num_tokens)
            new = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            expected += 3 * max(0, new - reached) + 5 * num_emitted
            reached = max(reached, new)
            emit(seq, num_emitted)
            queue.served(seq, num_tokens, num_emitted, 0)
        queue.left(seq, 0)
    assert queue.counter("a") == expected


def test_vtc_charges_a_prompt_on_admission_so_that_one_step_serves_several_tenants() -> None:
    queue = bound(orders.VirtualTokenCounter())
    seqs = [make_seq(seq_id, 10, tenant="a" if seq_id < 3 else "b") for seq_id in range(6)]
    assert drain(pushed(queue, *seqs)) == [0, 3, 1, 4, 2, 5]


def test_vtc_lifts_the_counter_of_a_tenant_that_comes_back() -> None:
    queue = bound(orders.VirtualTokenCounter())
    for seq_id in range(3):
        queue.push(make_seq(seq_id, 100, tenant="busy"))
    queue.remove(queue.head(0))
    assert queue.counter("busy") == 100
    queue.push(make_seq(3, 10, tenant="idle"))
    assert queue.counter("idle") == 100, "to the smallest of those that queue"
    queue.push(make_seq(4, 10, tenant="idle"))
    assert drain(queue) == [1, 3, 4, 2], "equal counters go by arrival"
    assert queue.counter("busy") == 300
    queue.push(make_seq(5, 1, tenant="new"))
    assert queue.counter("new") == 300, "nobody queues: to that of the tenant that left last"
    queue.push(make_seq(6, 1, tenant="busy"))
    assert queue.counter("busy") == 300, "never down"


def test_vtc_a_tenant_whose_request_is_put_back_keeps_its_lead() -> None:
    queue = bound(orders.VirtualTokenCounter())
    light, heavy, more = (
        make_seq(0, 10, tenant="light"),
        make_seq(1, 100, tenant="heavy"),
        make_seq(2, 9, tenant="heavy"),
    )
    pushed(queue, light, heavy, more)
    queue.remove(heavy)
    queue.remove(light)
    queue.push_preempted(light)
    assert (queue.counter("light"), queue.counter("heavy")) == (0, 100)
    assert queue.head(0) is light


def test_vtc_gives_back_what_an_abort_or_a_hit_saves() -> None:
    queue = bound(orders.VirtualTokenCounter())
    waiting, running = make_seq(0, 100, tenant="a"), make_seq(1, 100, tenant="a")
    pushed(queue, waiting, running)
    queue.remove(waiting)
    queue.left(waiting, 0)
    assert queue.counter("a") == 0
    queue.remove(running)
    assert queue.counter("a") == 100
    running.num_computed_tokens = 70  # 40 of them cached
    queue.served(running, 30, 0, 0)
    assert queue.counter("a") == 60
    queue.left(running, 0)
    assert queue.counter("a") == 30


def test_vtc_treats_requests_without_a_tenant_as_one_tenant_and_keeps_fcfs_inside() -> None:
    queue = bound(orders.VirtualTokenCounter())
    seqs = [make_seq(seq_id, 10) for seq_id in range(3)]
    pushed(queue, *seqs[:2])
    queue.push_preempted(seqs[2])
    assert drain(queue) == [2, 0, 1]


# --- multi-level feedback ---


def make_mlfq(**options: Any) -> Any:
    defaults = {"num_levels": 4, "quantum": 100, "output_weight": 10, "promote_after_s": 5}
    return bound(orders.MultiLevelFeedbackQueue(**{**defaults, **options}))


def run(queue: Any, seq: Sequence, num_tokens: int, now_ns: int = 0) -> None:
    """One step of one sequence that runs."""
    seq.num_computed_tokens += num_tokens
    num_emitted = int(seq.num_computed_tokens == seq.num_tokens)
    emit(seq, num_emitted)
    queue.served(seq, num_tokens, num_emitted, now_ns)


def test_mlfq_a_new_sequence_skips_to_the_level_that_covers_its_prompt() -> None:
    queue = make_mlfq()
    prompts = [1, 100, 101, 200, 201, 800, 801, 5000]
    seqs = [make_seq(seq_id, prompt) for seq_id, prompt in enumerate(prompts)]
    pushed(queue, *seqs)
    assert [queue.level(seq) for seq in seqs] == [0, 0, 1, 1, 2, 3, 3, 3]
    assert drain(pushed(make_mlfq(), *reversed(seqs))) == list(range(8))


def test_mlfq_a_used_quantum_demotes_down_to_the_last_level() -> None:
    queue = make_mlfq()
    seq = make_seq(0, 50, 400)
    pushed(queue, seq)
    queue.remove(seq)
    run(queue, seq, 50)  # 60 of 100
    levels = []
    for _ in range(300):
        run(queue, seq, 1)
        levels.append(queue.level(seq))
    assert [levels.count(level) for level in range(4)] == [3, 20, 40, 237]
    assert levels == sorted(levels)


def test_mlfq_recomputation_is_no_service() -> None:
    queue = make_mlfq()
    seq = make_seq(0, 90, 400)
    pushed(queue, seq)
    queue.remove(seq)
    run(queue, seq, 80)
    for _ in range(3):
        seq.num_computed_tokens = 0
        queue.push_preempted(seq)
        queue.remove(seq)
        run(queue, seq, 85)
    assert queue.level(seq) == 0
    run(queue, seq, 5)
    assert queue.level(seq) == 1, "90 prompt tokens and one token of weight 10"


def test_mlfq_promotes_the_starved_to_the_top_for_a_quantum_beyond_their_prompt() -> None:
    queue = make_mlfq()
    starved, other = make_seq(0, 500, 100), make_seq(1, 10, arrival_ns=4 * NS_PER_S)
    pushed(queue, other, starved)
    assert queue.head(5 * NS_PER_S - 1) is other
    assert queue.head(5 * NS_PER_S) is starved, "at the top it is the older one"
    queue.remove(starved)
    run(queue, starved, 300, 5 * NS_PER_S)
    run(queue, starved, 200, 5 * NS_PER_S)
    for _ in range(8):
        run(queue, starved, 1, 5 * NS_PER_S)
    assert queue.level(starved) == 0
    run(queue, starved, 1, 5 * NS_PER_S)
    assert queue.level(starved) == 1


def test_mlfq_waiting_counts_from_the_last_service() -> None:
    queue = make_mlfq()
    seq, top = make_seq(0, 500, 100), make_seq(1, 10)
    pushed(queue, seq)
    queue.remove(seq)
    run(queue, seq, 100, 4 * NS_PER_S)
    seq.num_computed_tokens = 0
    queue.push_preempted(seq)
    queue.push(top)
    assert queue.head(6 * NS_PER_S) is top
    assert queue.head(9 * NS_PER_S) is seq
    assert bound(make_mlfq(promote_after_s=None)).head(0) is None


def test_mlfq_a_running_sequence_of_a_lower_level_yields() -> None:
    queue = make_mlfq()
    running = [make_seq(0, 150), make_seq(1, 350), make_seq(2, 350), make_seq(3, 10)]
    pushed(queue, *running)
    for seq in running:
        queue.remove(seq)
    assert queue.yields(running, 0) is None
    same, higher = make_seq(4, 350), make_seq(5, 150)
    queue.push(same)
    assert queue.yields(running, 0) is None
    queue.push(higher)
    assert queue.yields(running, 0) is running[2]
    assert sorted(running, key=lambda seq: queue.rank(seq, 0)) == [running[3], running[0], running[1], running[2]]


@given(data=st.data())
def test_mlfq_serves_the_highest_level_and_there_the_oldest(data: st.DataObject) -> None:
    queue = make_mlfq(quantum=16, promote_after_s=4)

    def check(world: World) -> None:
        head = queue.head(world.now_ns)
        ranked = sorted(world.waiting.values(), key=lambda seq: (queue.level(seq), seq.seq_id))
        assert head is (ranked[0] if ranked else None)
        for seq in world.waiting.values():
            assert (
                queue.level(seq) == 0
                or world.now_ns - seq.request.arrival_ns < 4 * NS_PER_S
                or seq.num_output_tokens
                or (seq.request.request_id in queue._served_ns)
            ), "a starved sequence is not at the top"

    world = play(queue, data, check)
    for seq in [*world.waiting.values(), *world.running.values()]:
        world.abort(seq)
    leftovers = (queue._levels, queue._used, queue._served_ns, queue._meter._reached, queue._starving)
    assert [len(part) for part in leftovers] == [0] * 5, "what left is forgotten"


# --- what holds for all ---


ALL: dict[str, Callable[[], Any]] = {
    **{name: make for name, (make, _) in KEYED.items()},
    "random": orders.random_order,
    "hrrn": orders.HighestResponseRatioNext,
    "lpm": orders.longest_prefix,
    "dfs": orders.depth_first,
    "vtc": orders.VirtualTokenCounter,
    "mlfq": orders.MultiLevelFeedbackQueue,
}


@pytest.mark.parametrize("name", [name for name in ALL if name not in KEYED])
@given(data=st.data())
def test_every_order_keeps_every_sequence_through_any_calls(name: str, data: st.DataObject) -> None:
    queue = bound(ALL[name]())

    def check(world: World) -> None:
        head = queue.head(world.now_ns)
        assert head is queue.head(world.now_ns), "asking changes nothing"
        assert (head is None) == (not world.waiting)
        assert head is None or head.seq_id in world.waiting

    world = play(queue, data, check)
    assert sorted(drain(queue, world.now_ns)) == sorted(world.waiting)


SCRIPT = """
from tests.testbed.test_queue_orders import ALL, bound, drain, make_seq, pushed
for name, make in ALL.items():
    seqs = [
        make_seq(i, [j % 3 for j in range(40 + i % 7)] if i % 2 else 40 + i * 7 % 11, 1 + i * 5 % 13,
                 tenant=f"t{i % 5}", priority=i % 4, deadline_ns=i * 37 % 50 or None, arrival_ns=i)
        for i in range(60)
    ]
    print(name, drain(pushed(bound(make()), *seqs), 10**12))
"""


def test_every_order_is_the_same_whatever_the_hash_seed() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == len(ALL)


def test_the_heap_forgets_what_was_removed() -> None:
    heap: LazyHeap[int, str] = LazyHeap()
    for name in range(10):
        heap.put(name, (1000 + name,), "stays")
    for name in range(10, 5000):
        heap.put(name, (name % 7,), "goes")
        heap.remove(name)
        heap.put(0, (name,), "moves")
        assert len(heap._heap) <= 2 * len(heap) + MIN_STALE
    assert len(heap) == 10
    assert heap.first_rank() == (1001,)
    assert list(heap) == ["stays"] * 9 + ["moves"]
    assert 3 in heap
    assert 4999 not in heap
    with pytest.raises(KeyError):
        heap.remove(4999)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: orders.priority(ageing_per_s=-1), r"ageing_per_s is -1; it must be a finite number of at least 0"),
        (lambda: orders.priority(ageing_per_s=float("inf")), "ageing_per_s is inf"),
        (lambda: orders.shortest_job("size"), "by is 'size'; choose one of prompt, output, total, remaining"),
        (lambda: orders.longest_job("size"), "by is 'size'"),
        (lambda: orders.random_order(seed=-1), "seed is -1; it must be a whole number of at least 0"),
        (lambda: orders.HighestResponseRatioNext(classes_per_doubling=0), "classes_per_doubling is 0"),
        (lambda: orders.longest_prefix(max_waiting=-1), "max_waiting is -1"),
        (lambda: orders.longest_prefix(duplicate_tokens=1.5), "duplicate_tokens is 1.5"),
        (lambda: orders.depth_first(tree="radix"), "tree is 'radix'; choose one of waiting, cached"),
        (lambda: orders.VirtualTokenCounter(output_weight=-2), "output_weight is -2"),
        (lambda: orders.MultiLevelFeedbackQueue(num_levels=0), "num_levels is 0"),
        (lambda: orders.MultiLevelFeedbackQueue(ratio=1), "ratio is 1"),
        (lambda: orders.MultiLevelFeedbackQueue(promote_after_s=-1), "promote_after_s is -1"),
    ],
)
def test_bad_parameters_are_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^scheduler\.queue_order\.{message}") as caught:
        make()
    assert "\n" not in str(caught.value)
