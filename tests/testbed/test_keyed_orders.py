"""Queue orders by a key, and by response ratio, against a plain sort of what waits."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import testbed.policies.orders as orders
from testbed.core.sequence import Sequence
from testbed.errors import ConfigError
from testbed.policies.oracle import Noisy, NoOracle
from tests.testbed.orders_kit import KEYED, NS_PER_S, World, bound, drain, emit, make_seq, play, pushed


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
    running = [make_seq(0, deadline_ns=9), make_seq(1), make_seq(2, deadline_ns=7)]
    queue = pushed(bound(orders.earliest_deadline(preemptive=True)), make_seq(10))
    assert queue.yields(running, 0) is None, "neither has a deadline"
    assert pushed(queue, make_seq(11, deadline_ns=8)).yields(running, 0) is running[1]


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


def test_what_is_left_counts_a_token_in_flight_once() -> None:
    queue = bound(orders.shortest_remaining(preemptive=True))
    ahead, committed = make_seq(0, 40, 100), make_seq(1, 40, 100)
    for seq in (ahead, committed):
        seq.num_computed_tokens = 40
        emit(seq)
    assert ahead.advance_ahead(1)
    committed.advance(1)
    emit(committed)
    assert queue.rank(ahead, 0)[0] == queue.rank(committed, 0)[0] == 98 + 1


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
    assert queue.rank(late_short, 2001 * NS_PER_S)[0] == -(NS_PER_S << orders.response_ratio.RATIO_BITS) // 10


@pytest.mark.parametrize("key", [0, None, "a", [1], (0.5, 1), (float("nan"),), (1, "a"), (None, 0), (Fraction(2), 0)])
def test_a_key_that_is_no_tuple_of_whole_numbers_is_refused_in_either_build(key: Any) -> None:
    queue = orders.KeyedQueue(lambda seq: key)
    with pytest.raises(TypeError, match=r"the key of a KeyedQueue is .*; it must be a tuple of whole numbers"):
        queue.push(make_seq(0))
    assert len(queue) == 0


def test_what_is_no_whole_number_in_a_key_is_named_with_the_class_of_the_queue() -> None:
    class ByWeight(orders.KeyedQueue):
        """A user's own."""

    queue = ByWeight(lambda seq: (seq.num_prompt_tokens * 0.5, seq.seq_id))
    with pytest.raises(TypeError, match=r"the key of a ByWeight is \(4\.0, 0\); .*: 'float' object cannot be"):
        queue.push(make_seq(0, 8))


def test_whole_numbers_of_numpy_make_a_key() -> None:
    queue = orders.KeyedQueue(lambda seq: (np.int64(-seq.seq_id),))
    assert drain(pushed(queue, make_seq(0), make_seq(1))) == [1, 0]
    assert type(queue.rank(make_seq(0), 0)[0]) is int
