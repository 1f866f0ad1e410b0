"""The core decides and the engine computes: whatever is decided, every request gets the tokens that it gets alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from real.backend import RealBackend
from testbed.core.plan import PLACEHOLDER
from testbed.core.request import Request, SamplingParams
from tests.real.engine_helpers import plan_of, row, tiny_backend
from tests.real.served import Requests, TickingClock, served
from tests.testbed.core_kit import make_limits

RNG = random.Random(3)
SHARED = [RNG.randrange(512) for _ in range(17)]
PROMPTS = [SHARED + [RNG.randrange(512) for _ in range(n)] for n in (3, 12, 1, 20, 7, 9)] + [SHARED[:16], [5]]
SAMPLING = [SamplingParams(temperature=t, max_tokens=14, seed=s) for s, t in enumerate([0, 1, 0, 0.8, 0, 0, 1, 0])]
REQUESTS = [
    Request(f"r{i}", prompt, arrival_ns=1_000_000 * i, sampling=sampling)
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True))
]


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
    return served(
        backend, Requests(requests, reset_at), composition, num_blocks=num_blocks, caching=caching,
        limits=make_limits(budget=48, model_len=256, plans=plans),
        clock=None if plans == 1 or backend.probe is None else ProbingClock(backend),
    )  # fmt: skip


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


def test_a_token_in_flight_is_found_behind_a_row_that_samples_none():
    ahead, alone = tiny_backend(), tiny_backend()
    chunk, prompt = row(0, [1, 2, 3, 4, 5], [0], end=4, samples=False), row(1, [6, 7, 8], [1])
    steps = [ahead.start(plan_of(chunk, prompt)), ahead.start(plan_of(row(1, [6, 7, 8, PLACEHOLDER], [1], start=3)))]
    first, second = (step.wait().outcomes[0].tokens[0] for step in steps)
    assert alone.start(plan_of(prompt)).wait().outcomes[0].tokens == (first,)
    again = row(1, [6, 7, 8, first], [1], start=3)
    assert alone.start(plan_of(again)).wait().outcomes[0].tokens == (second,)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_a_gpu_feeds_tokens_that_the_host_has_not_seen_back(cuda_graphs):
    options = {"device": "cuda", "dtype": "float32", "cuda_graphs": cuda_graphs}
    outputs = [serve_on_engine(REQUESTS, "unified", 24, True, plans, **options).outputs for plans in (1, 2)]
    assert outputs[0] == outputs[1]
