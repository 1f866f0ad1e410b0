"""Every preset on the real engine, in a pool so small that it preempts: each request gets the tokens it gets alone."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")

from experiments.configuration.compose import compose_config
from experiments.wiring.build import Pools, build_scheduler
from experiments.wiring.build_engine import build_real_backend
from real.driver import run
from testbed.core.request import Request, SamplingParams
from testbed.core.serve import serve
from testbed.errors import ConfigError
from tests.experiments.test_presets import PRESETS
from tests.real.served import Requests, TickingClock

RNG = random.Random(5)
SHARED = [RNG.randrange(512) for _ in range(17)]
PROMPTS = [SHARED + [RNG.randrange(512) for _ in range(n)] for n in (3, 12, 1, 20, 7, 9)] + [SHARED[:16], [5]]
REQUESTS = [
    Request(f"r{i}", PROMPTS[i % 8], arrival_ns=3_000_000 * i, sampling=SamplingParams(max_tokens=14, ignore_eos=True))
    for i in range(24)
]
SETTINGS = [
    "backend=real", "device=cpu", "model=tiny", "backend.pace=as_fast_as_possible", "cache.block_size=4",
    "cache.num_gpu_blocks=26", "cache.num_cpu_blocks=40", "scheduler.max_num_seqs=6",
    "scheduler.max_num_batched_tokens=64", "scheduler.max_model_len=64", "model.num_hidden_layers=2",
]  # fmt: skip
SAFE = {  # what a device needs of presets whose rules count blocks as computed that are not
    "vllm_v0": ["scheduler.kv_rules.hits_frozen=false"],
    "vllm_v0_chunked": ["scheduler.kv_rules={hits_visible:commit,duplicates:listed,hits_frozen:false}"],
}
PREEMPT_AND_HIT = {"vllm_v1", "vllm_v1_async", "vllm_v0", "sarathi", "nano_vllm"}  # in these pools


def outputs(requests: list[Request], *overrides: str) -> Requests:
    config = compose_config([*SETTINGS, *overrides])
    inbox, backend = Requests(requests), build_real_backend(config)
    scheduler = build_scheduler(config, Pools(backend.num_gpu_blocks, backend.num_cpu_blocks))
    run(serve(inbox, scheduler, inbox), backend, TickingClock())
    return inbox


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """Each prompt runs once: the likeliest token is taken, whoever asks."""
    found: list[list[int]] = []
    for request in REQUESTS[: len(PROMPTS)]:
        found += outputs([request], "scheduler=prefill_first", "cache.prefix_caching=false").outputs.values()
    return {request.request_id: found[i % len(PROMPTS)] for i, request in enumerate(REQUESTS)}


@pytest.mark.parametrize("preset", PRESETS)
def test_each_request_gets_the_tokens_that_it_gets_alone(alone: dict[str, list[int]], preset: str) -> None:
    seen = outputs(REQUESTS, f"scheduler={preset}", *SAFE.get(preset, ()))
    assert seen.outputs == alone
    if preset in PREEMPT_AND_HIT:
        assert (seen.num_preemptions > 0, seen.num_cached_tokens > 0) == (True, True)


def test_what_is_said_to_preempt_and_hit_is_a_preset() -> None:
    assert set(PRESETS) >= PREEMPT_AND_HIT


@pytest.mark.parametrize("preset", SAFE)
def test_hits_of_what_nobody_has_computed_are_refused_on_a_device(preset: str) -> None:
    with pytest.raises(ConfigError, match="real engine would give wrong tokens: set"):
        build_real_backend(compose_config([*SETTINGS, f"scheduler={preset}"]))
    build_real_backend(compose_config([*SETTINGS, f"scheduler={preset}", "cache.prefix_caching=false"]))


def test_ranks_take_one_step_at_a_time() -> None:
    settings = ["scheduler=vllm_v1_async", "device.tensor_parallel_size=2"]
    with pytest.raises(ConfigError, match=r"needs device\.tensor_parallel_size=1"):
        build_real_backend(compose_config([*SETTINGS, *settings]))


@pytest.mark.parametrize(
    ("preset", "settings", "num_blocks"),
    [("sarathi", [], 0), ("sarathi", ["scheduler.preemption=swap"], 40), ("vllm_v1", [], 40)],
)
def test_host_memory_for_kv_is_taken_where_a_plan_may_swap(preset: str, settings: list[str], num_blocks: int) -> None:
    backend = build_real_backend(compose_config([*SETTINGS, f"scheduler={preset}", *settings]))
    assert backend.num_cpu_blocks == 40  # of the core's pool, which records and digests count
    assert backend.cache.cpu[0].shape[1] == num_blocks
