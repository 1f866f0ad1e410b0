"""Builds real engines from a RunConfig: ours, its replicas, or vLLM. Imports torch and vLLM only when needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.configuration.config import RunConfig
from experiments.configuration.on_device import check_hits, check_in_vllm, check_pace, check_plans_ahead
from experiments.configuration.policies import make_policy
from experiments.wiring.build import can_swap, num_cpu_blocks
from real.config import EngineOptions, RealConfig
from real.vllm.config import VllmConfig
from testbed.composites import declared
from testbed.errors import ConfigError, TraceError
from testbed.traces.schema import TokenIds, Trace


def check_token_ids(config: RunConfig, trace: Trace) -> None:
    """Raises TraceError, with the place, for explicit token ids outside the model's vocabulary."""
    for row in trace.rows:
        for part in (*row.prompt, *(() if row.output is None else (row.output,))):
            if not isinstance(part, TokenIds):
                continue
            for token in (min(part.ids, default=0), max(part.ids, default=0)):
                if not 0 <= token < config.model.vocab_size:
                    raise TraceError(
                        f"{row.place or row.request_id}: token id {token} of request {row.request_id!r} is outside the "
                        f"vocabulary of model {config.model.name} (0 to {config.model.vocab_size - 1}); choose a model "
                        "that has it, or give prompt_tokens, a count"
                    )


def check_prompts(config: RunConfig, trace: Trace) -> None:
    """Raises TraceError, before vLLM starts, for prompts that vLLM rejects but other backends handle in another way:
    prompts of exactly max_model_len, for which our core generates one token; under vLLM's own scheduler also longer
    ones, which our core ends as ignored."""
    assert isinstance(config.backend, VllmConfig)
    most, is_ours = config.limits.max_model_len, config.backend.decides == "testbed"
    for row in trace.rows:
        num_tokens = row.num_prompt_tokens
        if num_tokens == most or (num_tokens > most and not is_ours):
            raise TraceError(
                f"{row.place or row.request_id}: the prompt of {num_tokens} tokens leaves no room for one more in "
                f"scheduler.max_model_len ({most}), and vLLM does not take it: raise that, or set "
                f"trace.max_prompt_tokens={most - 1}"
            )


def build_vllm_backend(config: RunConfig, observe: Path | None = None, told: dict[str, Any] | None = None) -> Any:
    """Starts vLLM in this process. The caller closes it. observe: run vLLM's own scheduler, with the options `told`,
    and write its log to this file. Raises ConfigError for settings that vLLM, or this testbed in vLLM, cannot do."""
    assert isinstance(config.backend, VllmConfig)
    check_pace(config)
    composition = make_policy("scheduler.composition", config.scheduler.composition)
    check_hits(config, composition)
    check_in_vllm(config, config.limits.max_model_len, is_ours=observe is None)
    if config.model.path is None:
        raise ConfigError("backend=vllm needs model.path=<a folder with config.json and weights>: vLLM loads it itself")
    if config.cache.num_cpu_blocks:
        raise ConfigError("backend=vllm has no CPU blocks to swap to: leave cache.num_cpu_blocks out, or set it to 0")
    from real.vllm.backend import VllmBackend

    options = replace(_options_of_engine(config), kv_dtype=config.cache.kv_dtype)
    if not declared(composition, "splits_prompts", True):  # a prompt longer than the budget is a step of its own
        options = replace(options, max_num_batched_tokens=max(options.max_num_batched_tokens, options.max_model_len))
    backend = config.backend
    if backend.dtype is None and config.model.dtype == "float32":  # by default vLLM converts it to bfloat16
        backend = replace(backend, dtype=config.model.dtype)
    return VllmBackend(
        str(config.model.path),
        backend,
        options,
        tensor_parallel_size=config.tensor_parallel_size,
        prefix_caching=config.cache.prefix_caching,
        is_async=config.scheduler.async_scheduling,
        observe=None if observe is None else str(observe),
        told=told,
    )


def build_real_backend(config: RunConfig, *, swaps: bool | None = None) -> Any:
    """Loads the model, on `device.tensor_parallel_size` ranks. The caller closes the backend. swaps: whether it gets
    plans that swap; None: according to the configured preemption.

    Raises ConfigError if the packages of the real engine are not installed, or for settings that only a simulator can
    run.
    """
    assert isinstance(config.backend, RealConfig)
    with real_packages("backend=real"):
        from real.parallel.backend import make_engine
    return make_engine(config.model, config.backend, _options_of_ours(config, swaps), config.tensor_parallel_size)


def computes_beside(config: RunConfig) -> bool:
    """Whether a device computes steps while this process does other work."""
    if isinstance(config.backend, VllmConfig):
        return config.scheduler.async_scheduling  # otherwise a plan is launched and waited for in one call
    if not isinstance(config.backend, RealConfig):
        return False
    from real.device import resolve_device

    return resolve_device(config.backend.device).type == "cuda"


def build_replicas(config: RunConfig) -> tuple[list[Any], Any]:
    """Starts `backend.num_replicas` real engines in processes of their own; returns them and their description."""
    assert isinstance(config.backend, RealConfig)
    with real_packages("backend=real"):
        from real.parallel.replica import ReplicaSetup, start_replicas
    setup = ReplicaSetup(config.model, config.backend, _options_of_ours(config), config.tensor_parallel_size)
    return start_replicas(setup, config.backend.num_replicas)


@contextmanager
def real_packages(who: str) -> Iterator[None]:
    """Context in which `who` imports packages of the real engine. Raises ConfigError if one is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{who} needs the package {error.name!r}: pip install '.[real]' in the repository (or `make demo`)"
        ) from None


def _options_of_ours(config: RunConfig, swaps: bool | None = None) -> EngineOptions:
    """Returns the options of our own engine. Raises ConfigError for settings that only a simulator can run."""
    assert isinstance(config.backend, RealConfig)
    check_hits(config, make_policy("scheduler.composition", config.scheduler.composition))
    check_plans_ahead(config)
    check_pace(config)
    return replace(
        _options_of_engine(config),
        num_cpu_blocks=num_cpu_blocks(config),
        swaps=can_swap(config) if swaps is None else swaps,
        sliding_window=config.sliding_window,
        kv_dtype=_kv_dtype(config, config.backend),
    )


def _options_of_engine(config: RunConfig) -> EngineOptions:
    """Returns the options that our engine and vLLM share: the limits of steps, the memory for KV, and the seed."""
    bounds, cache = config.limits, config.cache
    return EngineOptions(
        cache.block_size, bounds.max_num_batched_tokens, bounds.max_num_seqs, bounds.max_model_len,
        gpu_memory_utilization=cache.gpu_memory_utilization, num_gpu_blocks=cache.num_gpu_blocks, seed=config.seed,
    )  # fmt: skip


def _kv_dtype(config: RunConfig, backend: RealConfig) -> str | None:
    """Returns the dtype of the KV cache; None if it is the model's. Raises ConfigError if the engine lacks it."""
    kv_dtype, own = config.cache.kv_dtype, backend.dtype or config.model.dtype
    if kv_dtype in (None, own):
        return None
    if kv_dtype not in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        raise ConfigError(
            f"cache.kv_dtype is {kv_dtype!r}, and the real engine computes in {own}; it keeps K and V in that, or as "
            "fp8_e4m3 or fp8_e5m2"
        )
    return "fp8_e4m3" if kv_dtype == "fp8" else kv_dtype
