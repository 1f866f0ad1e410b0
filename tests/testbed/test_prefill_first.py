"""prefill_first, step by step: a step is all prompts, whole, or all decodes."""

from __future__ import annotations

import pytest

import testbed.policies.orders as orders
from testbed.core.outcome import FinishReason
from testbed.core.plan import BlockedBy
from testbed.core.request import SamplingParams
from testbed.policies.compositions.prefill_first import PrefillFirst
from tests.testbed.core_kit import TakesTheFirst, make_limits, make_request, make_scheduler
from tests.testbed.stepping import add, cached, commit, drain, ignored, preempted, rows, scheduled, step, steps


def test_prompts_come_before_decodes_and_both_stay_apart() -> None:
    scheduler = make_scheduler("prefill_first", limits=make_limits(seqs=2, budget=10))
    add(scheduler, make_request("a", 4, 3), make_request("b", 6, 2), make_request("c", 3, 1))
    seen = [
        (scheduled(plan), plan.blocked_by, [item.request.request_id for item in finished])
        for plan, finished in steps(scheduler)
    ]
    assert seen == [
        ({"a": 4, "b": 6}, BlockedBy.MAX_NUM_SEQS, []),
        ({"a": 1, "b": 1}, BlockedBy.MAX_NUM_SEQS, ["b"]),
        ({"c": 3}, None, ["c"]),  # a place is free: the prompt goes first, a waits
        ({"a": 1}, None, ["a"]),
    ]


def test_a_prompt_waits_for_the_token_budget_and_is_not_split() -> None:
    scheduler = make_scheduler("prefill_first", limits=make_limits(budget=10))
    add(scheduler, make_request("a", 4, 2), make_request("b", 7, 2), make_request("c", 3, 2))
    plan, _ = step(scheduler)
    assert (scheduled(plan), plan.blocked_by) == ({"a": 4}, BlockedBy.TOKEN_BUDGET)  # c would fit; b is first
    assert scheduled(step(scheduler)[0]) == {"b": 7, "c": 3}
    assert scheduled(step(scheduler)[0]) == {"a": 1, "b": 1, "c": 1}


def test_a_preempted_sequence_that_outgrew_the_budget_is_a_batch_of_its_own() -> None:
    scheduler = make_scheduler("prefill_first", queue=orders.shortest_job(), limits=make_limits(budget=8))
    add(scheduler, make_request("a", 6, 9))
    for _ in range(4):
        step(scheduler)
    scheduler.reset_prefixes()
    add(scheduler, make_request("b", 2, 9), make_request("c", 7, 9))
    assert [scheduled(step(scheduler)[0]) for _ in range(3)] == [{"b": 2}, {"a": 10}, {"c": 7}]


def test_the_budget_counts_computed_tokens_only() -> None:
    scheduler = make_scheduler("prefill_first", block_size=4, limits=make_limits(budget=9))
    add(scheduler, make_request("a", range(9), 1))
    drain(scheduler)
    add(scheduler, make_request("b", range(12), 1), make_request("c", 5, 1))
    plan, _ = step(scheduler)
    assert cached(plan) == {"b": 8, "c": 0}
    assert scheduled(plan) == {"b": 4, "c": 5}


def test_a_prompt_over_the_budget_is_ignored_and_the_next_is_taken() -> None:
    scheduler = make_scheduler("prefill_first", limits=make_limits(budget=10))
    add(scheduler, make_request("long", 11, 1), make_request("a", 10, 1))
    plan, finished = step(scheduler)
    assert (ignored(plan), scheduled(plan)) == (["long"], {"a": 10})
    assert [(item.request.request_id, item.reason) for item in finished] == [
        ("long", FinishReason.IGNORED),
        ("a", FinishReason.LENGTH),
    ]
    assert "11 tokens to prefill exceed max_num_batched_tokens (10)" in finished[0].message


def test_the_budget_limits_prompts_and_not_decodes() -> None:
    scheduler = make_scheduler("prefill_first", limits=make_limits(budget=2))
    add(scheduler, *(make_request(name, 1, 3) for name in "abc"))
    seen = [scheduled(step(scheduler)[0]) for _ in range(4)]
    assert seen == [{"a": 1, "b": 1}, {"c": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}]
    assert not scheduler.has_work


def test_the_last_admitted_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler("prefill_first", num_blocks=4, block_size=2)
    add(scheduler, make_request("a", 4, 5), make_request("b", 4, 2))
    assert scheduled(step(scheduler)[0]) == {"a": 4, "b": 4}
    add(scheduler, make_request("c", 2, 1))
    # position 4 of a needs a fifth block; c (1 block) waits for blocks, and from now on behind b
    plan, _ = step(scheduler)
    assert (scheduled(plan), preempted(plan), plan.blocked_by) == ({"a": 1}, ["b"], BlockedBy.KV_BLOCKS)
    assert plan.preempted[0].num_computed_tokens == 4
    assert scheduler.free_gpu_blocks == 1
    for free in (1, 0, 0):  # b needs 3 blocks for its 4 + 1 tokens, and nobody overtakes it
        plan, _ = step(scheduler)
        assert (scheduled(plan), plan.blocked_by) == ({"a": 1}, BlockedBy.KV_BLOCKS)
        assert scheduler.free_gpu_blocks == free
    plan, finished = step(scheduler)
    assert scheduled(plan) == {"b": 5, "c": 2}
    assert [(item.request_id, item.is_resumed) for item in plan.admitted] == [("b", True), ("c", False)]
    assert [(item.request.request_id, item.num_output_tokens) for item in finished] == [("b", 2), ("c", 1)]


def test_a_step_that_preempts_with_an_empty_queue_says_why_the_victim_waits() -> None:
    scheduler = make_scheduler("prefill_first", num_blocks=4, block_size=2)
    add(scheduler, make_request("a", 4, 5), make_request("b", 4, 5))
    assert step(scheduler)[0].blocked_by is None
    plan, _ = step(scheduler)
    assert (preempted(plan), plan.blocked_by) == (["b"], BlockedBy.PREEMPTION)


def test_a_resumed_sequence_that_outgrew_the_budget_is_admitted_alone() -> None:
    """Prompts are never split, so tokens that were emitted are computed again in one step, over the budget."""
    scheduler = make_scheduler("prefill_first", num_blocks=5, block_size=2, caching=False, limits=make_limits(budget=5))
    add(scheduler, make_request("a", 2, 8), make_request("b", 3, 8))
    finished = drain(scheduler)
    assert [(item.request.request_id, item.reason, item.num_output_tokens) for item in finished] == [
        ("a", FinishReason.LENGTH, 8),
        ("b", FinishReason.LENGTH, 8),
    ]


def test_a_victim_that_was_scheduled_is_no_longer_in_the_step() -> None:
    scheduler = make_scheduler(
        "prefill_first", num_blocks=3, block_size=2, limits=make_limits(budget=2), victims=TakesTheFirst()
    )
    add(scheduler, make_request("a", 1, 5), make_request("b", 2, 5), make_request("c", 1, 5))
    assert [scheduled(step(scheduler)[0]) for _ in range(3)] == [{"a": 1}, {"b": 2}, {"c": 1}]
    plan, _ = step(scheduler)  # a has a slot left, b needs a block and takes a's, c has a slot left
    assert (scheduled(plan), preempted(plan)) == ({"b": 1, "c": 1}, ["a"])


def test_decodes_come_between_steps_of_prompts_if_wanted() -> None:
    for decodes_between, order in ((True, "p d p d p d"), (False, "p p p d d d")):
        scheduler = make_scheduler(PrefillFirst(decodes_between=decodes_between), limits=make_limits(budget=16))
        add(scheduler, make_request("first", 16, 9))
        kinds, causes = [], []
        for number in range(6):
            if number == 1:
                add(scheduler, make_request("second", 16, 9), make_request("third", 16, 9))
            plan, _ = step(scheduler)
            kinds.append("p" if plan.admitted else "d")
            causes.append(plan.blocked_by)
        assert " ".join(kinds) == order
        assert (BlockedBy.BATCH in causes) is decodes_between
    ended = make_scheduler(PrefillFirst(decodes_between=True), limits=make_limits(budget=16))
    add(ended, make_request("one", 16, 1), make_request("next", 16, 1))
    assert [scheduled(step(ended)[0]) for _ in range(2)] == [{"one": 16}, {"next": 16}], "none could decode"


def test_decodes_that_wait_for_a_prompt_in_flight_still_come_before_other_prompts() -> None:
    limits = make_limits(budget=16, plans=2)
    scheduler = make_scheduler(PrefillFirst(decodes_between=True), limits=limits)
    pair = SamplingParams(n=2, temperature=1.0)  # forks once its first tokens are sampled
    add(scheduler, *[make_request(name, 16, 9, sampling=pair) for name in ("first", "second")])
    assert scheduled(scheduler.plan(0)) == {"first": 16}
    assert scheduler.plan(0).is_empty
    commit(scheduler)
    plan = scheduler.plan(0)
    assert (len(plan.admitted), len(rows(plan)), plan.blocked_by) == (0, 2, BlockedBy.BATCH)


@pytest.mark.parametrize(("sorts_by_arrival", "order"), [(True, "ab"), (False, "ba")])
def test_running_sequences_decode_by_arrival_if_wanted(sorts_by_arrival: bool, order: str) -> None:
    scheduler = make_scheduler(PrefillFirst(sorts_by_arrival=sorts_by_arrival), queue=orders.lcfs())
    add(scheduler, make_request("a", 4, 3), make_request("b", 4, 3))
    step(scheduler)
    assert "".join(scheduled(step(scheduler)[0])) == order
