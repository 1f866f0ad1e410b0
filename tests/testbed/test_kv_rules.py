"""The rules in which systems differ, one by one: what each changes, and what its default does."""

from __future__ import annotations

import pytest

from testbed.blocks.config import KVRules
from testbed.blocks.demand import AllocStatus
from testbed.blocks.manager import BlockManager
from testbed.blocks.prefixes import NO_HIT
from testbed.core.sequence import Sequence
from testbed.errors import ConfigError
from testbed.policies.compositions.decode_first import DecodeFirst
from testbed.policies.preemption import Recompute
from tests.testbed.core_kit import make_blocks, make_limits, make_request, make_scheduler
from tests.testbed.kv_kit import LATER, OK, compute, num_hit, sequence
from tests.testbed.stepping import add, cached, drain, preempted, rows, step, steps

# --- watermark: to whom it applies (when idle and its rounding are in test_admission, swapped in is in test_swap) ---


@pytest.mark.parametrize(("applies", "expected"), [(True, LATER), (False, OK)])
def test_the_watermark_for_those_that_were_preempted(applies: bool, expected: AllocStatus) -> None:
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
        blocks.prefixes.publish(seq, 4)
    blocks.check_invariants([*seqs])
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
    assert (first.block_table, second.block_table) == tables
    assert blocks.lookup(sequence(9, (1, 2, 3, 4, 5))).blocks == [found]
    blocks.free(first)
    taker = sequence(2, 12)  # every block but the second's
    blocks.admit(taker, 12, blocks.lookup(taker))
    assert blocks.lookup(sequence(8, (1, 2, 3, 4, 5))).blocks == [found_after]
    blocks.check_invariants([second, taker])


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


@pytest.mark.parametrize("victims_return", ["this_step", "next_step"])
def test_victims_come_back_in_the_order_they_were_admitted(victims_return: str) -> None:
    """One queue: c is preempted before b, so that b stands before c when both are back, held back or not."""
    rules = KVRules(allocate="chunk", victims_return=victims_return)
    scheduler = make_scheduler("unified", num_blocks=6, block_size=2, rules=rules, limits=make_limits(threshold=2))
    add(scheduler, make_request("a", 12, 1), make_request("b", 2, 9), make_request("c", 2, 9))
    order, gone = [], []
    for plan, _ in steps(scheduler):
        order += [item.request_id for item in plan.admitted]
        gone += preempted(plan)
    assert gone[:2] == ["c", "b"]
    assert order[:5] == ["a", "b", "c", "b", "c"]


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


def test_a_window_that_the_rules_do_not_allow_is_named_wherever_it_comes_from() -> None:
    rules = KVRules(duplicates="merged", hits_visible="plan", allocate="whole")
    with pytest.raises(ConfigError, match=r"cache\.sliding_window or model\.sliding_window, 8, .* set both to null"):
        make_scheduler(sliding_window=8, rules=rules)


# --- tenants ---


@pytest.mark.parametrize("isolated", [True, False])
def test_tenants_share_prefixes_unless_they_are_kept_apart(isolated: bool) -> None:
    scheduler = make_scheduler(block_size=4, isolate_tenants=isolated)
    add(scheduler, make_request("a", range(9), 1, tenant="x"))
    drain(scheduler)
    add(scheduler, make_request("b", range(9), 1, tenant="y"), make_request("c", range(9), 1, tenant="x"))
    plan, _ = step(scheduler)
    assert cached(plan) == {"b": 0 if isolated else 8, "c": 8}


@pytest.mark.parametrize(("frozen", "hit"), [(True, 0), (False, 8)])
def test_equal_prompts_of_one_batch_share_blocks_and_where_hits_are_kept_both_compute_them(
    frozen: bool, hit: int
) -> None:
    """vLLM 0.8.5: a block that the step itself has allocated for its content is shared, and no hit before the next."""
    rules = KVRules(hits_frozen=frozen, duplicates="merged", hits_visible="plan")
    scheduler = make_scheduler("prefill_first", block_size=4, rules=rules)
    add(scheduler, make_request("a", range(9), 3), make_request("b", range(9), 3))
    plan, _ = step(scheduler)
    assert (cached(plan), rows(plan)) == ({"a": 0, "b": hit}, [("a", 9), ("b", 9 - hit)])
    assert scheduler.free_gpu_blocks == 64 - 4  # two are shared, and each has one of its own
    add(scheduler, make_request("c", range(9), 3))
    plan, _ = step(scheduler)
    assert cached(plan) == {"c": 8}
