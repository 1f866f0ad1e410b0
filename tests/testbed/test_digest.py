"""The digest: equal for equal decisions, on every machine; different as soon as one differs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from testbed.blocks.config import KVRules
from testbed.digest import VERSION, plan_events
from testbed.plan import Admission, FinishReason, Outcome, Preemption, PreemptionMode, StepResult
from testbed.policies.queue_order import FCFS
from testbed.policies.victim import MostRecentlyAdmitted
from testbed.request import Request
from testbed.scheduler import Scheduler
from testbed.step import Step
from tests.testbed.core_kit import add, drain, make_blocks, make_limits, make_request, make_scheduler, step

CHUNK = KVRules("chunk")
GOLDEN = 6812019850714719458


def busy_requests() -> list[Request]:
    """Shared prefixes, and more than a pool of 14 blocks of 2 tokens holds: hits, evictions, preemptions."""
    return [make_request(f"r{i}", [*range(i % 3 * 2), *range(100 + i, 104 + i)], 9) for i in range(8)]


def digests(scheduler: Scheduler, requests: list[Request]) -> list[int]:
    add(scheduler, *requests)
    values = []
    while scheduler.has_work:
        step(scheduler)
        values.append(scheduler.digest)
    return values


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


def events_of(*, admitted: Admission | None = None, preempted: Preemption | None = None) -> list[int]:
    empty = Step(0, make_limits(), make_blocks(), FCFS(), {}, {}, MostRecentlyAdmitted())
    empty.admitted += [admitted] if admitted else []
    empty.preempted += [preempted] if preempted else []
    return plan_events(empty)


def test_every_field_of_an_admission_and_of_a_preemption_counts() -> None:
    recompute = PreemptionMode.RECOMPUTE
    events = [
        events_of(),
        events_of(admitted=Admission(0, "a", 0, False)),
        events_of(admitted=Admission(1, "a", 0, False)),
        events_of(admitted=Admission(0, "a", 4, False)),
        events_of(admitted=Admission(0, "a", 0, True)),
        events_of(preempted=Preemption(0, "a", recompute, 0)),
        events_of(preempted=Preemption(1, "a", recompute, 0)),
        events_of(preempted=Preemption(0, "a", recompute, 4)),
    ]
    assert len({tuple(item) for item in events}) == len(events)
    assert events_of(admitted=Admission(0, "a", 4, True)) == events_of(admitted=Admission(0, "b", 4, True))


def test_the_reason_of_an_end_counts() -> None:
    values = []
    for stop in (FinishReason.STOP, FinishReason.LENGTH):
        scheduler = make_scheduler()
        add(scheduler, make_request("a", 4, None))
        scheduler.plan(0)
        scheduler.commit(StepResult((1,), (Outcome(0, (1,), stop),)), 1)
        values.append(scheduler.digest)
    assert values[0] != values[1]


def test_an_abort_counts_in_the_step_after_it() -> None:
    values = []
    for aborts in (True, False):
        scheduler = make_scheduler(limits=make_limits(seqs=1))
        add(scheduler, make_request("a", 4, 3), make_request("b", 4, 3))
        step(scheduler)
        if aborts:
            scheduler.abort("b")
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
            scheduler.commit(StepResult(((number + 1) * scale,)), (number + 1) * scale)
        values.append(scheduler.digest)
    assert values[0] == values[1]


def test_physical_block_ids_do_not_count() -> None:
    values = []
    for seed in range(4):
        scheduler = make_scheduler("unified", num_blocks=14, block_size=2, rules=CHUNK)
        random.Random(seed).shuffle(scheduler.blocks._pool._free)
        values.append(digests(scheduler, busy_requests()))
    assert all(value == values[0] for value in values)


def test_looking_at_the_rows_changes_nothing() -> None:
    plain = make_scheduler("unified", num_blocks=14, block_size=2, rules=CHUNK)
    looked = make_scheduler("unified", num_blocks=14, block_size=2, rules=CHUNK)
    expected = digests(plain, busy_requests())
    add(looked, *busy_requests())
    for value in expected:
        plan = looked.plan(0)
        assert len(plan.scheduled) == len(plan.num_scheduled or ())
        looked.commit(StepResult((1,)), 1)
        assert looked.digest == value


PROGRAM = """
from tests.testbed.test_digest import busy_requests, digests
from tests.testbed.core_kit import COMPOSITIONS, make_scheduler
from testbed.blocks.config import KVRules
for name in COMPOSITIONS:
    for rules in (KVRules(), KVRules("chunk", True, "allocation", False, 1)):
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
    while scheduler.has_work:
        plan, _ = step(scheduler)
        num_preempted += len(plan.preempted)
    assert num_preempted > 0
    assert scheduler.blocks.num_hit_tokens > 0
    assert drain(scheduler) == []


def test_another_definition_is_another_version() -> None:
    """Tapes compare digests: whoever changes what this value is must also raise `testbed.digest.VERSION`."""
    assert (VERSION, final(busy_requests(), num_blocks=14, block_size=2, rules=CHUNK)) == (1, GOLDEN)
