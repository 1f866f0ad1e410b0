"""Asynchronous scheduling in the simulator: who waits for whom; worlds of groups and turns, where nothing is lost."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from experiments import simulate
from sim.backend import SimBackend
from sim.driver import drive, run
from sim.recorded_device import RecordedDevice
from testbed.core.commands import Execute, Resume, StepView
from testbed.core.outcome import FinishReason, Spans, StepResult
from testbed.core.plan import BatchPlan, BatchShape
from testbed.core.request import Request, SamplingParams
from testbed.core.serve import serve
from testbed.errors import RunFolderError
from testbed.made_rows import MadeRows
from testbed.records.recorders import Recorders
from testbed.records.tape import Tape, TapeEvent, TapeInbox, TapeStep, TapeWriter, read_tape
from tests.properties.setups import EOS, VOCAB_SIZE, Setup, random_setup
from tests.sim.worlds import Log, Sessions, emitted, price, world

MS = 1_000_000
ROOMY = Setup(limits=replace(Setup().limits, max_num_plans=2), num_blocks=40)


class Parts:
    """A cost model of constant parts, in ms."""

    def __init__(self, schedule: int, prepare: int, forward: int) -> None:
        self._spans = Spans(schedule * MS, prepare * MS, 0, forward * MS, 0)

    def price(self, shape: BatchShape) -> Spans:
        return self._spans


def served(parts: Parts, max_num_plans: int, *, num_tokens: int = 5) -> Log:
    request = Request(
        "a", array("i", [1, 2, 3]), forced_output=array("i", [0] * num_tokens), sampling=SamplingParams(ignore_eos=True)
    )
    setup, log = replace(ROOMY, limits=replace(ROOMY.limits, max_num_plans=max_num_plans)), Log()
    assert run(serve(Sessions([request], [], {}), setup.scheduler(), log), SimBackend(parts)) == log.views[-1].end_ns
    return log


def instants(log: Log) -> list[tuple[int, int]]:
    return [(step.plan_ns // MS, step.end_ns // MS) for step in log.views]


def test_the_host_plans_while_the_device_computes() -> None:
    assert instants(served(Parts(2, 1, 10), 1, num_tokens=3)) == [(0, 13), (13, 26), (26, 39)]
    assert instants(served(Parts(2, 1, 10), 2, num_tokens=3)) == [(0, 13), (3, 23), (13, 33)]


def test_a_slow_host_is_what_the_device_waits_for() -> None:
    assert instants(served(Parts(8, 4, 5), 2, num_tokens=4)) == [(0, 24), (12, 36), (24, 48), (36, 53)]


def test_the_throughput_is_that_of_the_slower_side() -> None:
    ends = [step.end_ns for step in served(Parts(2, 1, 10), 2, num_tokens=50).views]
    assert {after - before for before, after in pairwise(ends)} == {10 * MS}


def test_a_host_that_takes_no_time_costs_none() -> None:
    steps = [(step.plan_ns, step.end_ns) for step in served(Parts(0, 0, 10), 2, num_tokens=3).views]
    assert steps == [(0, 10 * MS), (0, 20 * MS), (10 * MS, 30 * MS)]


class Checked(Log):
    def __init__(self, check: object) -> None:
        super().__init__()
        self._check = check

    def committed(self, step: StepView) -> None:
        super().committed(step)
        self._check()  # type: ignore[operator]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
@example(seed=4_024_923_662)  # a group aborted while a plan in flight ignores its last member
@example(seed=36_831_652)  # at the instant of a look that found nothing another order would have found something
def test_worlds_of_groups_turns_and_aborts_come_to_their_ends(seed: int, tmp_path: Path) -> None:
    """And a tape of them, replayed, decides the same at the same instants."""
    rng = random.Random(seed)
    setup = random_setup(rng)
    setup = replace(setup, limits=replace(setup.limits, max_num_plans=2))
    requests, aborts, turns = world(seed)
    scheduler = setup.scheduler()
    log = Checked(scheduler.check_invariants)
    tape_file = tmp_path / f"{seed}.jsonl"
    writer = TapeWriter(tape_file)
    backend = SimBackend(price(rng), seed=seed, vocab_size=VOCAB_SIZE, eos_token_id=EOS)
    try:
        run(serve(Sessions(requests, aborts, turns), scheduler, Recorders(log, writer)), backend)
    except Exception as error:
        if type(error).__name__ != "LivelockError":
            raise
        return
    writer.close()
    asked = {request.request_id: request for request in [*requests, *turns.values()]}
    for name, reason, _message, tokens, _ns in [event for event in log.events if len(event) == 5]:
        request = asked[str(name)]
        if reason is FinishReason.LENGTH and not request.sampling.num_seqs > 1:
            room = max(1, setup.limits.max_model_len - len(request.prompt_token_ids))
            assert request.forced_output is not None
            assert tokens == list(request.forced_output)[:room]
    tape, again = read_tape(tape_file), Log()
    inbox = TapeInbox(tape, lambda name, arrival_ns: asked[name].replace(arrival_ns=arrival_ns))
    drive(serve(inbox, setup.scheduler(), again), RecordedDevice(tape))
    seen = [(view.digest, view.plan_ns, view.end_ns, emitted(view)) for view in log.views]
    assert [(view.digest, view.plan_ns, view.end_ns, emitted(view)) for view in again.views] == seen


def taped(*events_ns: int, looked_ns: int | None = None, next_ns: int = 50, is_live: bool = False) -> RecordedDevice:
    """Of two steps: from 10 to 90, and from next_ns to 120."""
    steps = [TapeStep(10, 90, None, Spans(), 0, {}, looked_ns), TapeStep(next_ns, 120, None, Spans(), 0, {})]
    return RecordedDevice(Tape(tuple(steps), tuple(TapeEvent("abort", "a", 0, ns, 0) for ns in events_ns), is_live))


def ahead(number: int) -> Execute:
    return Execute(BatchPlan(number, BatchShape(1, 1, (), 1), MadeRows(())), is_ahead=True)


def test_a_replay_looks_again_when_the_loop_did() -> None:
    assert taped(70, looked_ns=40).execute(ahead(0), 0).now_ns == 40
    assert taped(70).execute(ahead(0), 0).now_ns == 50, "it planned the next step"
    assert taped(70).execute(ahead(0), 60).now_ns == 60
    assert taped(5, 20, 70, 90, next_ns=90).execute(ahead(0), 0).now_ns == 70, "the last that it saw came then"
    assert taped(70).execute(ahead(1), 0).now_ns == 70
    assert taped(10, 90, next_ns=90).execute(ahead(0), 0).now_ns == 11
    assert taped(20, is_live=True).execute(ahead(0), 0).now_ns == 11
    assert taped().resume(None, 5) is None
    assert taped().resume(3, 5) == taped().resume(5, 3) == Resume(5)
    with pytest.raises(RunFolderError, match="the tape ends after 2 steps, but the replay goes on"):
        taped().execute(ahead(2), 0)


def test_a_live_loop_is_replayed_from_one_recorded_instant_to_the_next() -> None:
    device = taped(30, 60, is_live=True)
    assert device.resume(None, 0) == device.resume(None, 10) == Resume(10)
    assert device.resume(None, 20) == Resume(30), "as the first step was planned before"
    device.execute(ahead(0), 10)
    assert [device.resume(None, now_ns) for now_ns in (11, 30)] == [Resume(30), Resume(50)]
    device.execute(ahead(1), 50)
    ends = [Resume(ns, StepResult(ns, None, Spans())) for ns in (90, 120)]
    assert [device.resume(None, now_ns) for now_ns in (51, 60, 90)] == [Resume(60), *ends]
    assert [device.resume(until_ns, 120) for until_ns in (None, 200)] == [None, Resume(200)]
    device = taped(90, is_live=True)
    device.execute(ahead(0), 10)
    device.execute(ahead(1), 50)
    assert device.resume(None, 51) == ends[0], "a step's end comes before what is seen at its instant"


@pytest.mark.parametrize("max_num_plans", [1, 2])
def test_an_empty_inbox_ends_at_once(max_num_plans: int) -> None:
    setup = replace(ROOMY, limits=replace(ROOMY.limits, max_num_plans=max_num_plans))
    assert run(serve(Sessions([], [], {}), setup.scheduler(), Log()), SimBackend(Parts(1, 1, 1))) == 0


def test_a_request_that_is_aborted_while_the_plan_that_admits_it_is_in_flight_was_scheduled() -> None:
    """The step computes for it, and the work of the steps is accounted for."""
    rows = [
        {"request_id": "a", "arrival_time": 0.0, "prompt_tokens": 50, "output_tokens": 20},
        {"request_id": "b", "arrival_time": 0.0005, "prompt_tokens": 100, "output_tokens": 20, "cancel_after": 0.03},
    ]
    ahead = simulate(rows, model="tiny", cost={"name": "constant", "step_s": 0.02}, scheduler="vllm_v1_async")
    aborted = ahead.requests.set_index("request_id").loc["b"]
    (step,) = ahead.steps[ahead.steps.num_prefill_tokens == 100].itertuples()
    assert aborted.finish_reason == "abort"
    assert aborted.finish_ns < step.end_ns, "it ended before its step"
    assert aborted.queued_ns <= aborted.first_scheduled_ns <= step.start_ns
    assert [name for name, check in ahead.summary["checks"].items() if check["holds"] is False] == []
