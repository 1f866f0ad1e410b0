"""No shipped policy sees the future: it decides alike whether a request's output is given beforehand or drawn.

The same tokens come in both runs. In one the requests carry them (`forced_output`), as those of a trace do; in the
other they do not: nothing that a policy can reach says how long they are, and the device tells the last one.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import pytest

from experiments.configuration.policies import POLICIES
from testbed.composites import declared
from testbed.core.limits import Limits
from testbed.core.outcome import FinishReason, Outcome, StepResult
from testbed.core.request import Request, SamplingParams
from testbed.errors import LivelockError
from testbed.policies.orders import KeyedQueue
from tests.properties import policies
from tests.properties.setups import NS_PER_S, Setup, presets, random_setup

MAX_STEPS = 400
TIGHT = Setup(limits=Limits(6, 24, 60, 0, 2), num_blocks=18, num_cpu_blocks=8, watermark=0.05)


class Job(NamedTuple):
    """A request and the tokens that it will emit."""

    request: Request
    output: array[int]

    def given(self, *, is_hidden: bool) -> Request:
        return self.request if is_hidden else self.request.replace(forced_output=self.output)


def jobs_of(seed: int, num: int = 24) -> list[Job]:
    """Prompts share beginnings; outputs are from one token to many, of which some are declared (`max_tokens`)."""
    rng = random.Random(seed)
    shared = [rng.randrange(2, 9) for _ in range(12)]
    jobs = []
    for number in range(num):
        prompt = shared[: rng.choice((0, 4, 8, 12))] + [rng.randrange(2, 9) for _ in range(rng.randint(1, 14))]
        output = array("i", [rng.randrange(2, 9) for _ in range(rng.choice((1, 2, 6, 15, 30)))])
        arrival_ns = number // 3 * NS_PER_S
        deadline_ns = rng.choice((None, arrival_ns + rng.randrange(20) * NS_PER_S))
        jobs.append(
            Job(
                Request(
                    f"r{number}", array("i", prompt), arrival_ns=arrival_ns, tenant=rng.choice((None, "a", "b")),
                    sampling=SamplingParams(max_tokens=rng.choice((None, 30)), ignore_eos=True),
                    priority=rng.randrange(3), deadline_ns=deadline_ns,
                ),
                output,
            )
        )  # fmt: skip
    return jobs


def decided(setup: Setup, jobs: Sequence[Job], *, is_hidden: bool) -> list[Any]:
    """The plan of each step, as far as the run comes, and the digest after it."""
    scheduler = setup.scheduler()
    outputs = {job.request.request_id: job.output for job in jobs}
    emitted: dict[str, int] = dict.fromkeys(outputs, 0)
    pending, steps = list(jobs), []
    for number in range(MAX_STEPS):
        now_ns = number * NS_PER_S
        while pending and pending[0].request.arrival_ns <= now_ns:
            scheduler.add(pending.pop(0).given(is_hidden=is_hidden))
        if not scheduler.has_work:
            if not pending:
                break
            continue
        try:
            plan = scheduler.plan(now_ns)
        except LivelockError:  # a policy that spares nobody; so it is in both runs
            steps.append("livelock")
            break
        steps.append(
            (plan.num_scheduled, plan.preempted, plan.admitted, plan.swapped_in, plan.ignored, plan.blocked_by)
        )
        outcomes = []
        for (name, _), row in zip(plan.num_scheduled, plan.scheduled, strict=True):
            if row.samples:
                emitted[name] += 1
                is_last = emitted[name] == len(outputs[name])
                token = outputs[name][emitted[name] - 1]
                outcomes.append(Outcome(row.seq_id, (token,), FinishReason.LENGTH if is_last else None))
        scheduler.commit(StepResult(now_ns + 1, tuple(outcomes) if is_hidden else None), now_ns + 1)
        steps.append(scheduler.digest)
    return steps


def is_blind(setup: Setup, seed: int) -> bool:
    given, hidden = (decided(setup, jobs_of(seed), is_hidden=is_hidden) for is_hidden in (False, True))
    assert len(given) > 20, "hardly anything was decided"
    return given == hidden


KINDS: tuple[tuple[str, Any], ...] = (
    ("composition", policies.COMPOSITIONS), ("queue", policies.QUEUES), ("admission", policies.ADMISSIONS),
    ("preemption", policies.PREEMPTIONS), ("victim", policies.VICTIMS), ("eviction", policies.EVICTIONS),
)  # fmt: skip
KEYS = {"queue": "scheduler.queue_order", "admission": "scheduler.admission", "victim": "scheduler.victim"}
EACH = [(kind, name) for kind, known in KINDS for name in known if name not in policies.NEED_AN_ORACLE]


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_a_policy_decides_alike_where_the_output_s_length_is_nowhere_to_be_read(kind: str, name: str) -> None:
    more: dict[str, Any] = {}
    if kind == "eviction" and "last step" in name:
        more["rules"] = next(one["rules"] for one in presets().values() if one["rules"].lru_by == "last_step")
    for composition in (name,) if kind == "composition" else ("unified", "prefill_first"):
        setup = replace(TIGHT, **{"composition": composition, kind: name, **more})
        assert all(is_blind(setup, seed) for seed in range(3))


@pytest.mark.parametrize("name", [name for name, one in presets().items() if one.get("oracle", "none") == "none"])
def test_a_preset_without_an_oracle_does(name: str) -> None:
    assert all(is_blind(replace(TIGHT, **presets()[name]), seed) for seed in range(3))


def test_any_mixture_of_policies_without_an_oracle_does() -> None:
    rng, num = random.Random(5), 0
    while num < 40:
        setup = random_setup(rng)
        chosen = {setup.queue, setup.admission, setup.victim}
        is_roomy = setup.limits.max_model_len >= 60 and setup.limits.max_num_batched_tokens >= 32
        if setup.oracle == "none" and chosen.isdisjoint(policies.NEED_AN_ORACLE) and is_roomy:
            num += 1
            assert is_blind(setup, num), setup


def test_a_policy_that_peeks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    peeks: dict[str, Callable[[Any], int]] = {
        "by forced_output": lambda seq: len(seq.request.forced_output or ()),
        "by token_limit": lambda seq: seq.token_limit,
    }
    knows: dict[str, Callable[[Any], int]] = {"by tokens": lambda seq: len(seq.tokens)}  # the known ones
    for name, key in (peeks | knows).items():
        peeking = partial(KeyedQueue, lambda seq, key=key: (key(seq), seq.seq_id))
        monkeypatch.setitem(cast(dict[str, Any], policies.QUEUES), name, peeking)
        assert is_blind(replace(TIGHT, queue=name), 0) == (name in knows), name
    assert not is_blind(replace(TIGHT, oracle="perfect", victim="longest_remaining"), 0), "it was given an oracle"


# --- what the configuration says of the policies that have names: notes of runs go by it ---

ASKED_ABOUT = [(kind, name) for kind in ("queue", "admission", "victim") for name in POLICIES[KEYS[kind]]]


class Predictor:
    """Keeps of whom it was asked."""

    is_none = False

    def __init__(self) -> None:
        self.seqs: list[Any] = []

    def predict(self, seq: Any) -> int:
        self.seqs.append(seq)
        return 7


@pytest.mark.parametrize(("kind", "name"), ASKED_ABOUT)
def test_which_policies_ask_for_lengths_is_known(monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    predictor = Predictor()
    monkeypatch.setitem(cast(dict[str, Any], policies.ORACLES), "mine", lambda: predictor)
    decided(replace(TIGHT, oracle="mine", **{kind: name}), jobs_of(1), is_hidden=True)
    assert bool(predictor.seqs) == ("oracle" in declared(POLICIES[KEYS[kind]][name](), "asks", ()))


@pytest.mark.parametrize(("kind", "name"), ASKED_ABOUT)
def test_what_policies_go_by_is_known(kind: str, name: str) -> None:
    setup, jobs = replace(TIGHT, oracle="perfect", **{kind: name}), jobs_of(2)
    decisions = decided(setup, jobs, is_hidden=False)
    found = []
    for field, same in (("priority", 0), ("tenant", "a"), ("deadline_ns", None)):
        alike = [job._replace(request=job.request.replace(**{field: same})) for job in jobs]
        found += [field.removesuffix("_ns")] * (decided(setup, alike, is_hidden=False) != decisions)
    goes_by = declared(POLICIES[KEYS[kind]][name](), "goes_by", "")
    assert found == ([goes_by] if goes_by else [])
