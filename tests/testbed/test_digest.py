"""The digest: equal for equal decisions, on every machine; different as soon as one differs."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Sequence as Seq
from pathlib import Path
from struct import pack

import pytest
from xxhash import xxh64_intdigest

from testbed.blocks.config import KVRules
from testbed.core.digest import VERSION
from testbed.core.outcome import FinishReason, Outcome, StepResult
from testbed.core.plan import PreemptionMode
from testbed.core.request import Request, SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.policies.preemption import Swap
from tests.properties.life import shuffle_blocks
from tests.testbed.core_kit import COMPOSITIONS, make_limits, make_request, make_scheduler
from tests.testbed.stepping import add, drain, step, steps

CHUNK = KVRules(allocate="chunk")
Pairs = Seq[tuple[int, int]]
GOLDEN = 850591090358792734


def busy_requests() -> list[Request]:
    """Shared prefixes, and more than a pool of 14 blocks of 2 tokens holds: hits, evictions, preemptions."""
    return [make_request(f"r{i}", [*range(i % 3 * 2), *range(100 + i, 104 + i)], 9) for i in range(8)]


def digests(scheduler: Scheduler, requests: list[Request]) -> list[int]:
    add(scheduler, *requests)
    return [scheduler.digest for _ in steps(scheduler)]


def final(requests: list[Request], composition: str = "unified", **options: object) -> int:
    return digests(make_scheduler(composition, **options), requests)[-1]  # type: ignore[arg-type]


def test_it_is_zero_before_the_first_step_and_moves_with_every_step() -> None:
    scheduler = make_scheduler()
    assert scheduler.digest == 0
    values = digests(scheduler, [make_request("a", 4, 20)])
    assert len(set(values)) == 20


def test_equal_decisions_have_equal_digests_whatever_the_tokens_and_ids() -> None:
    one = final([make_request("a", 5, 3), make_request("b", 4, 2)])
    other = final([make_request("x", 5, 3), make_request("y", 4, 2)])
    assert one == other


def test_every_kind_of_decision_counts() -> None:
    """Pairs of runs that differ in one decision."""
    base = [make_request("a", 4, 3), make_request("b", 4, 3)]
    seen = {
        "the base": final(base),
        "one token more": final([make_request("a", 5, 3), base[1]]),
        "one step more": final([make_request("a", 4, 4), base[1]]),
        "another pool": final(base, num_blocks=63),
        "a chunk": final(base, limits=make_limits(budget=7)),
        "one at a time": final(base, limits=make_limits(seqs=1)),
        "an ignored request": final([*base, make_request("c", 9, 1)], limits=make_limits(model_len=8)),
    }
    assert len(set(seen.values())) == len(seen), seen


def test_the_reason_of_an_end_counts() -> None:
    values = []
    for stop in (FinishReason.STOP, FinishReason.LENGTH):
        scheduler = make_scheduler()
        add(scheduler, make_request("a", 4, None))
        scheduler.plan(0)
        scheduler.commit(StepResult(1, (Outcome(0, (1,), stop),)), 1)
        values.append(scheduler.digest)
    assert values[0] != values[1]


def test_an_abort_counts_in_the_step_after_it() -> None:
    values = []
    for aborts in (True, False):
        scheduler = make_scheduler(limits=make_limits(seqs=1))
        add(scheduler, make_request("a", 4, 3), make_request("b", 4, 3))
        step(scheduler)
        if aborts:
            scheduler.abort("b", 0)
        step(scheduler)  # the same row either way: b was waiting
        values.append(scheduler.digest)
    assert values[0] != values[1]


def test_time_does_not_count() -> None:
    values = []
    for scale in (1, 1000):
        scheduler = make_scheduler()
        add(scheduler, make_request("a", 4, 3))
        for number in range(3):
            scheduler.plan(number * scale)
            scheduler.commit(StepResult((number + 1) * scale), (number + 1) * scale)
        values.append(scheduler.digest)
    assert values[0] == values[1]


def test_physical_block_ids_do_not_count() -> None:
    values = []
    for seed in range(4):
        scheduler = make_scheduler("unified", num_blocks=14, block_size=2, rules=CHUNK)
        shuffle_blocks(scheduler.blocks, seed)
        values.append(digests(scheduler, busy_requests()))
    assert all(value == values[0] for value in values)


def test_looking_at_the_rows_changes_nothing() -> None:
    plain = make_scheduler("unified", num_blocks=14, block_size=2, rules=CHUNK)
    looked = make_scheduler("unified", num_blocks=14, block_size=2, rules=CHUNK)
    expected = digests(plain, busy_requests())
    add(looked, *busy_requests())
    for value in expected:
        plan = looked.plan(0)
        assert [(row.num_tokens) for row in plan.scheduled] == [num_tokens for _, num_tokens in plan.num_scheduled]
        looked.commit(StepResult(1), 1)
        assert looked.digest == value


PROGRAM = """
from tests.testbed.test_digest import busy_requests, digests
from tests.testbed.core_kit import COMPOSITIONS, make_scheduler
from testbed.blocks.config import KVRules
for name in COMPOSITIONS:
    for rules in (KVRules(), KVRules(allocate="chunk", full_length_must_fit=True, hits_visible="allocation")):
        scheduler = make_scheduler(name, num_blocks=14, block_size=2, rules=rules)
        print(*(f"{value:016x}" for value in digests(scheduler, busy_requests())))
"""


def test_every_process_computes_the_same_whatever_its_hash_seed() -> None:
    root = Path(__file__).parents[2]
    printed = []
    for seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, cwd=root, capture_output=True, text=True, check=True
        )
        printed.append(done.stdout)
    assert printed[0].count("\n") == 6
    assert printed[0] == printed[1] == printed[2]


def test_the_busy_run_is_busy() -> None:
    scheduler = make_scheduler("unified", num_blocks=14, block_size=2, rules=CHUNK)
    add(scheduler, *busy_requests())
    num_preempted = 0
    for plan, _ in steps(scheduler):
        num_preempted += len(plan.preempted)
    assert num_preempted > 0
    assert scheduler.blocks.prefixes.num_hit_tokens > 0
    assert drain(scheduler) == []


def q64(values: Seq[int]) -> bytes:
    return array("q", values).tobytes()


REASON_CODES = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.IGNORED, FinishReason.DROPPED]


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_it_is_made_as_its_module_says(composition: str) -> None:
    """Once more, from nothing but the plans and what came of them: other code, the same numbers. Every field counts."""
    scheduler = make_scheduler(composition, num_blocks=14, num_cpu_blocks=5, block_size=2, preemption=Swap())
    add(scheduler, *busy_requests(), make_request("n", 4, 3, sampling=SamplingParams(n=2)), make_request("big", 99, 1))
    digest = 0
    seen: set[tuple[int, object]] = set()  # kinds of events, with what else tells them apart
    while scheduler.has_work:
        events: list[int] = []
        if scheduler.num_steps == 9:
            (aborted,) = [seq.seq_id for seq in scheduler.unfinished() if seq.request_id == "r7"]
            scheduler.abort("r7", 0)
            events += (5, aborted)
        plan = scheduler.plan(0)
        rows = plan.scheduled
        known = {seq.request.request_id: seq.seq_id for seq in scheduler.unfinished()}
        before = {seq.seq_id for seq in scheduler.unfinished()}
        for seq_id, _, num_cached, is_resumed in plan.admitted:
            events += (1, seq_id, num_cached, is_resumed)
            seen |= {(1, is_resumed), (1, "hit" if num_cached else "none")}
        for seq_id, _, mode, num_computed in plan.preempted:
            events += (2, seq_id, num_computed, 1 if mode is PreemptionMode.SWAP else 0)
            seen.add((2, mode))
        for seq_id, _, _ in plan.ignored:
            events += (3, seq_id)
            seen.add((3, "ignored"))
        if plan.swap_out or plan.swap_in:
            events += (6, len(plan.swap_out), len(plan.swap_in))
            seen.add((6, "out" if plan.swap_out else "in"))
        free = scheduler.blocks.num_free_blocks, scheduler.blocks.num_free_cpu_blocks
        ends = {row.seq_id: row for row in rows}
        live = {seq.seq_id: seq for seq in scheduler.unfinished()}
        limits = {seq_id: (seq.num_tokens, seq.token_limit) for seq_id, seq in live.items()}
        scheduler.commit(StepResult(1), 1)
        for seq in scheduler.unfinished():
            if seq.seq_id not in before:  # a member that has just forked
                events += (7, known[seq.request.request_id], seq.seq_id)
                seen.add((7, "fork"))
        for seq_id, row in ends.items():
            num_tokens, limit = limits[seq_id]
            if row.samples and num_tokens + 1 == limit:
                events += (4, seq_id, REASON_CODES.index(FinishReason.LENGTH))
        members = [row.seq_id for row in rows] + [row.num_tokens for row in rows]
        digest = xxh64_intdigest(pack("<QQqq", digest, xxh64_intdigest(q64(members)), *free) + q64(events))
        assert scheduler.digest == digest, plan
        assert int.from_bytes(scheduler.digest_bytes, "big") == digest
    assert seen == {
        (1, "hit"), (1, "none"), (1, False), (1, True), (2, PreemptionMode.SWAP), (3, "ignored"), (6, "out"), (6, "in"),
        (2, PreemptionMode.RECOMPUTE),  # where the CPU pool was full
        (7, "fork"),
    }  # fmt: skip


def test_another_definition_is_another_version() -> None:
    """Tapes compare digests: whoever changes what this value is must also raise `testbed.core.digest.VERSION`."""
    assert (VERSION, final(busy_requests(), num_blocks=14, block_size=2, rules=CHUNK)) == (2, GOLDEN)
