"""This testbed's scheduler inside vLLM: the tokens are stock vLLM's, in pools so small that it preempts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not in this environment: make test-vllm")

from experiments.configuration.compose import compose_config
from experiments.wiring.build import Pools, build_scheduler
from experiments.wiring.build_engine import build_vllm_backend
from real.driver import run
from testbed.core.request import Request, SamplingParams
from testbed.core.serve import serve
from tests.real.served import Requests, TickingClock
from tests.vllm.conftest import no_veto

POLICIES = {
    "vllm_v1": ["scheduler=vllm_v1"],
    "sarathi": ["scheduler=sarathi", "scheduler.max_num_seqs=16", "scheduler.max_num_batched_tokens=128"],
    "decode_first, sjf, longest remaining": [
        "scheduler=decode_first", "scheduler.queue_order=sjf", "scheduler.victim=longest_remaining",
        "scheduler.oracle=perfect",
    ],
    "lpm, least progress": ["scheduler=sglang_lpm"],
    "prefill_first": ["scheduler=prefill_first", "scheduler.max_num_batched_tokens=256"],
    "merged blocks": ["scheduler=vllm_v0", "scheduler.kv_rules.hits_frozen=false"],
    "nano_vllm": ["scheduler=nano_vllm"],
}  # fmt: skip
ENGINE = [
    "backend=vllm", "backend.enforce_eager=true", "backend.dtype=float32", "device=cpu", "cache.block_size=32",
    "cache.num_gpu_blocks=40", "cache.num_cpu_blocks=0", "scheduler.max_num_seqs=16",
    "scheduler.max_num_batched_tokens=512", "scheduler.max_model_len=512", "cache.watermark=0.0",
    "scheduler.preemption=recompute",
]  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[Any]:
    settings = [*ENGINE, f"model.path={model}", f"scheduler.async_scheduling={str(request.param).lower()}"]
    with no_veto():
        backend = build_vllm_backend(compose_config([*settings, "cache.prefix_caching=false"]))
    yield backend
    backend.close()


class _Probing(TickingClock):
    """Lets vLLM step without requests before each step, as backend.pace=probe_scaled does now and then."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._probe = engine.probe

    def before_step(self) -> float:
        self._probe()
        return 1.0


@pytest.mark.vllm
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_tokens_are_those_of_stock_vllm(
    engine: Any, model: Path, stock: list[list[int]], prompts: list[list[int]], num_tokens: list[int], policy: str,
    caching: bool,
) -> None:  # fmt: skip
    settings = [*ENGINE, f"model.path={model}", *POLICIES[policy], f"cache.prefix_caching={str(caching).lower()}"]
    if engine.is_async:
        if caching and policy == "merged blocks":
            pytest.skip("vLLM's workers take no new table while a token is on its way")
        settings += ["scheduler.async_scheduling=true"]
    scheduler = build_scheduler(compose_config(settings), Pools(40, 0))
    requests = [
        Request(f"r{i}", prompt, arrival_ns=2_000_000 * i, sampling=SamplingParams(max_tokens=num, ignore_eos=True))
        for i, (prompt, num) in enumerate(zip(prompts, num_tokens, strict=True))
    ]
    source = Requests(requests)
    run(
        serve(engine.inbox(source), scheduler, source),
        engine,
        _Probing(engine) if caching and not engine.is_async else TickingClock(),
    )
    different = [i for i in range(len(requests)) if source.outputs[f"r{i}"] != stock[i]]
    assert not different, f"{len(requests) - len(different)} of {len(requests)} equal"
    assert source.num_preemptions > 0
    assert (source.num_cached_tokens > 0) == caching
