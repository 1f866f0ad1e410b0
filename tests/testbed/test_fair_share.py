"""Fair share by tenants' counters (VTC): the paper's bound, what is charged, and when."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import testbed.policies.orders as orders
from testbed.core.sequence import Sequence
from testbed.policies.queue_order import FCFS
from tests.testbed.admission_kit import forked
from tests.testbed.admission_kit import make_seq as group_seq
from tests.testbed.orders_kit import World, bound, drain, emit, make_seq, play, pushed

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


def test_vtc_forgets_a_request_with_its_last_sequence() -> None:
    queue = bound(orders.VirtualTokenCounter())
    first, second = forked(*(group_seq(i, 10, num_seqs=2, request_id="g", tenant="a") for i in range(2)))
    queue.remove(pushed(queue, first).head(0))
    first.num_computed_tokens = 10
    emit(first, 1)
    queue.served(first, 10, 1, 0)
    queue.served(second, 0, 1, 0)
    assert queue.counter("a") == 10 + 2 * 2
    for seq in (first, second):  # preempted, they are sequences of their own
        seq.restart()
        queue.push_preempted(seq)
    queue.remove(second)
    queue.left(second, 0)
    second.group.members.remove(second)
    queue.remove(first)
    assert queue.counter("a") == 14, "the prompt has been computed"
    queue.left(first, 0)
    queue.remove(pushed(queue, group_seq(2, 10, request_id="g", tenant="a")).head(0))
    assert queue.counter("a") == 24, "another request of that name"


def test_vtc_charges_a_prompt_whose_token_comes_after_its_preemption() -> None:
    """As under asynchronous scheduling: the step was in flight when the next one preempted the sequence."""
    queue = bound(orders.VirtualTokenCounter())
    seq = make_seq(0, 100, 1, tenant="a")
    pushed(queue, seq)
    queue.remove(seq)
    emit(seq, 1)
    seq.restart()
    queue.served(seq, 100, 1, 0)
    queue.left(seq, 0)
    assert queue.counter("a") == 102
    seq = make_seq(1, 100, 1, tenant="b")
    queue.remove(pushed(queue, seq).head(0))
    seq.restart()
    queue.push_preempted(seq)
    queue.served(seq, 50, 0, 0)  # a chunk, which will be computed again
    assert queue.counter("b") == 102, "of the tenant that left before"


def test_vtc_treats_requests_without_a_tenant_as_one_tenant_and_keeps_fcfs_inside() -> None:
    queue = bound(orders.VirtualTokenCounter())
    seqs = [make_seq(seq_id, 10) for seq_id in range(3)]
    pushed(queue, *seqs[:2])
    queue.push_preempted(seqs[2])
    assert drain(queue) == [2, 0, 1]
