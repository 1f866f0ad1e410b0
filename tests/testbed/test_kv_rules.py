"""The rules in which systems differ, one by one: what each changes, and what its default does."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from testbed.blocks.config import KVRules
from testbed.blocks.manager import NO_HIT, BlockManager, Verdict
from testbed.errors import ConfigError
from testbed.plan import BlockedBy, FinishReason, PreemptionMode
from testbed.policies.compositions.decode_first import DecodeFirst
from testbed.policies.preemption import Recompute
from testbed.request import SamplingParams
from testbed.sequence import Sequence
from tests.testbed.core_kit import (
    add,
    cached,
    drain,
    ignored,
    in_flight,
    make_blocks,
    make_limits,
    make_request,
    make_scheduler,
    preempted,
    rows,
    scheduled,
    step,
)

OK, LATER, NEVER = Verdict.OK, Verdict.LATER, Verdict.NEVER


def sequence(seq_id: int, tokens: int | Seq[int]) -> Sequence:
    return Sequence(seq_id, make_request(str(seq_id), tokens, 9), 4096)


def compute(blocks: BlockManager, seq: Sequence) -> list[int]:
    """Admits a sequence and computes all it knows; its table."""
    blocks.admit(seq, seq.num_tokens, blocks.lookup(seq))
    blocks.scheduled(seq, seq.num_tokens)
    blocks.planned()
    seq.num_computed_tokens = seq.num_tokens
    blocks.publish(seq, seq.num_tokens)
    blocks.check_invariants()
    return list(blocks.table(seq.seq_id))


def num_hit(blocks: BlockManager, tokens: Seq[int]) -> int:
    seq = sequence(999, tokens)
    hit = blocks.lookup(seq)
    blocks.forget(seq)
    return hit.num_tokens


# --- watermark: to whom it applies (when idle and its rounding are in test_admission, swapped in is in test_swap) ---


@pytest.mark.parametrize(("applies", "expected"), [(True, LATER), (False, OK)])
def test_the_watermark_for_those_that_were_preempted(applies: bool, expected: Verdict) -> None:
    """10 blocks, 2 of them the watermark, 4 in use: 5 more leave 1."""
    rules = KVRules(watermark_for_resumed=applies)
    blocks = make_blocks(num_blocks=10, block_size=4, watermark=0.2, caching=False, rules=rules)
    blocks.admit(sequence(0, 16), 16, NO_HIT)
    new, resumed = sequence(1, 20), sequence(2, 20)
    resumed.num_preemptions = 1
    assert blocks.can_admit(new, 20, NO_HIT, is_idle=False) is LATER
    assert blocks.can_admit(resumed, 20, NO_HIT, is_idle=False) is expected


# --- growth ---


def test_a_free_block_for_each_sequence_needed_or_not() -> None:
    """a holds the only block, 2 of its 4 slots are used: exactly nothing is needed."""
    for growth_test, expected in (("exact", True), ("one_per_sequence", False)):
        blocks = make_blocks(num_blocks=1, block_size=4, rules=KVRules(growth_test=growth_test))  # type: ignore[arg-type]
        seq = sequence(0, 2)
        compute(blocks, seq)
        assert blocks.can_grow(seq, 1) is expected


@pytest.mark.parametrize(("growth_test", "gone"), [("exact", []), ("one_per_sequence", ["a"])])
def test_the_growth_test_preempts(growth_test: str, gone: list[str]) -> None:
    rules = KVRules(growth_test=growth_test)  # type: ignore[arg-type]
    scheduler = make_scheduler("prefill_first", num_blocks=2, block_size=4, rules=rules, preemption=Recompute())
    add(scheduler, make_request("a", 5, 2))
    step(scheduler)
    assert preempted(step(scheduler)[0]) == gone  # position 5 has a slot


# --- admission and hits ---


def test_a_prompt_must_be_free_as_if_nothing_were_cached() -> None:
    """4 blocks: 2 hold the prefix and are in use, 2 are free. The prompt has 3 blocks, 1 of them new."""
    for counts, expected in ((True, OK), (False, LATER)):
        blocks = make_blocks(num_blocks=4, block_size=4, rules=KVRules(admission_counts_hits=counts))
        compute(blocks, sequence(0, range(8)))
        again = sequence(1, range(12))
        hit = blocks.lookup(again)
        assert hit.num_tokens == 8
        assert blocks.can_admit(again, 12, hit, is_idle=False) is expected


@pytest.mark.parametrize(("hit_cap", "num_cached"), [("last_block", 4), ("last_token", 7)])
def test_how_much_of_a_wholly_cached_prompt_is_computed(hit_cap: str, num_cached: int) -> None:
    scheduler = make_scheduler(block_size=4, rules=KVRules(hit_cap=hit_cap))  # type: ignore[arg-type]
    add(scheduler, make_request("a", range(8), 3))
    step(scheduler)
    add(scheduler, make_request("b", range(8), 3))
    plan, _ = step(scheduler)
    assert (cached(plan), rows(plan)) == ({"b": num_cached}, [("a", 1), ("b", 8 - num_cached)])
    # a has 3 blocks; b's are the same 2, or 1 of them and its own
    assert scheduler.free_gpu_blocks == 64 - 3 - (hit_cap == "last_block")
    assert len(drain(scheduler)) == 2


@pytest.mark.parametrize(("frozen", "first", "later"), [(False, 0, 8), (True, 0, 0)])
def test_a_hit_that_is_looked_up_once_misses_what_comes_later(frozen: bool, first: int, later: int) -> None:
    blocks = make_blocks(block_size=4, rules=KVRules(hits_frozen=frozen, duplicates="merged", hits_visible="plan"))
    waits = sequence(1, range(9))
    assert blocks.lookup(waits).num_tokens == first
    compute(blocks, sequence(0, range(8)))
    assert blocks.lookup(waits).num_tokens == later
    assert num_hit(blocks, range(9)) == 8, "who looks now finds it"


def test_a_frozen_hit_outlives_its_blocks_and_ends_when_the_sequence_is_freed() -> None:
    blocks = make_blocks(
        num_blocks=3, block_size=4, rules=KVRules(hits_frozen=True, duplicates="merged", hits_visible="plan")
    )
    first = sequence(0, range(8))
    compute(blocks, first)
    waits = sequence(1, range(9))
    assert blocks.lookup(waits).num_tokens == 8
    blocks.free(first)
    filler = sequence(2, 12)
    compute(blocks, filler)  # evicts both
    assert num_hit(blocks, range(9)) == 0
    assert blocks.lookup(waits).num_tokens == 8
    blocks.free(filler)
    blocks.admit(waits, 9, blocks.lookup(waits))
    blocks.free(waits)
    compute(blocks, sequence(3, range(100, 112)))
    assert blocks.lookup(waits).num_tokens == 0, "looked up anew"


def side_by_side(duplicates: str) -> tuple[BlockManager, Sequence, Sequence]:
    """Two sequences that fill a block of equal content in one step: nothing was there when they were admitted."""
    free_order = "one_queue" if duplicates == "replaced" else "uncached_first"
    visible = "plan" if duplicates == "merged" else "commit"
    rules = KVRules(duplicates=duplicates, free_order=free_order, hits_visible=visible)  # type: ignore[arg-type]
    blocks = make_blocks(num_blocks=4, block_size=4, rules=rules)
    seqs = tuple(Sequence(seq_id, make_request(str(seq_id), (1, 2, 3), (4, 5)), 4096) for seq_id in (0, 1))
    for seq in seqs:
        compute(blocks, seq)
    for seq in seqs:
        seq.emit(4)
        blocks.grow(seq, 1)
        seq.num_computed_tokens = 4
    for seq in seqs:
        blocks.publish(seq, 4)
    blocks.check_invariants()
    return blocks, *seqs


@pytest.mark.parametrize(
    ("duplicates", "tables", "found", "found_after"),
    [
        ("listed", ([0], [1]), 0, 1),  # the older one is found, and once it is gone the other
        ("replaced", ([0], [1]), 1, 1),  # the newer one is found; the older one is forgotten
        ("merged", ([0], [0]), 0, 0),  # one block for both
    ],
)
def test_blocks_of_equal_content(
    duplicates: str, tables: tuple[list[int], list[int]], found: int, found_after: int
) -> None:
    blocks, first, second = side_by_side(duplicates)
    assert (list(blocks.table(0)), list(blocks.table(1))) == tables
    assert blocks.lookup(sequence(9, (1, 2, 3, 4, 5))).blocks == [found]
    blocks.free(first)
    taker = sequence(2, 12)  # every block but the second's
    blocks.admit(taker, 12, blocks.lookup(taker))
    assert blocks.lookup(sequence(8, (1, 2, 3, 4, 5))).blocks == [found_after]
    blocks.check_invariants()
    assert second.num_slots == 4


# --- free list ---


@pytest.mark.parametrize(("free_order", "num_kept"), [("uncached_first", 4), ("one_queue", 0)])
def test_which_free_block_is_handed_out_first(free_order: str, num_kept: int) -> None:
    """Block 0 holds a full block's content and is released first, block 1 only 3 tokens."""
    blocks = make_blocks(num_blocks=2, block_size=4, rules=KVRules(free_order=free_order))  # type: ignore[arg-type]
    full, partial = sequence(0, range(4)), sequence(1, range(50, 53))
    compute(blocks, full)
    compute(blocks, partial)
    blocks.free(full)
    blocks.free(partial)
    assert num_hit(blocks, range(5)) == 4
    compute(blocks, sequence(2, (99,)))
    assert num_hit(blocks, range(5)) == num_kept


@pytest.mark.parametrize(("lru_by", "kept"), [("release", "later"), ("last_step", "busier")])
def test_what_least_recently_used_goes_by(lru_by: str, kept: str) -> None:
    """`busier` was scheduled by step 5, `later` by step 3 and released after it."""
    blocks = make_blocks(num_blocks=2, block_size=4, rules=KVRules(lru_by=lru_by))  # type: ignore[arg-type]
    busier, later = sequence(0, range(4)), sequence(1, range(50, 54))
    for seq, last_step in ((busier, 5), (later, 3)):
        compute(blocks, seq)
        seq.last_step = last_step
    blocks.free(busier)
    blocks.free(later)
    compute(blocks, sequence(2, (99,)))
    assert num_hit(blocks, range(5)) == (4 if kept == "busier" else 0)
    assert num_hit(blocks, range(50, 55)) == (4 if kept == "later" else 0)


# --- victims ---


@pytest.mark.parametrize(("victims_return", "admitted"), [("this_step", [["b"], ["b"]]), ("next_step", [[], ["b"]])])
def test_when_a_victim_may_be_admitted_again(victims_return: str, admitted: list[list[str]]) -> None:
    """4 blocks of 2. Step 2: a computes position 3 in its 2 blocks, b the first 2 of its 4 tokens in 1.

    Step 3: position 4 of a takes the last block, and b's last 2 tokens find none. b goes; its block is free for its
    own first chunk of 2, at once or in step 4, in which a's position 5 has a slot.
    """
    scheduler = make_scheduler(
        DecodeFirst(admits_after_preemption=True), num_blocks=4, block_size=2, caching=False,
        rules=KVRules(allocate="chunk", victims_return=victims_return),  # type: ignore[arg-type]
        limits=make_limits(budget=3),
    )  # fmt: skip
    add(scheduler, make_request("a", 3, 5))
    step(scheduler)
    add(scheduler, make_request("b", 4, 1))
    assert rows(step(scheduler)[0]) == [("a", 1), ("b", 2)]
    seen = []
    for _ in admitted:
        plan, _ = step(scheduler)
        seen.append([item.request_id for item in plan.admitted])
    assert seen == admitted


def test_victims_that_are_held_back_keep_their_order() -> None:
    """One queue: c is preempted before b, so that b stands before c when both are back."""
    rules = KVRules(allocate="chunk", victims_return="next_step")
    scheduler = make_scheduler("unified", num_blocks=6, block_size=2, rules=rules, limits=make_limits(threshold=2))
    add(scheduler, make_request("a", 12, 1), make_request("b", 2, 9), make_request("c", 2, 9))
    order, gone = [], []
    while scheduler.has_work:
        plan, _ = step(scheduler)
        order += [item.request_id for item in plan.admitted]
        gone += preempted(plan)
    assert gone[:2] == ["c", "b"]
    assert order[:5] == ["a", "b", "c", "b", "c"]


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


# --- what can never fit ---


@pytest.mark.parametrize(("never_fits_at", "first"), [("add", ["long", "huge"]), ("head", [])])
def test_when_what_can_never_fit_is_found(never_fits_at: str, first: list[str]) -> None:
    """One sequence at a time: neither is at the queue's head before a has ended."""
    rules = KVRules(never_fits_at=never_fits_at)  # type: ignore[arg-type]
    scheduler = make_scheduler(num_blocks=4, block_size=4, rules=rules, limits=make_limits(seqs=1, model_len=20))
    add(scheduler, make_request("a", 4, 2), make_request("long", 21, 1), make_request("huge", 17, 1))
    add(scheduler, make_request("b", 4, 1))
    seen, messages = [], {}
    while scheduler.has_work:
        plan, finished = step(scheduler)
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
    assert len(blocks.table(0)) == 1, "a prompt takes what it needs"
    sizes = []
    for num_computed in range(4, 10):
        seq.num_computed_tokens = num_computed
        blocks.grow(seq, 1)
        sizes.append(len(blocks.table(0)))
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
            assert scheduler.blocks.num_held_blocks(scheduler.unfinished()[0]) == held[-1]
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
        while scheduler.has_work:
            plan, ended = step(scheduler)
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
    held = []
    while scheduler.has_work:
        step(scheduler)
        held.append(16 - scheduler.free_gpu_blocks)
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


# --- rules that contradict each other ---


@pytest.mark.parametrize(
    "fields",
    [
        {"hits_frozen": True},
        {"hits_visible": "plan"},
        {"duplicates": "merged", "hits_visible": "plan", "allocate": "chunk"},
        {"duplicates": "merged"},
        {"duplicates": "replaced"},
    ],
)
def test_rules_that_contradict_each_other_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.kv_rules\.\w+.* need"):
        KVRules(**fields)  # type: ignore[arg-type]


# --- tenants ---


@pytest.mark.parametrize("isolated", [True, False])
def test_tenants_share_prefixes_unless_they_are_kept_apart(isolated: bool) -> None:
    scheduler = make_scheduler(block_size=4, isolate_tenants=isolated)
    add(scheduler, make_request("a", range(9), 1, tenant="x"))
    drain(scheduler)
    add(scheduler, make_request("b", range(9), 1, tenant="y"), make_request("c", range(9), 1, tenant="x"))
    plan, _ = step(scheduler)
    assert cached(plan) == {"b": 0 if isolated else 8, "c": 8}
