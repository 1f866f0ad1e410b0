"""Fast forward equals plain stepping: the same decisions, tokens and integer instants, whatever the run."""

from __future__ import annotations

import random
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.backend import SimBackend
from sim.cost.base import CostModel
from sim.cost.constant import ConstantConfig, ConstantCost
from sim.cost.linear import LinearConfig, LinearCost
from sim.cost.roofline import RooflineConfig, RooflineCost
from sim.driver import run
from testbed.errors import LivelockError
from testbed.fast_forward import FAST_FORWARD
from testbed.interfaces import Abort, Arrive, Event, StepView
from testbed.plan import Finished
from testbed.records import decision
from testbed.request import Request
from testbed.serve import serve
from testbed.specs import DeviceSpec, ModelSpec
from tests.properties.policies import COMPOSITIONS
from tests.properties.setups import EOS, VOCAB_SIZE, Setup, presets, random_request, random_setup

MODEL = ModelSpec("small", "Qwen3ForCausalLM", 64, 96, 2, 4, 2, 16, VOCAB_SIZE, 256, True)
STEP_NS = 1_000_000


class Sessions:
    """Requests at their arrivals, aborts, and turns that come some time after another has ended. An inbox."""

    is_open = False

    def __init__(self, arrivals: list[Request], aborts: list[tuple[int, str]], turns: dict[str, Request]) -> None:
        self._events: list[tuple[int, int, Event]] = []
        self._turns = turns  # by the id of the request before; its arrival_ns is the think time
        self._count = count()
        for request in arrivals:
            self._push(request.arrival_ns, Arrive(request))
        for instant, name in aborts:
            self._push(instant, Abort(name))

    def _push(self, instant: int, event: Event) -> None:
        heappush(self._events, (instant, next(self._count), event))

    def due(self, now_ns: int) -> list[Event]:
        events = []
        while self._events and self._events[0][0] <= now_ns:
            events.append(heappop(self._events)[2])
        return events

    def next_ns(self) -> int | None:
        return self._events[0][0] if self._events else None

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        for item in requests:
            turn = self._turns.get(item.request.request_id)
            if turn is not None:
                instant = now_ns + turn.arrival_ns
                self._push(instant, Arrive(replace(turn, arrival_ns=instant)))


class Log:
    """A recorder of everything, step by step."""

    def __init__(self) -> None:
        self.steps: list[tuple[object, ...]] = []
        self.events: list[tuple[object, ...]] = []
        self.num_plans = 0

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        self.events.append(("arrived", request.request_id, now_ns, step))

    def aborted(self, request_id: str, now_ns: int, step: int) -> None:
        self.events.append(("aborted", request_id, now_ns, step))

    def committed(self, step: StepView) -> None:
        self.num_plans += 1
        for one in step.each():
            self.steps.append(
                (
                    decision(one), one.plan_ns, one.result, one.digest, one.emitted, one.plan.shape,
                    one.num_running, one.num_waiting, one.num_swapped, one.plan.blocked_by,
                )
            )  # fmt: skip

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        for item in finished:
            self.events.append(
                (item.request.request_id, item.reason, item.message, list(item.output_token_ids), now_ns)
            )


def price(rng: random.Random) -> CostModel:
    kind = rng.randrange(3)
    if kind == 0:
        return ConstantCost(ConstantConfig(STEP_NS / 1e9))
    if kind == 1:
        return LinearCost(LinearConfig(base_s=rng.choice((1e-9, 1e-4)), per_decode_context_token_s=1.7e-6))
    return RooflineCost(
        MODEL, DeviceSpec("small", memory_bytes_per_s=1e9), RooflineConfig(cuda_graphs=rng.random() < 0.5)
    )


def world(seed: int) -> tuple[list[Request], list[tuple[int, str]], dict[str, Request]]:
    """Arrivals, aborts and later turns. Outputs are long where nothing else happens, and all are forced, or beams."""
    rng = random.Random(seed)
    span_ns = rng.choice((0, 3, 30, 200)) * STEP_NS
    requests = []
    for index in range(rng.choice((1, 3, 8, 16))):
        request = random_request(rng, f"r{index}", rng.randint(0, span_ns))
        if request.forced_output is None and not request.sampling.beam_width > 1:
            tokens = [rng.randrange(2) for _ in range(rng.choice((1, 5, 20, 60)))]
            request = replace(request, forced_output=tokens)
        elif request.sampling.beam_width > 1:
            request = replace(request, forced_output=[0] * rng.randint(1, 12))
        requests.append(request)
    aborts = [
        (rng.randint(0, span_ns + 20 * STEP_NS), rng.choice(requests).request_id) for _ in range(rng.randrange(3))
    ]
    turns = {}
    for request in requests:
        if rng.random() < 0.3:
            prompt = [*request.prompt_token_ids, *(request.forced_output or ()), rng.randrange(2)]
            think_ns = rng.choice((0, 1, 5 * STEP_NS))
            turns[request.request_id] = replace(
                request, request_id=f"{request.request_id}+", prompt_token_ids=prompt, arrival_ns=think_ns
            )
    return requests, aborts, turns


def go(setup: Setup, seed: int, max_steps: int) -> Log:
    scheduler = setup.scheduler()
    log = Log()
    loop = serve(Sessions(*world(seed)), scheduler, log, max_steps)
    backend = SimBackend(price(random.Random(seed)), seed=seed, vocab_size=VOCAB_SIZE, eos_token_id=EOS)
    try:
        run(loop, backend)
    except LivelockError as error:
        log.events.append((str(error),))
    scheduler.check_invariants()
    return log


def assert_equal(setup: Setup, seed: int) -> Log:
    stepped, forwarded = go(setup, seed, 1), go(setup, seed, FAST_FORWARD)
    assert forwarded.events == stepped.events, (setup, seed)
    for ours, theirs in zip(forwarded.steps, stepped.steps, strict=False):
        assert ours == theirs, (setup, seed)
    assert len(forwarded.steps) == len(stepped.steps), (setup, seed)
    return forwarded


@pytest.mark.parametrize("composition", COMPOSITIONS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_fast_forward_equals_stepping(composition: str, seed: int) -> None:
    setup = random_setup(random.Random(seed), composition)
    assert_equal(setup, seed)


@pytest.mark.parametrize("preset", presets())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(8, 40), caching=st.booleans())
def test_fast_forward_equals_stepping_for_every_preset(preset: str, seed: int, num_blocks: int, caching: bool) -> None:
    assert_equal(Setup(**presets()[preset], num_blocks=num_blocks, caching=caching), seed)
