"""decode_first, step by step: decodes, then unfinished prefills, then new ones in chunks, under one budget."""

from __future__ import annotations

from testbed.blocks.config import KVRules
from testbed.plan import BlockedBy, PrefillChunk
from tests.testbed.core_kit import (
    add,
    make_limits,
    make_request,
    make_scheduler,
    preempted,
    scheduled,
    step,
)

CHUNK = KVRules("chunk")


def test_decodes_first_then_the_unfinished_prefill_then_a_new_one() -> None:
    scheduler = make_scheduler("decode_first", limits=make_limits(budget=8))
    add(scheduler, make_request("a", 4, 5))
    assert scheduled(step(scheduler)[0]) == {"a": 4}
    add(scheduler, make_request("b", 10, 2), make_request("c", 3, 1))
    plan, _ = step(scheduler)
    assert list(scheduled(plan).items()) == [("a", 1), ("b", 7)]
    assert plan.blocked_by is BlockedBy.TOKEN_BUDGET
    assert (plan.shape.num_decodes, plan.shape.decode_context_tokens) == (1, 5)
    assert plan.shape.prefills == (PrefillChunk(0, 7),)
    assert plan.shape.num_samples == 1
    plan, finished = step(scheduler)
    assert list(scheduled(plan).items()) == [("a", 1), ("b", 3), ("c", 3)]
    assert plan.shape.prefills == (PrefillChunk(7, 3), PrefillChunk(0, 3))
    assert [item.request.request_id for item in finished] == ["c"]
    plan, finished = step(scheduler)
    assert list(scheduled(plan).items()) == [("a", 1), ("b", 1)]
    assert [item.request.request_id for item in finished] == ["b"]


def test_a_decode_admitted_later_comes_before_an_older_prefill() -> None:
    scheduler = make_scheduler("decode_first", limits=make_limits(budget=16, threshold=4))
    add(scheduler, make_request("a", 10, 1), make_request("b", 3, 5))
    assert list(scheduled(step(scheduler)[0]).items()) == [("a", 4), ("b", 3)]
    assert list(scheduled(step(scheduler)[0]).items()) == [("b", 1), ("a", 4)]


def test_only_so_many_prompts_are_part_way_through() -> None:
    scheduler = make_scheduler("decode_first", limits=make_limits(budget=16, threshold=4, partial=1))
    add(scheduler, make_request("b", 10, 9), make_request("c", 3, 9), make_request("d", 10, 9))
    plan, _ = step(scheduler)
    assert (scheduled(plan), plan.blocked_by) == ({"b": 4, "c": 3}, BlockedBy.PARTIAL_PREFILLS)
    plan, _ = step(scheduler)
    assert (scheduled(plan), plan.blocked_by) == ({"c": 1, "b": 4}, BlockedBy.PARTIAL_PREFILLS)
    plan, _ = step(scheduler)  # b is through: d may begin in the same step
    assert (scheduled(plan), plan.blocked_by) == ({"c": 1, "b": 2, "d": 4}, None)


def test_partial_prefills_share_the_budget_evenly() -> None:
    scheduler = make_scheduler("decode_first", limits=make_limits(budget=8, partial=2))
    add(scheduler, make_request("a", 10, 1), make_request("b", 10, 1))
    assert [scheduled(step(scheduler)[0]) for _ in range(3)] == [{"a": 4, "b": 4}] * 2 + [{"a": 2, "b": 2}]
    assert not scheduler.has_work


def test_as_many_decodes_as_budget_leave_nothing_for_a_prompt_until_one_ends() -> None:
    scheduler = make_scheduler("decode_first", limits=make_limits(budget=2))
    add(scheduler, make_request("a", 1, 3), make_request("b", 1, 4), make_request("c", 2, 1))
    assert scheduled(step(scheduler)[0]) == {"a": 1, "b": 1}
    for _ in range(2):
        plan, _ = step(scheduler)
        assert (scheduled(plan), plan.blocked_by) == ({"a": 1, "b": 1}, BlockedBy.TOKEN_BUDGET)
    assert scheduled(step(scheduler)[0]) == {"b": 1, "c": 1}
    assert scheduled(step(scheduler)[0]) == {"c": 1}


def test_a_victim_that_was_scheduled_gives_its_share_of_the_budget_back() -> None:
    scheduler = make_scheduler(
        "decode_first", num_blocks=4, block_size=2, rules=CHUNK, limits=make_limits(budget=3, threshold=2)
    )
    add(scheduler, make_request("a", 7, 1), make_request("b", 1, 9))
    assert scheduled(step(scheduler)[0]) == {"a": 2, "b": 1}  # 1 block each
    assert list(scheduled(step(scheduler)[0]).items()) == [("b", 1), ("a", 2)]  # a: 2 blocks, b: 1
    plan, _ = step(
        scheduler
    )  # a needs 3 blocks, b 2, and there are 4: b, admitted last, goes with its scheduled decode
    assert (scheduled(plan), preempted(plan)) == ({"a": 2}, ["b"])
    assert plan.shape.num_decodes == 0
    assert plan.blocked_by is BlockedBy.PREEMPTION, "nobody is admitted in a step that preempted"
    assert plan.preempted[0].num_computed_tokens == 2
    assert scheduler.free_gpu_blocks == 1


def test_a_partial_prefill_that_finds_no_blocks_waits_its_turn_and_hits_what_it_had_computed() -> None:
    scheduler = make_scheduler(
        "decode_first", num_blocks=5, block_size=2, rules=CHUNK, limits=make_limits(budget=4, partial=2)
    )
    add(scheduler, make_request("a", 5, 1), make_request("b", 6, 1))
    step(scheduler)
    step(scheduler)
    plan, finished = step(scheduler)
    assert (scheduled(plan), preempted(plan)) == ({"a": 1}, ["b"])
    assert [item.request.request_id for item in finished] == ["a"]
    plan, finished = step(scheduler)
    assert scheduled(plan) == {"b": 2}
    assert plan.admitted[0].num_cached_tokens == 4
    assert [item.request.request_id for item in finished] == ["b"]
