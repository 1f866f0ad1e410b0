"""prefill_decode_split, iteration_level and static, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.blocks.config import KVRules
from testbed.core.outcome import FinishReason
from testbed.core.plan import BlockedBy, PrefillChunk
from testbed.core.sampling import SamplingParams
from testbed.policies.compositions.prefill_decode_split import PrefillDecodeSplit
from testbed.policies.orders import priority
from testbed.policies.preemption import Swap
from tests.testbed.core_kit import ALL_COMPOSITIONS, make_limits, make_request, make_scheduler
from tests.testbed.stepping import add, drain, preempted, rows, scheduled, step, steps

# --- prefill_decode_split ---


def test_split_prefills_all_before_it_decodes_and_never_mixes() -> None:
    scheduler = make_scheduler("prefill_decode_split", limits=make_limits(budget=8))
    add(scheduler, make_request("a", 5, 3), make_request("b", 6, 2), make_request("c", 3, 2))
    seen = [
        (rows(plan), plan.blocked_by, [item.request.request_id for item in finished])
        for plan, finished in steps(scheduler)
    ]
    budget = BlockedBy.TOKEN_BUDGET
    assert seen == [
        ([("a", 5)], budget, []),  # b's 6 are more than the 3 that are left, and only the first may be split
        ([("b", 6)], budget, []),  # a waits while anything can be prefilled
        ([("c", 3)], None, []),
        ([("a", 1), ("b", 1), ("c", 1)], None, ["b", "c"]),
        ([("a", 1)], None, ["a"]),
    ]


def test_split_cuts_only_the_first_prompt_of_a_batch() -> None:
    scheduler = make_scheduler("prefill_decode_split", limits=make_limits(budget=8))
    add(scheduler, make_request("z", 1, 9))
    step(scheduler)
    add(scheduler, make_request("a", 20, 2), make_request("b", 3, 2), make_request("c", 2, 2))
    seen = []
    for _ in range(5):
        plan, _ = step(scheduler)
        seen.append((rows(plan), plan.shape.prefills, plan.blocked_by))
    assert seen[:2] == [
        ([("a", 8)], (PrefillChunk(0, 8),), BlockedBy.TOKEN_BUDGET),
        ([("a", 8)], (PrefillChunk(8, 8),), BlockedBy.TOKEN_BUDGET),
    ]
    # 4 of a's are left, and 4 of the budget for b's 3; c's 2 are more than the last 1
    assert seen[2] == ([("a", 4), ("b", 3)], (PrefillChunk(16, 4), PrefillChunk(0, 3)), BlockedBy.TOKEN_BUDGET)
    assert seen[3] == ([("c", 2)], (PrefillChunk(0, 2),), None)
    assert seen[4][0] == [("z", 1), ("a", 1), ("b", 1), ("c", 1)]


FULL = BlockedBy.MAX_NUM_SEQS
OF_A_BATCH = [  # what each step computes, by what the queue is blocked, how many run after it
    (["a", "b"], FULL, 2),
    (["c"], None, 3),  # a batch of its own: three run
    (["a", "b"], None, 3),  # two decode, the surplus waits
    (["a", "b"], None, 1),
    (["c"], None, 0),
]
OF_WHAT_RUNS = [(["a", "b"], FULL, 2), (["a", "b"], FULL, 1), (["c"], None, 2), (["a", "c"], None, 0)]


@pytest.mark.parametrize(("caps_running", "of_b", "expected"), [(False, 3, OF_A_BATCH), (True, 2, OF_WHAT_RUNS)])
def test_split_caps_each_batch_and_lets_more_run_or_caps_what_runs_as_sglang_does(
    caps_running: bool, of_b: int, expected: list[tuple[list[str], BlockedBy | None, int]]
) -> None:
    scheduler = make_scheduler(PrefillDecodeSplit(caps_running=caps_running), limits=make_limits(seqs=2))
    add(scheduler, make_request("a", 3, 3), make_request("b", 3, of_b), make_request("c", 3, 2))
    seen = [(list(scheduled(plan)), plan.blocked_by, scheduler.num_running) for plan, _ in steps(scheduler)]
    assert seen == expected


def test_split_preempts_the_last_and_takes_it_back_first() -> None:
    """4 blocks of 2: position 4 of a takes one of b's. b, with 5 tokens, is a prompt again, whole, once a has ended."""
    scheduler = make_scheduler("prefill_decode_split", num_blocks=4, block_size=2, caching=False)
    add(scheduler, make_request("a", 4, 5), make_request("b", 4, 3))
    seen = [(rows(plan), preempted(plan)) for plan, _ in steps(scheduler)]
    assert seen == [
        ([("a", 4), ("b", 4)], []),
        ([("a", 1)], ["b"]),
        *[([("a", 1)], [])] * 3,
        ([("b", 5)], []),
        ([("b", 1)], []),
    ]


def test_split_decodes_when_an_unfinished_prompt_finds_no_block() -> None:
    """3 blocks of 4, a free one wanted for each: a has 1, and b, with 6 of 7 tokens computed, both others."""
    rules, limits = KVRules(growth_test="one_per_sequence"), make_limits(budget=6)
    scheduler = make_scheduler(
        "prefill_decode_split", num_blocks=3, block_size=4, caching=False, rules=rules, limits=limits
    )
    add(scheduler, make_request("a", 3, 2), make_request("b", 7, 2))
    assert [rows(step(scheduler)[0]) for _ in range(2)] == [[("a", 3)], [("b", 6)]]
    assert sorted(item.request.request_id for item in drain(scheduler, max_steps=20)) == ["a", "b"]


# --- iteration_level ---


def test_iterations_mix_decodes_with_whole_prompts() -> None:
    scheduler = make_scheduler("iteration_level", limits=make_limits(budget=10))
    add(scheduler, make_request("a", 4, 3))
    assert rows(step(scheduler)[0]) == [("a", 4)]
    add(scheduler, make_request("b", 6, 2), make_request("c", 5, 2))
    plan, _ = step(scheduler)  # 10 - 1 - 6 leaves 3: c is not split
    assert (rows(plan), plan.blocked_by) == ([("a", 1), ("b", 6)], BlockedBy.TOKEN_BUDGET)
    plan, finished = step(scheduler)
    assert rows(plan) == [("a", 1), ("b", 1), ("c", 5)]
    assert [item.request.request_id for item in finished] == ["a", "b"]
    assert rows(step(scheduler)[0]) == [("c", 1)]
    assert not scheduler.has_work


def test_an_iteration_takes_a_prompt_over_the_budget_alone() -> None:
    scheduler = make_scheduler("iteration_level", limits=make_limits(budget=10))
    add(scheduler, make_request("a", 4, 2), make_request("long", 15, 2), make_request("b", 2, 1))
    seen = [(rows(plan), plan.blocked_by) for plan, _ in steps(scheduler)]
    assert seen == [
        ([("a", 4)], BlockedBy.TOKEN_BUDGET),
        ([("a", 1)], BlockedBy.TOKEN_BUDGET),
        ([("long", 15)], BlockedBy.TOKEN_BUDGET),
        ([("long", 1), ("b", 2)], None),
    ]


def test_an_iteration_that_preempts_admits_nobody() -> None:
    scheduler = make_scheduler("iteration_level", num_blocks=4, block_size=2, caching=False)
    add(scheduler, make_request("a", 4, 5), make_request("b", 4, 2))
    step(scheduler)
    add(scheduler, make_request("c", 1, 1))
    plan, _ = step(scheduler)
    assert (rows(plan), preempted(plan), plan.blocked_by) == ([("a", 1)], ["b"], BlockedBy.PREEMPTION)
    assert [item.reason for item in drain(scheduler)] == [FinishReason.LENGTH] * 3


# --- static ---


def test_a_static_batch_runs_until_its_last_member_ends() -> None:
    scheduler = make_scheduler("static", limits=make_limits(seqs=2))
    add(scheduler, make_request("a", 3, 2), make_request("b", 3, 4), make_request("c", 3, 1), make_request("d", 3, 1))
    seen = [(rows(plan), plan.blocked_by) for plan, _ in steps(scheduler)]
    assert seen == [
        ([("a", 3), ("b", 3)], BlockedBy.MAX_NUM_SEQS),
        ([("a", 1), ("b", 1)], BlockedBy.BATCH),
        ([("b", 1)], BlockedBy.BATCH),  # a's place stays empty
        ([("b", 1)], BlockedBy.BATCH),
        ([("c", 3), ("d", 3)], None),
    ]


def test_a_static_batch_is_closed_by_its_budget() -> None:
    scheduler = make_scheduler("static", limits=make_limits(budget=10))
    add(scheduler, make_request("a", 4, 1), make_request("b", 7, 1), make_request("long", 15, 1))
    seen = [(rows(plan), plan.blocked_by) for plan, _ in steps(scheduler)]
    budget = BlockedBy.TOKEN_BUDGET
    assert seen == [([("a", 4)], budget), ([("b", 7)], budget), ([("long", 15)], None)]


def test_what_a_static_batch_preempted_belongs_to_the_next_batch() -> None:
    scheduler = make_scheduler("static", num_blocks=4, block_size=2, caching=False)
    add(scheduler, make_request("a", 4, 5), make_request("b", 4, 2), make_request("c", 2, 1))
    seen = [(rows(plan), preempted(plan), plan.blocked_by) for plan, _ in steps(scheduler)]
    assert seen[0] == ([("a", 4), ("b", 4)], [], BlockedBy.KV_BLOCKS)
    assert seen[1] == ([("a", 1)], ["b"], BlockedBy.BATCH)
    assert seen[2:5] == [([("a", 1)], [], BlockedBy.BATCH)] * 3
    assert seen[5:] == [([("b", 5), ("c", 2)], [], None)]


# --- what they share ---


@pytest.mark.parametrize("composition", ALL_COMPOSITIONS)
def test_a_step_that_preempts_takes_nobody_back(composition: str) -> None:
    """x is swapped out for b, and b for a, which leaves 6 blocks free; x with room to grow needs 3."""
    scheduler = make_scheduler(
        composition, num_blocks=10, num_cpu_blocks=9, block_size=2, caching=False, preemption=Swap()
    )
    add(scheduler, make_request("a", 4, 14), make_request("b", 9, 9), make_request("x", 1, 9))
    plans = [step(scheduler)[0] for _ in range(6)]
    assert [preempted(plan) for plan in plans] == [[], [], ["x"], [], ["b"], []]
    assert [plan.swapped_in for plan in plans] == [(), (), (), (), (), ("x",)]


@pytest.mark.parametrize("composition", ["static", "iteration_level"])
def test_what_comes_back_to_a_batch_keeps_to_its_budget(composition: str) -> None:
    scheduler = make_scheduler(composition, limits=make_limits(budget=3), num_blocks=9, num_cpu_blocks=8, block_size=2)
    group = make_request("three", 1, 3, sampling=SamplingParams(n=3, temperature=1))
    add(scheduler, make_request("a", 1, 12), make_request("b", 1, 9), group)
    plans = [(rows(plan), plan.swapped_in) for plan, _ in steps(scheduler)]
    assert [num for num, back in plans if back] == [[("three", 1)] * 3], "with a's they were four"


@pytest.mark.parametrize("composition", ["unified", "iteration_level"])
def test_who_made_room_comes_back_once_there_is_a_place(composition: str) -> None:
    scheduler = make_scheduler(
        composition, limits=make_limits(seqs=1), num_cpu_blocks=8, preemption=Swap(), queue=priority(preemptive=True)
    )
    add(scheduler, make_request("late", 2, 4, priority=1))
    step(scheduler)
    add(scheduler, make_request("soon", 2, 3))
    seen = [(rows(plan), plan.swapped_in) for plan, _ in steps(scheduler)]
    assert [[name for name, _ in row] for row, _ in seen] == [["soon"]] * 3 + [["late"]] * 3
    assert [back for _, back in seen] == [(), (), (), ("late",), (), ()]


@pytest.mark.parametrize("at", ["add", "head"])
@pytest.mark.parametrize("composition", ["prefill_decode_split", "iteration_level", "static"])
def test_what_can_never_run_ends_with_a_reason(composition: str, at: Any) -> None:
    rules, limits = KVRules(never_fits_at=at), make_limits(model_len=30)
    scheduler = make_scheduler(composition, num_blocks=4, block_size=4, limits=limits, rules=rules)
    add(scheduler, make_request("long", 31, 1), make_request("huge", 17, 1), make_request("a", 4, 2))
    reasons = {item.request.request_id: (item.reason, item.message) for item in drain(scheduler)}
    assert reasons["long"] == (FinishReason.IGNORED, "prompt of 31 tokens exceeds max_model_len (30)")
    assert reasons["huge"][0] is FinishReason.IGNORED
    assert reasons["a"] == (FinishReason.LENGTH, "")
