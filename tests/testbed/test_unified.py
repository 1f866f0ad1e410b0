"""unified, step by step: the budget is dealt out in queue order; computed tokens catch up with known ones."""

from __future__ import annotations

import pytest

from testbed.blocks.config import KVRules
from testbed.core.plan import BlockedBy
from testbed.core.request import SamplingParams
from testbed.policies.compositions.unified import Unified
from testbed.policies.victim import LowestPriority
from tests.testbed.core_kit import make_limits, make_request, make_scheduler
from tests.testbed.stepping import add, cached, drain, in_flight, preempted, rows, scheduled, step

CHUNK = KVRules("chunk")


def test_the_budget_is_dealt_out_in_order_and_splits_a_prompt() -> None:
    scheduler = make_scheduler("unified", rules=CHUNK, limits=make_limits(budget=10))
    add(scheduler, make_request("a", 4, 9), make_request("b", 13, 2), make_request("c", 5, 1))
    plan, _ = step(scheduler)
    assert (scheduled(plan), plan.blocked_by) == ({"a": 4, "b": 6}, BlockedBy.TOKEN_BUDGET)
    plan, _ = step(scheduler)
    assert (scheduled(plan), plan.blocked_by) == ({"a": 1, "b": 7, "c": 2}, None)
    plan, finished = step(scheduler)
    assert scheduled(plan) == {"a": 1, "b": 1, "c": 3}
    assert [item.request.request_id for item in finished] == ["b", "c"]


def test_a_long_prefill_is_cut_at_the_threshold_while_others_are_there() -> None:
    scheduler = make_scheduler("unified", rules=CHUNK, limits=make_limits(budget=20, threshold=4))
    add(scheduler, make_request("a", 10, 2))
    assert scheduled(step(scheduler)[0]) == {"a": 10}, "alone, it is not cut"
    add(scheduler, make_request("b", 10, 1))
    assert scheduled(step(scheduler)[0]) == {"a": 1, "b": 4}  # a ends with it
    assert scheduled(step(scheduler)[0]) == {"b": 6}, "alone again"


def test_a_prompt_is_split_over_as_many_steps_as_a_budget_of_one_asks_for() -> None:
    scheduler = make_scheduler("unified", limits=make_limits(budget=1))
    add(scheduler, make_request("a", 3, 2), make_request("b", 1, 1))
    seen = [scheduled(step(scheduler)[0]) for _ in range(5)]
    assert seen == [{"a": 1}] * 4 + [{"b": 1}]
    assert not scheduler.has_work


def test_one_sequence_at_a_time() -> None:
    scheduler = make_scheduler("unified", limits=make_limits(seqs=1))
    add(scheduler, make_request("a", 3, 2), make_request("b", 3, 1))
    plans = [step(scheduler)[0] for _ in range(3)]
    assert [scheduled(plan) for plan in plans] == [{"a": 3}, {"a": 1}, {"b": 3}]
    assert [plan.blocked_by for plan in plans] == [BlockedBy.MAX_NUM_SEQS, BlockedBy.MAX_NUM_SEQS, None]


def test_preemption_takes_the_last_admitted_and_admits_nobody_in_its_step() -> None:
    scheduler = make_scheduler("unified", num_blocks=6, block_size=2, rules=CHUNK)
    add(scheduler, make_request("a", 4, 7), make_request("b", 4, 7))
    assert scheduled(step(scheduler)[0]) == {"a": 4, "b": 4}
    for _ in range(2):
        assert scheduled(step(scheduler)[0]) == {"a": 1, "b": 1}  # positions 4 and 5: 3 blocks each
    assert scheduler.free_gpu_blocks == 0
    add(scheduler, make_request("c", 2, 1))
    plan, _ = step(scheduler)  # position 6 of a
    assert (scheduled(plan), preempted(plan), plan.blocked_by) == ({"a": 1}, ["b"], BlockedBy.PREEMPTION)
    assert plan.preempted[0].num_computed_tokens == 6
    assert scheduler.free_gpu_blocks == 2
    for free in (2, 1, 1):
        # b knows 7 tokens, hits at most 4, and needs more blocks than are left; c, behind it, waits too
        plan, finished = step(scheduler)
        assert (scheduled(plan), plan.blocked_by) == ({"a": 1}, BlockedBy.KV_BLOCKS)
        assert scheduler.free_gpu_blocks == free
    assert [item.request.request_id for item in finished] == ["a"]
    plan, _ = step(scheduler)
    assert cached(plan) == {"b": 2, "c": 0}  # a took b's deepest blocks, but not its first
    assert scheduled(plan) == {"b": 5, "c": 2}
    assert [item.is_resumed for item in plan.admitted] == [True, False]


def test_a_sequence_that_finds_no_block_even_after_the_others_goes_itself() -> None:
    scheduler = make_scheduler("unified", num_blocks=5, block_size=2, rules=CHUNK)
    add(scheduler, make_request("a", 4, 3), make_request("b", 4, 3))
    step(scheduler)
    plan, _ = step(scheduler)  # position 4: a takes the last block
    assert (scheduled(plan), preempted(plan)) == ({"a": 1}, ["b"])
    assert [(item.request.request_id, item.num_output_tokens) for item in drain(scheduler)] == [("a", 3), ("b", 3)]


@pytest.mark.parametrize("ends_round", [True, False])
def test_those_behind_the_victim_of_another_get_their_tokens(ends_round: bool) -> None:
    scheduler = make_scheduler(
        Unified(own_victim_ends_round=ends_round), num_blocks=3, block_size=4, caching=False, victims=LowestPriority(),
    )  # fmt: skip
    for name, prompt, priority in (("a", 4, 0), ("b", 4, 9), ("c", 3, 1)):
        add(scheduler, make_request(name, prompt, 9, priority=priority))
    step(scheduler)
    plan, _ = step(scheduler)
    assert (preempted(plan), scheduled(plan)) == (["b"], {"a": 1, "c": 1})


def test_emitted_tokens_are_computed_again_after_a_preemption_and_emitted_once() -> None:
    scheduler = make_scheduler("unified", num_blocks=5, block_size=2, rules=CHUNK, caching=False)
    add(scheduler, make_request("a", 4, [11, 12, 13]), make_request("b", 4, [21, 22, 23]))
    finished = drain(scheduler)
    assert [list(item.output_token_ids) for item in finished] == [[11, 12, 13], [21, 22, 23]]


def test_a_row_says_what_a_device_needs() -> None:
    scheduler = make_scheduler("unified", block_size=4, limits=make_limits(budget=6))
    add(scheduler, make_request("a", range(10, 20), [7, 8]))
    with in_flight(scheduler) as plan:
        (row,) = plan.scheduled
        assert (row.seq_id, row.start, row.num_tokens, list(row.tokens)) == (0, 0, 6, [10, 11, 12, 13, 14, 15])
        assert (row.samples, row.forced, list(row.block_table)) == (False, True, [0, 1, 2])
    with in_flight(scheduler) as plan:
        (row,) = plan.scheduled
        assert (row.start, list(row.tokens), row.samples) == (6, [16, 17, 18, 19], True)
    with in_flight(scheduler) as plan:
        (row,) = plan.scheduled
        assert (row.start, list(row.tokens), row.samples) == (10, [7], True)


def test_a_group_behind_an_unfinished_prefill_is_computed_as_one() -> None:
    """It computes all of its members wherever it stands in running order."""
    scheduler = make_scheduler("unified", rules=CHUNK, limits=make_limits(budget=8, threshold=2))
    add(scheduler, make_request("long", 9, 1), make_request("g", 2, 4, sampling=SamplingParams(n=3)))
    assert rows(step(scheduler)[0]) == [("long", 2), ("g", 2)]
    for _ in range(3):
        assert rows(step(scheduler)[0]) == [("long", 2), ("g", 1), ("g", 1), ("g", 1)]
    assert rows(step(scheduler)[0]) == [("long", 1)]


def test_a_group_for_which_the_budget_left_is_too_small_is_passed_over_and_others_go_on() -> None:
    scheduler = make_scheduler("unified", rules=CHUNK, limits=make_limits(budget=5, threshold=4))
    add(scheduler, make_request("g", 1, 9, sampling=SamplingParams(n=3)))
    step(scheduler)
    add(scheduler, make_request("a", 12, 9), make_request("b", 1, 9))
    # the group stands first: 3 of 5 for it, and 2 for a
    assert rows(step(scheduler)[0]) == [("g", 1), ("g", 1), ("g", 1), ("a", 2)]
    scheduler = make_scheduler("unified", rules=CHUNK, limits=make_limits(budget=5, threshold=4))
    add(scheduler, make_request("a", 14, 9), make_request("g", 1, 9, sampling=SamplingParams(n=3)))
    assert rows(step(scheduler)[0]) == [("a", 4), ("g", 1)]
    add(scheduler, make_request("b", 1, 9))
    # a has 4 of 5, and 1 is too few for the group's 3: b gets it
    assert rows(step(scheduler)[0]) == [("a", 4), ("b", 1)]
    assert rows(step(scheduler)[0]) == [("a", 4), ("b", 1)], "running ones behind the group too"
    plan, _ = step(scheduler)  # a's last 2 leave 3: no less than the group needs
    assert rows(plan) == [("a", 2), ("g", 1), ("g", 1), ("g", 1)]
    assert plan.blocked_by is None
    assert rows(step(scheduler)[0]) == [("a", 1), ("g", 1), ("g", 1), ("g", 1), ("b", 1)]


def test_a_group_that_is_passed_over_is_computed_as_soon_as_the_budget_allows() -> None:
    """Nothing starves by it: prompts before it end."""
    scheduler = make_scheduler("unified", rules=CHUNK, limits=make_limits(budget=4))
    add(scheduler, make_request("g", 3, 5, sampling=SamplingParams(n=4)), *(make_request(c, 7, 2) for c in "abc"))
    finished = drain(scheduler)
    assert {item.request.request_id: item.num_output_tokens for item in finished} == {"g": 20, "a": 2, "b": 2, "c": 2}
