"""Rules in which systems differ, one by one: budget, what can never fit, lookahead, sliding window, length."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.blocks.config import KVRules
from testbed.blocks.kv_sequence import RELEASED, num_distinct
from testbed.core.outcome import FinishReason
from testbed.core.plan import BlockedBy, PreemptionMode
from testbed.core.request import SamplingParams
from testbed.policies.admission import FuturePeak, MaxUtilization, NoEvict
from testbed.policies.context import PolicyContext, bind
from testbed.policies.oracle import NoOracle
from testbed.policies.preemption import Recompute
from testbed.policies.victim import MostBlocks
from tests.testbed.core_kit import make_blocks, make_limits, make_request, make_scheduler
from tests.testbed.kv_kit import compute, sequence
from tests.testbed.stepping import add, drain, ignored, in_flight, preempted, rows, scheduled, step, steps

# --- budget ---


@pytest.mark.parametrize(
    ("budget_rule", "budget", "first"),
    [
        ("sum", 10, ["a", "b"]),
        ("sum", 9, ["a"]),
        ("padded", 12, ["a", "b"]),  # 2 rows as long as the longest
        ("padded", 11, ["a"]),
    ],
)
def test_what_prompts_count_for(budget_rule: str, budget: int, first: list[str]) -> None:
    rules, limits = KVRules(budget=budget_rule), make_limits(budget=budget)  # type: ignore[arg-type]
    scheduler = make_scheduler("prefill_first", rules=rules, limits=limits)
    add(scheduler, make_request("a", 4, 2), make_request("b", 6, 2))
    plan, _ = step(scheduler)
    assert list(scheduled(plan)) == first
    assert plan.blocked_by is (None if len(first) == 2 else BlockedBy.TOKEN_BUDGET)


@pytest.mark.parametrize(("budget_rule", "first"), [("uncached", ["b", "c"]), ("sum", ["b"])])
def test_whether_hits_count_in_the_budget(budget_rule: str, first: list[str]) -> None:
    """b has 12 tokens, 8 of them cached; c has 5. By tokens to compute they are 9 of 12, by all of them 17."""
    rules, limits = KVRules(budget=budget_rule), make_limits(budget=12)  # type: ignore[arg-type]
    scheduler = make_scheduler("prefill_first", block_size=4, rules=rules, limits=limits)
    add(scheduler, make_request("a", range(9), 1))
    drain(scheduler)
    add(scheduler, make_request("b", range(12), 1), make_request("c", 5, 1))
    plan, _ = step(scheduler)
    assert list(scheduled(plan)) == first


def test_chunks_fill_their_blocks_where_prefixes_are_cached() -> None:
    """A budget of 10 is 8 in whole blocks of 4; the last chunk is what is left."""
    for caching, fills, expected in ((True, True, [8, 8, 4]), (True, False, [10, 10]), (False, True, [10, 10])):
        rules, limits = KVRules(chunks_fill_blocks=fills), make_limits(budget=10)
        scheduler = make_scheduler("decode_first", block_size=4, caching=caching, rules=rules, limits=limits)
        add(scheduler, make_request("a", 20, 1))
        seen = []
        while scheduler.has_work:
            seen += [num_tokens for _, num_tokens in rows(step(scheduler)[0])]
        assert seen == expected


def test_where_chunks_fill_blocks_a_decode_needs_a_blocks_worth_of_budget() -> None:
    """vLLM 0.8.5: of a budget of 6, and blocks of 4, the decodes have 6, 5 and 4; what is left then is for nobody."""
    for fills, decodes in ((True, "abc"), (False, "abcd")):
        rules, limits = KVRules(chunks_fill_blocks=fills), make_limits(budget=6)
        scheduler = make_scheduler("decode_first", block_size=4, rules=rules, limits=limits)
        add(scheduler, make_request("a", 1, 9))
        for name in "bcd":
            step(scheduler)
            add(scheduler, make_request(name, 1, 9))
        step(scheduler)
        assert rows(step(scheduler)[0]) == [(name, 1) for name in decodes]


@pytest.mark.parametrize(("fills", "num_rows"), [(True, 6), (False, 8)])
def test_where_chunks_fill_blocks_the_samples_of_a_prompt_need_as_much(fills: bool, num_rows: int) -> None:
    """Of a budget of 9, three pairs take 6: the 3 that are left are enough for a pair, but are no block."""
    rules, limits = KVRules(chunks_fill_blocks=fills), make_limits(budget=9)
    scheduler = make_scheduler("decode_first", block_size=4, rules=rules, limits=limits)
    pair = SamplingParams(n=2, temperature=1.0)
    add(scheduler, *[make_request(name, 1, 9, sampling=pair) for name in "abcd"])
    step(scheduler)
    assert len(rows(step(scheduler)[0])) == num_rows


# --- what can never fit ---


@pytest.mark.parametrize(("never_fits_at", "first"), [("add", ["long", "huge"]), ("head", [])])
def test_when_what_can_never_fit_is_found(never_fits_at: str, first: list[str]) -> None:
    """One sequence at a time: neither is at the queue's head before a has ended."""
    rules = KVRules(never_fits_at=never_fits_at)  # type: ignore[arg-type]
    scheduler = make_scheduler(num_blocks=4, block_size=4, rules=rules, limits=make_limits(seqs=1, model_len=20))
    add(scheduler, make_request("a", 4, 2), make_request("long", 21, 1), make_request("huge", 17, 1))
    add(scheduler, make_request("b", 4, 1))
    seen, messages = [], {}
    for plan, finished in steps(scheduler):
        seen.append(ignored(plan))
        messages |= {item.request.request_id: item.message for item in finished if item.reason is FinishReason.IGNORED}
    assert seen[0] == first
    assert [name for names in seen for name in names] == ["long", "huge"]
    assert messages == {
        "long": "prompt of 21 tokens exceeds max_model_len (20)",
        "huge": "17 tokens need 5 KV blocks beside a watermark of 0, and the pool has 4",
    }


# --- lookahead ---


def test_a_decode_reserves_slots_ahead_and_a_prefill_does_not() -> None:
    blocks = make_blocks(num_blocks=8, block_size=4, lookahead_slots=3)
    seq = sequence(0, 4)
    compute(blocks, seq)
    assert len(seq.block_table) == 1, "a prompt takes what it needs"
    sizes = []
    for num_computed in range(4, 10):
        seq.num_computed_tokens = num_computed
        blocks.grow(seq, 1)
        sizes.append(len(seq.block_table))
    # 4 + 1 + 3 = 8 slots, then 9, ..., 13
    assert sizes == [2, 3, 3, 3, 3, 4]


def test_lookahead_slots_preempt_earlier() -> None:
    """4 blocks of 4, a and b with 2 each (7 tokens): position 7 has its slot, the 2 beyond it are in the next block."""
    for lookahead, gone in ((0, []), (2, ["b"])):
        scheduler = make_scheduler(num_blocks=4, block_size=4, lookahead_slots=lookahead, preemption=Recompute())
        add(scheduler, make_request("a", 7, 2), make_request("b", 7, 2))
        step(scheduler)
        plan, _ = step(scheduler)
        assert preempted(plan) == gone
        assert [item.mode for item in plan.preempted] == [PreemptionMode.RECOMPUTE] * len(gone)
        assert len(drain(scheduler)) == (1 if gone else 0)


# --- sliding window ---


def test_blocks_outside_the_window_are_given_back_while_the_sequence_runs() -> None:
    """Window 4, blocks of 2: the token at position p looks at p - 3 to p; blocks that end before go when p is reserved.

    Position 6 looks at 3 to 6: block 0 (positions 0 and 1) goes, block 1 (2 and 3) stays, and block 3 comes;
    position 7 looks at 4 to 7: block 1 goes.
    """
    scheduler = make_scheduler(num_blocks=16, block_size=2, sliding_window=4, caching=False)
    add(scheduler, make_request("a", 6, 7))
    held, released = [], []
    while scheduler.has_work:
        with in_flight(scheduler) as plan:
            (row,) = plan.scheduled
            held.append(16 - scheduler.free_gpu_blocks)
            released.append([index for index, block in enumerate(row.block_table) if block < 0])
            assert num_distinct([seq.block_table for seq in scheduler.unfinished()]) == held[-1]
    assert held == [3, 3, 2, 3, 2, 3, 2]  # the prompt; positions 6 to 11
    assert released == [[], [0], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2, 3]]
    assert scheduler.blocks.num_free_blocks == 16


def test_a_window_that_has_not_slid_releases_nothing() -> None:
    scheduler = make_scheduler(num_blocks=16, block_size=4, sliding_window=16, caching=False)
    add(scheduler, make_request("a", 8, 8))
    while scheduler.has_work:
        with in_flight(scheduler) as plan:
            assert min(plan.scheduled[0].block_table) >= 0


def test_a_prompt_longer_than_the_pool_is_served_in_chunks_within_its_window() -> None:
    """40 tokens are 20 blocks; a window of 4 and a chunk of 4 hold 4 of them at a time at most."""
    rules, limits = KVRules(allocate="chunk"), make_limits(budget=4)
    for num_blocks, expected in ((6, FinishReason.LENGTH), (3, FinishReason.IGNORED)):
        scheduler = make_scheduler(
            num_blocks=num_blocks, block_size=2, sliding_window=4, caching=False, rules=rules, limits=limits
        )
        add(scheduler, make_request("a", 40, 8))
        most = 0
        finished = []
        for plan, ended in steps(scheduler):
            assert not plan.is_empty
            finished += ended
            most = max(most, num_blocks - scheduler.free_gpu_blocks)
        assert [item.reason for item in finished] == [expected]
        assert most <= 5
        assert scheduler.blocks.num_free_blocks == num_blocks


@pytest.mark.parametrize("composition", ["unified", "decode_first", "prefill_first", "iteration_level", "static"])
def test_a_prompt_whose_first_step_exceeds_the_pool_is_ignored_whatever_the_window(composition: str) -> None:
    scheduler = make_scheduler(composition, num_blocks=6, block_size=2, sliding_window=4, caching=False)
    add(scheduler, make_request("a", 30, 6), make_request("b", 8, 6))
    assert {item.request.request_id: item.reason for item in drain(scheduler)} == {
        "a": FinishReason.IGNORED,
        "b": FinishReason.LENGTH,
    }


def test_shared_blocks_outside_the_window_are_free_with_their_last_user() -> None:
    """n = 2, window 4, blocks of 2, a prompt of 6: 3 shared blocks, and each member's own from position 6 on."""
    scheduler = make_scheduler(num_blocks=16, block_size=2, sliding_window=4, caching=False)
    add(scheduler, make_request("a", 6, 6, sampling=SamplingParams(n=2)))
    held = [16 - scheduler.free_gpu_blocks for _ in steps(scheduler)]
    # prompt 3; position 6: block 0 goes, 1 and 2 are shared, one more each; 7: block 1 goes; 8: one more each;
    # 9: block 2 goes; 10: one more each
    assert held == [3, 4, 3, 5, 4, 6]
    assert scheduler.blocks.num_free_blocks == 16


# --- length ---


@pytest.mark.parametrize(("length_limit", "reason"), [("prompt", FinishReason.IGNORED), ("chunk", FinishReason.LENGTH)])
def test_what_is_compared_with_the_models_length(length_limit: str, reason: FinishReason) -> None:
    """A prompt of 12 in chunks of 8 under a limit of 10."""
    rules = KVRules(allocate="chunk", never_fits_at="head", length_limit=length_limit)  # type: ignore[arg-type]
    scheduler = make_scheduler(rules=rules, limits=make_limits(budget=8, model_len=10))
    add(scheduler, make_request("a", 12, 3))
    (done,) = drain(scheduler)
    assert done.reason is reason


def test_lookahead_ends_at_the_model_s_length() -> None:
    """vLLM V1 reserves min(computed + new + lookahead, max_model_len); else the pool would be too small."""
    blocks = make_blocks(block_size=16, num_blocks=4, caching=False, lookahead_slots=4, max_model_len=64)
    scheduler = make_scheduler(blocks=blocks, limits=make_limits(model_len=64))
    add(scheduler, make_request("a", 56, 8))
    (done,) = drain(scheduler)
    assert (done.reason, done.num_output_tokens) == (FinishReason.LENGTH, 8)


@pytest.mark.parametrize("rule", [NoEvict, MaxUtilization, FuturePeak])
def test_behind_a_sliding_window_admission_counts_what_a_sequence_can_hold(rule: Any) -> None:
    """Of 150 tokens, 8 are looked back at: two requests hold 8 of the 40 blocks, and need not run one by one."""
    by_chunk = KVRules(allocate="chunk")
    blocks = make_blocks(num_blocks=40, caching=False, rules=by_chunk, sliding_window=8)
    limits = make_limits(budget=16)
    admission = rule()
    bind(admission, PolicyContext(blocks, limits, NoOracle(), None, 0))
    scheduler = make_scheduler(blocks=blocks, limits=limits, admission=admission)
    for name in ("a", "b"):
        add(scheduler, make_request(name, 100, 50, sampling=SamplingParams(max_tokens=50)))
    most = 0
    for _ in steps(scheduler):
        most = max(most, scheduler.num_running)
    assert most == 2


def test_most_blocks_leaves_out_what_a_window_released() -> None:
    long, short = sequence(0, range(8)), sequence(1, range(8))
    long.block_table, short.block_table = [RELEASED] * 5 + [1, 2], [3, 4, 5]
    assert num_distinct([long.block_table]) == 2
    assert MostBlocks().choose({0: long, 1: short}) is short
