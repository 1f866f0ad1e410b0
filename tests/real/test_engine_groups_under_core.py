"""The core decides about groups and the engine computes them: each gets the tokens that it gets alone."""

from __future__ import annotations

import random

import pytest

from real.driver import run
from testbed.core.commands import Arrive, Event, Recorder
from testbed.core.outcome import Finished
from testbed.core.request import Request
from testbed.core.serve import serve
from tests.real.engine_helpers import requests_of, tiny_backend, tiny_spec
from tests.real.group_core import HandCore
from tests.real.test_engine_under_core import TickingClock
from tests.testbed.core_kit import make_limits, make_scheduler

EOS = 3
NUM_TOKENS = 11
RNG = random.Random(11)
SHARED = [RNG.randrange(512) for _ in range(9)]
PROMPTS = [SHARED[: RNG.randrange(10)] + [RNG.randrange(512) for _ in range(RNG.randrange(1, 14))] for _ in range(16)]
KINDS = [
    {"beam_width": 3, "n": 2},
    {"temperature": 1.0},
    {"n": 3},  # greedy: three times the same
    {"beam_width": 4, "stop_token_ids": tuple(range(0, 512, 9))},
    {"beam_width": 2},
    {},
    {"n": 2, "best_of": 4},
    {"beam_width": 1},
]
REQUESTS = requests_of(KINDS, PROMPTS, NUM_TOKENS)


class Requests(Recorder):
    """An inbox that keeps what finished; a recorder that counts what happened to the blocks."""

    is_open = False

    def __init__(self, requests: list[Request]) -> None:
        self.pending = list(requests)
        self.outputs: dict[str, list[list[int]]] = {}
        self.num_swapped_out = self.num_swapped_in = self.num_copied = self.num_cached_tokens = 0

    def due(self, now_ns: int) -> list[Event]:
        due = [request for request in self.pending if request.arrival_ns <= now_ns]
        self.pending = self.pending[len(due) :]
        return [Arrive(request) for request in due]

    def next_ns(self) -> int | None:
        return self.pending[0].arrival_ns if self.pending else None

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        for done in requests:
            self.outputs[done.request.request_id] = sorted(list(one.token_ids) for one in done.completions)

    def committed(self, step) -> None:
        plan = step.plan
        self.num_swapped_out += len(plan.swap_out)
        self.num_swapped_in += len(plan.swap_in)
        self.num_copied += len(plan.copies)
        self.num_cached_tokens += sum(admission.num_cached_tokens for admission in plan.admitted)


def serve_on_engine(composition: str, num_blocks: int, caching: bool) -> Requests:
    backend = tiny_backend(tiny_spec(eos_token_id=EOS), num_gpu_blocks=num_blocks, num_cpu_blocks=200)
    scheduler = make_scheduler(
        composition, num_blocks=num_blocks, num_cpu_blocks=200, caching=caching, eos_token_id=EOS,
        limits=make_limits(seqs=16, budget=48, model_len=256),
    )  # fmt: skip
    inbox = Requests(REQUESTS)
    run(serve(inbox, scheduler, inbox), backend, TickingClock())
    scheduler.check_invariants()
    return inbox


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    """Each request by itself, by a core made by hand."""
    outputs = {}
    backend = tiny_backend(tiny_spec(eos_token_id=EOS))
    for request in REQUESTS:
        core = HandCore(64, 0, eos=EOS)
        group = core.add(request.prompt_token_ids, request.sampling, NUM_TOKENS)
        while core.groups:
            core.commit(backend.start(core.plan()).wait()[0])
        outputs[request.request_id] = sorted(group.finished)
    return outputs


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("num_blocks", [28, 200], ids=["tight", "roomy"])
@pytest.mark.parametrize("composition", ["prefill_first", "decode_first", "unified"])
def test_every_group_gets_the_tokens_it_gets_alone(alone, composition, num_blocks, caching):
    together = serve_on_engine(composition, num_blocks, caching)
    assert together.outputs == alone
    assert together.num_copied > 0
    assert (together.num_swapped_in > 0) == (num_blocks == 28)
    assert together.num_swapped_in == together.num_swapped_out
    assert (together.num_cached_tokens > 0) == caching
