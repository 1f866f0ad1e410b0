"""decode_first, step by step: decodes, then unfinished prefills, then new ones in chunks, under one budget."""

from __future__ import annotations

import pytest

from testbed.blocks.config import KVRules
from testbed.core.limits import Limits
from testbed.core.plan import BlockedBy, PrefillChunk
from testbed.core.sequence import Sequence
from tests.testbed.core_kit import make_limits, make_request, make_scheduler
from tests.testbed.stepping import add, preempted, scheduled, step

CHUNK = KVRules(allocate="chunk")


class TakesADecode:
    """A user's victim choice that takes what this step has scheduled already."""

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        return next(seq for seq in running.values() if not seq.is_prefilling)


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
    scheduler = make_scheduler("decode_first", limits=make_limits(budget=8, partial=2))
    add(scheduler, make_request("a", 10, 1), make_request("b", 3, 5))
    assert list(scheduled(step(scheduler)[0]).items()) == [("a", 4), ("b", 3)]  # 8 // 2 = 4 each at most
    assert list(scheduled(step(scheduler)[0]).items()) == [("b", 1), ("a", 6)]  # one prefill is left: all is its own


def test_a_prompt_that_is_alone_in_its_prefill_has_the_whole_budget() -> None:
    scheduler = make_scheduler("decode_first", limits=make_limits(budget=16, threshold=4, partial=1))
    add(scheduler, make_request("a", 20, 9), make_request("b", 20, 9))
    plan, _ = step(scheduler)  # the threshold says what is long, it cuts nothing
    assert (scheduled(plan), plan.blocked_by) == ({"a": 16}, BlockedBy.TOKEN_BUDGET)
    assert scheduled(step(scheduler)[0]) == {"a": 4, "b": 12}
    assert scheduled(step(scheduler)[0]) == {"a": 1, "b": 8}


def test_only_so_many_long_prompts_are_part_way_through_and_short_ones_overtake_them() -> None:
    limits = make_limits(budget=16, threshold=4, partial=3)  # of three at a time one may be longer than 4 tokens
    scheduler = make_scheduler("decode_first", limits=limits)
    add(scheduler, make_request("a", 20, 9), make_request("b", 3, 9), make_request("c", 10, 9), make_request("d", 3, 9))
    # a, b and d take part, c is the second long one: 16 // 3 = 5 tokens each
    plan, _ = step(scheduler)
    assert (scheduled(plan), plan.blocked_by) == ({"a": 5, "b": 3, "d": 3}, BlockedBy.PARTIAL_PREFILLS)
    assert scheduler.num_waiting == 1
    # a has 15 to go and is long still, c does not count: 16 // 1 for a, of which the decodes leave 14
    plan, _ = step(scheduler)
    assert (scheduled(plan), plan.blocked_by) == ({"b": 1, "d": 1, "a": 14}, BlockedBy.TOKEN_BUDGET)
    # 1 token to go is not long: a and c share 16 // 2
    plan, _ = step(scheduler)
    assert (scheduled(plan), plan.blocked_by) == ({"b": 1, "d": 1, "a": 1, "c": 8}, None)


@pytest.mark.parametrize(("num_long", "overtakes"), [(129, True), (130, False)])
def test_a_short_prompt_is_looked_for_behind_128_long_ones(num_long: int, overtakes: bool) -> None:
    scheduler = make_scheduler("decode_first", limits=make_limits(budget=16, threshold=4, partial=2))
    add(scheduler, *[make_request(f"long {number}", 5, 1) for number in range(num_long)], make_request("short", 2, 1))
    assert ("short" in scheduled(step(scheduler)[0])) is overtakes


def test_a_long_prompt_that_was_passed_over_keeps_its_place() -> None:
    scheduler = make_scheduler("decode_first", limits=make_limits(budget=16, threshold=4, partial=2))
    add(scheduler, make_request("a", 9, 9), make_request("b", 9, 9), make_request("c", 9, 9))
    plan, _ = step(scheduler)  # a alone counts, so that all 16 are its own; b and c are long too
    assert (scheduled(plan), plan.blocked_by) == ({"a": 9}, BlockedBy.PARTIAL_PREFILLS)
    plan, _ = step(scheduler)
    assert (scheduled(plan), plan.blocked_by) == ({"a": 1, "b": 9}, BlockedBy.PARTIAL_PREFILLS)
    assert scheduled(step(scheduler)[0]) == {"a": 1, "b": 1, "c": 9}


def test_two_long_prompts_share_the_budget_where_they_may() -> None:
    limits = Limits(8, 16, 512, 4, 2, 2)
    scheduler = make_scheduler("decode_first", limits=limits)
    add(scheduler, make_request("a", 10, 1), make_request("b", 10, 1), make_request("c", 10, 1))
    plan, _ = step(scheduler)
    assert (scheduled(plan), plan.blocked_by) == ({"a": 8, "b": 8}, BlockedBy.PARTIAL_PREFILLS)
    # 2 to go are not long: c may begin. Three share by two: 16 // 2 = 8
    assert scheduled(step(scheduler)[0]) == {"a": 2, "b": 2, "c": 8}


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
        "decode_first", num_blocks=4, block_size=4, rules=CHUNK, limits=make_limits(budget=6, partial=2),
        victims=TakesADecode(),
    )  # fmt: skip
    add(scheduler, make_request("b", 5, 9))
    assert scheduled(step(scheduler)[0]) == {"b": 5}  # 2 blocks: positions 5, 6 and 7 have their slots
    add(scheduler, make_request("a", 6, 1), make_request("c", 6, 1))
    assert list(scheduled(step(scheduler)[0]).items()) == [("b", 1), ("a", 3), ("c", 2)]  # 6 // 2 each; 1 block each
    # b is scheduled, 5 are left. a's next 3 need a block, there is none: b goes, its 2 blocks and its token come back.
    # c gets 3 of 6 - 3 (of 6 - 1 - 3 it would get 2), and the last block
    plan, _ = step(scheduler)
    assert (list(scheduled(plan).items()), preempted(plan)) == ([("a", 3), ("c", 3)], ["b"])
    assert plan.shape.num_decodes == 0
    assert plan.blocked_by is BlockedBy.PREEMPTION, "nobody is admitted in a step that preempted"
    assert plan.preempted[0].num_computed_tokens == 6
    assert scheduler.free_gpu_blocks == 0


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
