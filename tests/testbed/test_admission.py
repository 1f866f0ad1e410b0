"""Admission against the watermark has three answers; growth may use what the watermark keeps."""

from __future__ import annotations

import pytest

from testbed.blocks.config import KVRules
from testbed.blocks.demand import AllocStatus
from testbed.blocks.prefixes import NO_HIT
from testbed.core.outcome import FinishReason
from testbed.core.plan import BlockedBy
from testbed.core.sequence import Sequence
from tests.testbed.core_kit import make_blocks, make_limits, make_request, make_scheduler
from tests.testbed.stepping import add, drain, ignored, scheduled, step


def status(
    num_tokens: int, *, used: int = 0, is_idle: bool = False, chunk: int | None = None, **options: object
) -> AllocStatus:
    """Of a prompt in a pool of 10 blocks of 4 tokens with a watermark of 2 blocks, `used` of them taken."""
    blocks = make_blocks(num_blocks=10, block_size=4, watermark=0.2, caching=False, **options)  # type: ignore[arg-type]
    if used:
        other = Sequence(0, make_request("other", used * 4), 4096)
        blocks.admit(other, used * 4, NO_HIT)
    seq = Sequence(1, make_request("a", num_tokens), 4096)
    return blocks.can_admit(seq, chunk or num_tokens, blocks.lookup(seq), is_idle=is_idle)


@pytest.mark.parametrize(
    ("num_tokens", "used", "expected"),
    [
        (16, 4, AllocStatus.OK),  # 10 - 4 - 4 = 2: exactly the watermark is left
        (17, 4, AllocStatus.LATER),  # one token more needs a block more
        (32, 0, AllocStatus.OK),  # 10 - 8 = 2
        (33, 0, AllocStatus.NEVER),  # not even in an empty pool
        (33, 9, AllocStatus.NEVER),
        (32, 1, AllocStatus.LATER),
        (1, 7, AllocStatus.OK),
        (1, 8, AllocStatus.LATER),
        (1, 10, AllocStatus.LATER),
    ],
)
def test_an_admission_leaves_the_watermark(num_tokens: int, used: int, expected: AllocStatus) -> None:
    assert status(num_tokens, used=used) is expected


def test_some_systems_lift_the_watermark_while_nothing_runs() -> None:
    rules = KVRules(watermark_when_idle=False)
    assert status(40, is_idle=True, rules=rules) is AllocStatus.OK
    assert status(41, is_idle=True, rules=rules) is AllocStatus.NEVER
    assert status(40, is_idle=False, rules=rules) is AllocStatus.LATER, "it fits once the others are gone"
    assert status(40, is_idle=True) is AllocStatus.NEVER


def test_a_first_chunk_needs_blocks_for_itself_or_for_the_whole_length() -> None:
    chunk = KVRules(allocate="chunk")
    assert status(32, chunk=4, used=7, rules=chunk) is AllocStatus.OK  # 10 - 7 - 1 = 2
    assert status(32, chunk=4, used=7, rules=KVRules("chunk", full_length_must_fit=True)) is AllocStatus.LATER
    assert status(32, chunk=4, used=7, rules=KVRules("whole")) is AllocStatus.LATER
    assert status(33, chunk=4, rules=chunk) is AllocStatus.NEVER


@pytest.mark.parametrize(
    ("share", "extra", "expected"), [(0.01, 0, 0), (0.01, 1, 1), (0.25, 0, 24), (0.0, 1, 0), (0.999, 0, 98)]
)
def test_the_watermark_is_rounded_down(share: float, extra: int, expected: int) -> None:
    blocks = make_blocks(num_blocks=99, watermark=share, rules=KVRules(watermark_extra_blocks=extra))
    assert blocks.watermark_blocks == expected


def test_hit_blocks_need_no_room_but_stop_counting_as_free() -> None:
    blocks = make_blocks(num_blocks=4, block_size=4, watermark=0.25)
    first = Sequence(0, make_request("a", range(8)), 4096)
    blocks.admit(first, 8, blocks.lookup(first))
    blocks.prefixes.publish(first, 8)
    again = Sequence(1, make_request("b", range(12)), 4096)
    hit = blocks.lookup(again)
    assert (hit.num_tokens, hit.num_unreferenced) == (8, 0)
    assert blocks.can_admit(again, 12, hit, is_idle=False) is AllocStatus.OK  # 2 free, 1 needed, 1 left
    blocks.free(first)
    hit = blocks.lookup(again)
    assert (hit.num_tokens, hit.num_unreferenced) == (8, 2)
    assert blocks.can_admit(again, 12, hit, is_idle=False) is AllocStatus.OK  # 4 free, 2 of them hit, 1 needed, 1 left
    longer = Sequence(2, make_request("c", [*range(8), *range(50, 55)]), 4096)
    assert (
        blocks.can_admit(longer, 13, blocks.lookup(longer), is_idle=False) is AllocStatus.NEVER
    )  # 4 blocks and 1 kept


def test_a_watermark_that_does_not_hold_for_a_request_alone_is_no_reason_against_it() -> None:
    rules = KVRules(watermark_when_idle=False)
    scheduler = make_scheduler("unified", num_blocks=10, block_size=4, watermark=0.2, rules=rules)
    add(scheduler, make_request("too long", 41, 1))
    _, finished = step(scheduler)
    assert finished[0].message == "41 tokens need 11 KV blocks beside a watermark of 0, and the pool has 10"
    scheduler = make_scheduler("unified", num_blocks=10, block_size=4, lookahead_slots=3)
    add(scheduler, make_request("too long with lookahead", 40, 1))
    _, finished = step(scheduler)
    assert finished[0].message == (
        "40 tokens and 3 lookahead slots need 11 KV blocks beside a watermark of 0, and the pool has 10"
    )


@pytest.mark.parametrize("composition", ["prefill_first", "decode_first", "unified"])
def test_what_can_never_fit_ends_at_once_and_says_why(composition: str) -> None:
    scheduler = make_scheduler(composition, num_blocks=10, block_size=4, watermark=0.2)
    add(scheduler, make_request("runs", 8, 9))
    step(scheduler)
    add(scheduler, make_request("too long", 33, 1), make_request("next", 4, 9))
    plan, finished = step(scheduler)
    assert ignored(plan) == ["too long"]
    assert [(item.reason, item.num_output_tokens) for item in finished] == [(FinishReason.IGNORED, 0)]
    message = "33 tokens need 9 KV blocks beside a watermark of 2, and the pool has 10"
    assert finished[0].message == plan.ignored[0].reason == message
    assert "next" in scheduled(plan), "the next in the queue is looked at in the same step"


@pytest.mark.parametrize("composition", ["prefill_first", "decode_first", "unified"])
def test_a_prompt_that_fits_later_waits_for_blocks(composition: str) -> None:
    scheduler = make_scheduler(composition, num_blocks=10, block_size=4, watermark=0.2)
    add(scheduler, make_request("first", 20, 3), make_request("second", 16, 1))
    plan, _ = step(scheduler)
    assert scheduled(plan) == {"first": 20}
    assert plan.blocked_by is BlockedBy.KV_BLOCKS
    assert [item.reason for item in drain(scheduler)] == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize("composition", ["prefill_first", "decode_first", "unified"])
def test_decoding_grows_into_the_watermark(composition: str) -> None:
    scheduler = make_scheduler(composition, num_blocks=4, block_size=4, watermark=0.5)
    add(scheduler, make_request("a", 8, 9))
    step(scheduler)
    assert scheduler.free_gpu_blocks == 2
    frees = []
    while scheduler.has_work:
        plan, finished = step(scheduler)
        assert not plan.preempted
        frees.append(scheduler.free_gpu_blocks)
    assert frees == [1] * 4 + [0] * 4  # positions 8 to 11, then 12 to 15
    assert finished[0].num_output_tokens == 9


def test_a_sequence_that_outgrows_the_whole_pool_ends_as_ignored() -> None:
    scheduler = make_scheduler("unified", num_blocks=2, block_size=4, limits=make_limits())
    add(scheduler, make_request("a", 4, 20))
    finished = drain(scheduler)
    assert finished[0].reason is FinishReason.IGNORED
    assert finished[0].num_output_tokens == 5  # at 4, and after each of the positions 4 to 7
    assert finished[0].message == "9 tokens need 3 KV blocks beside a watermark of 0, and the pool has 2"
