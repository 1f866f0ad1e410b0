"""A reset of the prefix cache: whatever was computed before is neither used nor found any more."""

from __future__ import annotations

import pytest

from testbed.blocks.config import KVRules
from testbed.core.outcome import FinishReason, Outcome
from testbed.core.plan import RESET, PreemptionMode
from testbed.core.request import SamplingParams
from testbed.policies.preemption import Swap
from tests.testbed.core_kit import make_limits, make_request, make_scheduler
from tests.testbed.stepping import add, cached, commit, drain, preempted, scheduled, step, step_with


def test_who_ran_stands_first_in_the_queue_as_it_ran_and_may_run_in_the_same_step() -> None:
    scheduler = make_scheduler("unified", limits=make_limits(seqs=2))
    add(scheduler, *[make_request(name, 4, 3) for name in "abc"])
    step(scheduler)
    scheduler.reset_prefixes()
    plan, _ = step(scheduler)
    assert preempted(plan) == ["b", "a"]
    assert plan.preempted_for == (RESET, RESET)
    assert [item.num_computed_tokens for item in plan.preempted] == [4, 4]
    assert scheduled(plan) == {"a": 5, "b": 5}
    assert [item.is_resumed for item in plan.admitted] == [True, True]
    assert scheduler.num_waiting == 1
    assert len(drain(scheduler)) == 3


def test_nobody_finds_a_prefix_from_before() -> None:
    scheduler = make_scheduler("unified", caching=True, block_size=4)
    prompt = list(range(12))
    for name in "ab":
        add(scheduler, make_request(name, prompt, 1))
        step(scheduler)
    free = scheduler.blocks.num_free_blocks
    scheduler.reset_prefixes()
    add(scheduler, make_request("c", prompt, 1))
    plan, _ = step(scheduler)
    assert cached(plan) == {"c": 0}
    assert plan.preempted == ()
    add(scheduler, make_request("d", prompt, 1))
    assert cached(step(scheduler)[0]) == {"d": 8}, "what was computed since is found"
    assert scheduler.blocks.num_free_blocks == free
    scheduler.check_invariants()


def test_a_hit_that_a_waiting_request_was_promised_is_forgotten() -> None:
    rules = KVRules(duplicates="merged", hits_visible="plan", hits_frozen=True)
    scheduler = make_scheduler("prefill_first", rules=rules, caching=True, block_size=4, limits=make_limits(seqs=1))
    prompt = list(range(12))
    add(scheduler, make_request("a", prompt, 1))
    step(scheduler)
    add(scheduler, make_request("b", [7, 7], 9), make_request("c", prompt, 1))
    step(scheduler)
    c = scheduler.unfinished()[1]
    scheduler.blocks.lookup(c)
    assert c.chain is not None
    assert c.chain.frozen_hit == 8
    scheduler.reset_prefixes()
    plan, _ = step(scheduler)
    assert preempted(plan) == ["b"]
    assert scheduler.blocks.lookup(c).num_tokens == 0
    assert len(drain(scheduler)) == 2


def test_who_is_swapped_out_is_computed_again_whatever_the_policy_wishes() -> None:
    scheduler = make_scheduler(
        "unified", preemption=Swap(), block_size=4, num_blocks=4, num_cpu_blocks=8, limits=make_limits()
    )
    add(scheduler, make_request("a", 8, 6), make_request("b", 7, 6))
    while not scheduler.num_swapped:
        step(scheduler)
    assert scheduler.blocks.num_free_cpu_blocks < 8
    scheduler.reset_prefixes()
    plan, _ = step(scheduler)
    assert preempted(plan) == ["a", "b"]
    assert {item.mode for item in plan.preempted} == {PreemptionMode.RECOMPUTE}
    assert (plan.swap_in, plan.swap_out, scheduler.num_swapped) == ((), (), 0)
    assert scheduler.blocks.num_free_cpu_blocks == 8
    assert {item.reason for item in drain(scheduler)} == {FinishReason.LENGTH}


def test_beams_end_which_cannot_be_computed_again_one_by_one() -> None:
    scheduler = make_scheduler("unified", block_size=4, num_blocks=16)
    add(scheduler, make_request("a", 4, None, sampling=SamplingParams(n=2, beam_width=2)))
    step_with(scheduler, Outcome(0, (5,), forks=(6,)))
    scheduler.reset_prefixes()
    plan, (ended,) = step_with(scheduler)
    assert plan.preempted == ()
    assert ended.reason is FinishReason.IGNORED
    assert ended.message == "2 beams, which cannot be recomputed, lost their KV to a reset of the prefix cache"
    assert not scheduler.has_work
    assert scheduler.blocks.num_free_blocks == 16


@pytest.mark.parametrize("composition", ["unified", "static", "decode_first"])
def test_with_a_plan_in_flight_nobody_enters_before_those_whose_token_is_on_its_way(composition: str) -> None:
    scheduler = make_scheduler(composition, limits=make_limits(seqs=2, plans=2))
    add(scheduler, *[make_request(name, 4, 3) for name in "ab"])
    scheduler.plan(0)
    add(scheduler, make_request("c", 4, 3))
    scheduler.reset_prefixes()
    plan = scheduler.plan(1)
    assert (preempted(plan), scheduled(plan)) == (["b", "a"], {})
    commit(scheduler)
    assert len(scheduler.emitters) == 2, "the tokens on their way came"
    assert scheduled(scheduler.plan(2)) == {"a": 5, "b": 5}
    scheduler.check_invariants()
