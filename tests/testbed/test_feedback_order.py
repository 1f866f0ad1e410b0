"""Multi-level feedback: levels, quanta, promotion of the starved."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import testbed.policies.orders as orders
from testbed.core.outcome import Outcome
from testbed.core.sampling import SamplingParams
from testbed.core.sequence import Sequence
from tests.testbed.core_kit import make_request, make_scheduler
from tests.testbed.orders_kit import NS_PER_S, World, bound, drain, emit, make_seq, play, pushed
from tests.testbed.stepping import step_with

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


def test_mlfq_a_request_keeps_its_level_until_its_last_member_has_ended() -> None:
    queue = make_mlfq(quantum=8, promote_after_s=None)
    scheduler = make_scheduler(queue=queue)
    scheduler.add(make_request("a", 4, None, sampling=SamplingParams(max_tokens=9, n=2, stop_token_ids=(9,))))
    step_with(scheduler, Outcome(0, (1,), forks=(1,)))
    first, second = scheduler.unfinished()
    assert (queue.level(first), queue.level(second)) == (1, 1)
    step_with(scheduler, Outcome(0, (9,)), Outcome(1, (1,)))
    assert scheduler.unfinished() == [second]
    assert queue.level(second) == 2
    step_with(scheduler, Outcome(1, (9,)))
    assert not queue._levels


def test_mlfq_moves_a_request_with_those_of_its_sequences_that_wait() -> None:
    queue = make_mlfq()
    group, first, other = make_seq(0, 50, sampling=SamplingParams(n=2)), make_seq(1, 60), make_seq(2, 90)
    sibling = group.fork(3, 0)
    assert group.group is not None
    group.group.members.append(sibling)
    pushed(queue, group, first, other)
    queue.push_preempted(sibling)
    queue.remove(group)
    queue.served(group, 0, 10, 0)  # all of the quantum
    assert queue.level(sibling) == 1
    assert [seq.seq_id for seq in queue] == [1, 2, 3]
    assert queue.head(5 * NS_PER_S) is first
    assert queue.level(sibling) == 0
    assert drain(queue, 5 * NS_PER_S) == [1, 2, 3]


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
    leftovers = (queue._levels, queue._service, queue._served_ns, queue._meter._reached, queue._starving)
    assert [len(part) for part in leftovers] == [0] * 5, "what left is forgotten"
