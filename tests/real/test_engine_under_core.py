"""The core decides and the engine computes: whatever is decided, every request gets the tokens that it gets alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from real.backend import RealBackend
from real.driver import run
from testbed.core.commands import Arrive, Event, Recorder, ResetPrefixes
from testbed.core.outcome import Finished
from testbed.core.request import Request, SamplingParams
from testbed.core.serve import serve
from tests.real.engine_helpers import tiny_backend
from tests.testbed.core_kit import make_limits, make_scheduler

RNG = random.Random(3)
SHARED = [RNG.randrange(512) for _ in range(17)]
PROMPTS = [SHARED + [RNG.randrange(512) for _ in range(n)] for n in (3, 12, 1, 20, 7, 9)] + [SHARED[:16], [5]]
SAMPLING = [SamplingParams(temperature=t, max_tokens=14, seed=s) for s, t in enumerate([0, 1, 0, 0.8, 0, 0, 1, 0])]
REQUESTS = [
    Request(f"r{i}", prompt, arrival_ns=1_000_000 * i, sampling=sampling)
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True))
]


class TickingClock:
    """Each look at it takes a third of a millisecond, so that a run meets the same arrivals on every machine."""

    def __init__(self) -> None:
        self.time = 0

    def start(self) -> None:
        self.time = 0

    def before_step(self) -> float:
        return 1.0

    def now_ns(self) -> int:
        self.time += 333_333
        return self.time

    def wait_until(self, until_ns: int) -> None:
        self.time = max(self.time, until_ns)


class Requests(Recorder):
    """An inbox that keeps what finished; a recorder that counts preemptions, hits and what happened to the blocks."""

    is_open = False

    def __init__(self, requests: list[Request], reset_at: tuple[int, ...] = ()) -> None:
        self.pending = list(requests)
        self._reset_at, self.num_boundaries = reset_at, 0
        self.outputs: dict[str, list[int]] = {}
        self.completions: dict[str, list[list[int]]] = {}  # of all sequences of a request
        self.num_preemptions = self.num_cached_tokens = 0
        self.num_swapped_out = self.num_swapped_in = self.num_copied = 0

    def due(self, now_ns: int) -> list[Event]:
        due = [request for request in self.pending if request.arrival_ns <= now_ns]
        self.pending = self.pending[len(due) :]
        self.num_boundaries += 1
        resets = [ResetPrefixes()] if self.num_boundaries in self._reset_at else []
        return [*resets, *[Arrive(request) for request in due]]

    def next_ns(self) -> int | None:
        return self.pending[0].arrival_ns if self.pending else None

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        for done in requests:
            self.outputs[done.request.request_id] = list(done.output_token_ids)
            self.completions[done.request.request_id] = sorted(list(one.token_ids) for one in done.completions)

    def committed(self, step) -> None:
        plan = step.plan
        self.num_preemptions += len(plan.preempted)
        self.num_cached_tokens += sum(admission.num_cached_tokens for admission in plan.admitted)
        self.num_swapped_out += len(plan.swap_out)
        self.num_swapped_in += len(plan.swap_in)
        self.num_copied += len(plan.copies)


class ProbingClock(TickingClock):
    """Probes before every step: one in flight has drawn tokens by then that the next one waits for."""

    def __init__(self, backend: RealBackend) -> None:
        super().__init__()
        self._probe = backend.probe

    def before_step(self) -> float:
        self._probe()
        return 1.0


def serve_on_engine(
    requests: list[Request], composition: str, num_blocks: int, caching: bool, plans: int = 1,
    reset_at: tuple[int, ...] = (), **options: object
) -> Requests:  # fmt: skip
    backend = tiny_backend(num_gpu_blocks=num_blocks, **options)
    scheduler = make_scheduler(
        composition, num_blocks=num_blocks, caching=caching, limits=make_limits(budget=48, model_len=256, plans=plans)
    )
    inbox = Requests(requests, reset_at)
    run(
        serve(inbox, scheduler, inbox),
        backend,
        TickingClock() if plans == 1 or backend.probe is None else ProbingClock(backend),
    )
    return inbox


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    for request in REQUESTS:
        outputs |= serve_on_engine([request], "prefill_first", 64, caching=False).outputs
    assert all(len(output) == 14 for output in outputs.values())
    return outputs


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("num_blocks", [24, 128], ids=["tight", "roomy"])
@pytest.mark.parametrize("composition", ["prefill_first", "decode_first", "unified"])
@pytest.mark.parametrize("plans", [1, 2], ids=["one plan", "a plan ahead"])
def test_every_request_gets_the_tokens_it_gets_alone(alone, plans, composition, num_blocks, caching):
    together = serve_on_engine(REQUESTS, composition, num_blocks, caching, plans)
    assert together.outputs == alone
    assert (together.num_preemptions > 0) == (num_blocks == 24)
    assert (together.num_cached_tokens > 0) == caching


@pytest.mark.parametrize("composition", ["prefill_first", "decode_first", "unified"])
@pytest.mark.parametrize("plans", [1, 2], ids=["one plan", "a plan ahead"])
def test_what_a_reset_has_computed_again_are_the_same_tokens(alone, plans, composition):
    together = serve_on_engine(REQUESTS, composition, 128, True, plans, reset_at=(4, 9, 15))
    assert together.outputs == alone
    assert together.num_preemptions > len(REQUESTS)


def sampled(index: int, **changes: object) -> Request:
    """Stops by surprise, and draws that want to know all tokens before."""
    stops = tuple(range(0, 512, 9))
    return REQUESTS[index].replace(sampling=replace(SAMPLING[index], stop_token_ids=stops, **changes))


@pytest.mark.parametrize("num_blocks", [24, 128], ids=["tight", "roomy"])
def test_stops_penalties_and_samples_come_out_the_same_with_a_plan_ahead(num_blocks):
    requests = [
        *(sampled(index) for index in range(5)),
        sampled(5, temperature=0.9, repetition_penalty=1.5, presence_penalty=0.5),
        sampled(6, n=2),
        sampled(7, logprobs=2),
    ]
    outputs = [serve_on_engine(requests, "unified", num_blocks, True, plans).outputs for plans in (1, 2)]
    assert outputs[0] == outputs[1]
    assert any(len(output) < 14 for output in outputs[0].values())


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_a_gpu_feeds_tokens_that_the_host_has_not_seen_back(cuda_graphs):
    options = {"device": "cuda", "dtype": "float32", "cuda_graphs": cuda_graphs}
    outputs = [serve_on_engine(REQUESTS, "unified", 24, True, plans, **options).outputs for plans in (1, 2)]
    assert outputs[0] == outputs[1]
