"""Random worlds: arrivals, aborts and sessions for an engine, what prices its steps, and a log of all that happens."""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count, pairwise, zip_longest

from sim.backend import SimBackend
from sim.cost.base import CostModel
from sim.cost.config import ConstantConfig, LinearConfig, RooflineConfig
from sim.cost.constant import ConstantCost
from sim.cost.linear import LinearCost
from sim.cost.roofline import RooflineCost
from sim.driver import run
from testbed.core.commands import Abort, Arrive, Event, Recorder, ResetPrefixes, StepView
from testbed.core.interfaces import Inbox
from testbed.core.outcome import Finished
from testbed.core.request import Request
from testbed.core.scheduler import Scheduler
from testbed.core.serve import serve
from testbed.errors import LivelockError
from testbed.records.schema import decision
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec
from tests.properties.setups import EOS, VOCAB_SIZE, random_request

MODEL = ModelSpec("small", "Qwen3ForCausalLM", 64, 96, 2, 4, 2, 16, VOCAB_SIZE, 256, True)
STEP_NS = 1_000_000


class Sessions:
    """Requests at their arrivals, aborts, resets, and turns that come some time after another has ended. An inbox."""

    is_open = False

    def __init__(
        self, arrivals: list[Request], aborts: list[tuple[int, str]], turns: dict[str, Request],
        resets: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self._events: list[tuple[int, int, Event]] = []
        self._turns = turns  # by the id of the request before; its arrival_ns is the think time
        self._count = count()
        for request in arrivals:
            self._push(request.arrival_ns, Arrive(request))
        for instant, name in aborts:
            self._push(instant, Abort(name))
        for instant in resets:
            self._push(instant, ResetPrefixes())

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
                self._push(instant, Arrive(turn.replace(arrival_ns=instant)))


MAX_STEPS = 50_000  # of a world that takes some hundreds


def emitted(step: StepView) -> list[str]:
    """Ids of the requests that emitted a token, once for each."""
    return [seq.request_id for seq in step.emitters]


class Log(Recorder):
    """A recorder of everything, step by step."""

    def __init__(self) -> None:
        self.steps: list[tuple[object, ...]] = []
        self.views: list[StepView] = []
        self.events: list[tuple[object, ...]] = []

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        self.events.append(("arrived", request.request_id, now_ns, step))

    def aborted(self, request_id: str, now_ns: int, step: int) -> None:
        self.events.append(("aborted", request_id, now_ns, step))

    def prefixes_reset(self, now_ns: int, step: int) -> None:
        self.events.append(("prefixes reset", now_ns, step))

    def committed(self, step: StepView) -> None:
        assert len(self.steps) < MAX_STEPS, "these worlds end: something is taken back and done again for ever"
        self.views.append(step)
        self.steps.append(
            (
                decision(step), step.plan_ns, step.result, step.digest, emitted(step), step.plan.shape,
                step.num_running, step.num_waiting, step.num_swapped, step.plan.blocked_by,
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
    rng, scored = random.Random(seed), random.Random(seed + 1)
    span_ns = rng.choice((0, 3, 30, 200)) * STEP_NS
    requests = []
    for index in range(rng.choice((1, 3, 8, 16))):
        request = random_request(rng, f"r{index}", rng.randint(0, span_ns))
        if request.forced_output is None and not request.sampling.beam_width > 1:
            tokens = [rng.randrange(2) for _ in range(rng.choice((1, 5, 20, 60)))]
            request = request.replace(forced_output=tokens)
        elif request.sampling.beam_width > 1:
            request = request.replace(forced_output=[0] * rng.randint(1, 12))
        if scored.random() < 0.2:  # computes its prompt whole, whatever is cached
            request = request.replace(sampling=replace(request.sampling, prompt_logprobs=0))
        requests.append(request)
    aborts = [
        (rng.randint(0, span_ns + 20 * STEP_NS), rng.choice(requests).request_id) for _ in range(rng.randrange(3))
    ]
    turns = {}
    for request in requests:
        if rng.random() < 0.3:
            prompt = [*request.prompt_token_ids, *(request.forced_output or ()), rng.randrange(2)]
            think_ns = rng.choice((0, 1, 5 * STEP_NS))
            turns[request.request_id] = request.replace(
                request_id=f"{request.request_id}+", prompt_token_ids=prompt, arrival_ns=think_ns
            )
    return requests, aborts, turns


def drive(scheduler: Scheduler, inbox: Inbox, cost: CostModel, seed: int = 0) -> Log:
    """Runs one engine to its end. A livelock is the last event of the log."""
    log = Log()
    try:
        run(serve(inbox, scheduler, log), SimBackend(cost, seed=seed, vocab_size=VOCAB_SIZE, eos_token_id=EOS))
    except LivelockError as error:
        log.events.append((str(error),))
    scheduler.check_invariants()
    return log


def in_flight(log: Log, instant_ns: int) -> int | None:
    """The end of the step that was under way at an instant; None: none was."""
    index = bisect_left(log.views, instant_ns, key=lambda step: step.plan_ns) - 1  # the last that began before
    return log.views[index].end_ns if index >= 0 and instant_ns < log.views[index].end_ns else None


def expect_instants(log: Log, arrivals: list[Request], aborts: list[tuple[int, str]]) -> None:
    """Steps follow one another, each from a plan to its end; what comes is seen at once, or where a step ends; nobody
    waits for nothing. arrivals, aborts: of them, those that this engine was told of."""
    for number, (step, following) in enumerate(zip_longest(log.views, log.views[1:])):
        assert step.plan.step == number
        assert step.end_ns > step.plan_ns
        assert following is None or following.plan_ns >= step.end_ns
    seen = {event[1]: event[2] for event in log.events if event[0] == "arrived"}
    for request in arrivals:
        if request.request_id in seen:
            asked = request.arrival_ns
            assert seen[request.request_id] == (in_flight(log, asked) or asked), request.request_id
    for event in log.events:
        if event[0] == "aborted":
            assert event[2] in {in_flight(log, asked) or asked for asked, one in aborts if one == event[1]}, event[1]
    told = {event[2] for event in log.events if event[0] in ("arrived", "aborted")}
    for before, after in pairwise(log.views):
        assert after.plan_ns == before.end_ns or after.plan_ns in told, f"step {after.plan.step} comes late"
