"""Decodes that are kept from step to step decide exactly as decodes that are looked at one by one."""

from __future__ import annotations

import random
from array import array
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.blocks.config import KVRules
from testbed.blocks.manager import BlockManager
from testbed.core.limits import Limits
from testbed.core.outcome import FinishReason, Outcome, StepResult
from testbed.core.plan import BatchPlan
from testbed.core.request import Request, SamplingParams
from testbed.policies.preemption import Auto, Recompute, Swap
from testbed.policies.victim import LeastProgress, MostRecentlyAdmitted
from tests.testbed.core_kit import ALL_COMPOSITIONS, make_scheduler

RULES = {
    "default": KVRules(),
    "chunk": KVRules(allocate="chunk"),
    "allocation": KVRules(allocate="chunk", hits_visible="allocation"),
    "one free block each": KVRules(growth_test="one_per_sequence"),
    "replaced": KVRules(duplicates="replaced", free_order="one_queue"),
    "one queue": KVRules(allocate="chunk", hits_visible="allocation", free_order="one_queue"),
    "back in the next step": KVRules(victims_return="next_step"),
}


def random_options(rng: random.Random) -> dict[str, Any]:
    budget = rng.choice((2, 3, 6, 16, 64))
    partial = rng.choice((1, 2, 3))
    return {
        "limits": Limits(rng.choice((2, 4, 8)), budget, rng.choice((20, 64)), rng.choice((0, 2)), partial),
        "num_blocks": rng.randint(6, 24),
        "num_cpu_blocks": rng.choice((0, 4, 30)),
        "block_size": rng.choice((1, 2, 3, 4)),
        "watermark": rng.choice((0.0, 0.1)),
        "caching": rng.random() < 0.7,
        "rules": RULES[rng.choice(list(RULES))],
        "preemption": rng.choice((Auto, Recompute, Swap))(),
        "victims": rng.choice((MostRecentlyAdmitted, LeastProgress))(),
        "eos_token_id": 1,
    }


def random_request(rng: random.Random, number: int, *, has_groups: bool) -> Request:
    """Few distinct tokens: sequences that say the same fill blocks of equal content, side by side."""
    text = [rng.choice((0, 2)) for _ in range(rng.choice((0, 0, 1)))] + [2] * rng.randint(1, 9)
    num_output = rng.randint(1, 12)
    num_seqs = rng.choice((1, 1, 2, 3)) if has_groups else 1
    forced = array("i", [2] * num_output) if rng.random() < 0.5 else None
    sampling = SamplingParams(max_tokens=num_output, n=num_seqs, stop_token_ids=rng.choice(((), (3,))))
    return Request(f"r{number}", array("i", text), forced_output=forced, sampling=sampling)


def drawn(plan: BatchPlan) -> tuple[Outcome, ...]:
    """A token for each row that is not forced, by its sequence and position alone; some stop it."""
    outcomes = []
    for row in plan.scheduled:
        if row.samples and not row.forced:
            rng = random.Random(f"{row.seq_id} {row.start + row.num_tokens}")
            tokens = [rng.choice((2, 2, 2, 2, 2, 2, 1, 3)) for _ in range(row.num_samples)]
            stop = FinishReason.STOP if rng.random() < 0.02 else None
            outcomes.append(Outcome(row.seq_id, (tokens[0],), stop, tuple(tokens[1:])))
    return tuple(outcomes)


class Run:
    """A random life of a scheduler; the same for the same seed."""

    def __init__(self, composition: str, seed: int, *, one_by_one: bool) -> None:
        self.rng = random.Random(seed)
        self.scheduler = make_scheduler(composition, **random_options(self.rng))
        self.has_groups = self.rng.random() < 0.3
        self.one_by_one = one_by_one
        self.seen: list[Any] = []
        self.num_in_step = 0  # decodes that were not looked at one by one
        self.num_preempted = 0

    def live(self, num_events: int = 60) -> Run:
        if not self.one_by_one:
            return self._live(num_events)
        with patch.object(BlockManager, "is_plain", new_callable=PropertyMock, return_value=False):
            return self._live(num_events)

    def _live(self, num_events: int) -> Run:
        for number in range(num_events):
            choice = self.rng.random()
            if choice < 0.3:
                self.scheduler.add(random_request(self.rng, number, has_groups=self.has_groups))
            elif choice < 0.33 and self.scheduler.has_work:
                live = sorted({seq.request.request_id for seq in self.scheduler.unfinished()})
                self.scheduler.abort(self.rng.choice(live))
                self.scheduler.check_invariants()
            else:
                self.step()
        for _ in range(1500):
            if not self.scheduler.has_work:
                break
            self.step()
        return self

    def step(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.plan(0)
        if plan.is_empty:
            return
        scheduler.check_invariants()
        assert scheduler._step is not None
        self.num_in_step += len(scheduler._step.decoded)
        self.num_preempted += len(plan.preempted)
        finished = scheduler.commit(StepResult((1,), drawn(plan)), 1)
        scheduler.check_invariants()
        self.seen.append(
            {
                "scheduled": plan.num_scheduled,
                "shape": plan.shape,
                "free": (scheduler.free_gpu_blocks, scheduler.free_cpu_blocks),
                "admitted": plan.admitted,
                "preempted": plan.preempted,
                "ignored": plan.ignored,
                "swaps": (len(plan.swap_out), plan.swapped_in, len(plan.copies)),
                "blocked_by": plan.blocked_by,
                "finished": [(item.request.request_id, item.reason, item.output_token_ids) for item in finished],
                "digest": scheduler.digest,
            }
        )


def check(composition: str, seed: int) -> None:
    in_step = Run(composition, seed, one_by_one=False).live()
    alone = Run(composition, seed, one_by_one=True).live()
    assert alone.num_in_step == 0
    for number, (found, expected) in enumerate(zip(in_step.seen, alone.seen, strict=False)):
        assert found == expected, f"step {number} of seed {seed}"
    assert len(in_step.seen) == len(alone.seen)


@pytest.mark.parametrize("composition", ALL_COMPOSITIONS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_every_plan_is_that_of_looking_at_each(composition: str, seed: int) -> None:
    check(composition, seed)


@pytest.mark.parametrize(
    ("composition", "seed"),
    [
        ("unified", 83),  # several cross a border at once, and not in the order in which they joined
        ("unified", 209),
        ("decode_first", 78),  # what was swapped in runs before those that decode already
        ("decode_first", 103),
        ("prefill_decode_split", 258),  # what was swapped in decodes with the others
        ("prefill_decode_split", 268),
    ],
)
def test_lives_that_once_differed_do_not(composition: str, seed: int) -> None:
    check(composition, seed)


@pytest.mark.parametrize("composition", ["unified", "prefill_first", "iteration_level", "static", "decode_first"])
def test_these_lives_are_busy(composition: str) -> None:
    runs = [Run(composition, seed, one_by_one=False).live() for seed in range(12)]
    assert sum(run.num_in_step for run in runs) > 100
    assert sum(run.num_preempted for run in runs) > 10
    assert sum(run.scheduler.blocks.num_hit_tokens for run in runs) > 10
    assert any(run.has_groups for run in runs)
