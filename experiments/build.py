"""The wiring: from a RunConfig to a trace, a scheduler and a backend. The only place that joins rooms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

from experiments.config import RunConfig
from experiments.costs import block_bytes, build_cost, sliding_window, unread_settings
from experiments.estimator import CostEstimator
from experiments.foreign import policy_failure
from experiments.on_device import check_hits, check_pace, check_plans_ahead
from experiments.policies import make_policy
from experiments.run_folder import read_config
from experiments.settings import (
    RecordedConfig,
    SimConfig,
)
from experiments.structured import freeze
from experiments.traces import build_source as build_source
from experiments.traces import build_trace as build_trace
from experiments.traces import vocab_size as vocab_size
from real.config import RealConfig
from real.vllm.config import VllmConfig
from sim.backend import SimBackend, refuse_unforced
from testbed.blocks.config import KVRules
from testbed.blocks.eviction import LRU, LRUByLastStep
from testbed.blocks.interfaces import EvictionPolicy
from testbed.blocks.keys import TokenKeys
from testbed.blocks.manager import BlockManager
from testbed.core.limits import Limits
from testbed.core.request import SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.errors import ConfigError, TestbedError, TraceError
from testbed.policies.compositions.unified import Unified
from testbed.policies.config import SchedulerConfig, resolve_limits
from testbed.policies.context import PolicyContext, bind
from testbed.policies.preemption import Recompute, Swap
from testbed.specs.memory import activation_bytes, graph_bytes, num_kv_blocks
from testbed.specs.model import check_ranks
from testbed.traces.schema import TokenIds, Trace, TraceRequest, TraceSource


def sampling_params(config: RunConfig) -> SamplingParams:
    """Every key of the group is a parameter of the same name."""
    return SamplingParams(**{item.name: getattr(config.sampling, item.name) for item in fields(config.sampling)})


# --- core ---


@dataclass(frozen=True, slots=True)
class Pools:
    """How many KV blocks there are."""

    num_gpu_blocks: int
    num_cpu_blocks: int


def limits(config: RunConfig) -> Limits:
    return resolve_limits(config.scheduler, config.model.max_length)


def num_cpu_blocks(config: RunConfig) -> int:
    """cache.swap_space_gib is each rank's, as vLLM has it."""
    if config.cache.num_cpu_blocks is not None:
        return config.cache.num_cpu_blocks
    return int(config.cache.swap_space_gib * 2**30) // block_bytes(config)


def can_swap(config: RunConfig) -> bool:
    """Whether a plan of this scheduler may ever swap: not where it always computes again."""
    return not isinstance(make_policy("scheduler.preemption", config.scheduler.preemption), Recompute)


def simulated_pools(config: RunConfig) -> Pools:
    """As many blocks as the device's memory holds, by the formula that the real engine uses."""
    num_gpu = config.cache.num_gpu_blocks
    if num_gpu is None:
        bounds = limits(config)
        check_ranks(config.model, config.tensor_parallel_size)
        num_gpu = num_kv_blocks(
            memory_bytes=config.device.memory_bytes,
            utilization=config.cache.gpu_memory_utilization,
            weight_bytes=config.model.weight_bytes(config.tensor_parallel_size),
            activation_bytes=activation_bytes(
                config.model, bounds.max_num_batched_tokens, bounds.max_num_seqs, config.tensor_parallel_size
            ),
            graph_bytes=graph_bytes(config.model, _largest_captured(config), config.tensor_parallel_size),
            block_bytes=block_bytes(config),
        )
    return Pools(num_gpu, num_cpu_blocks(config))


def _largest_captured(config: RunConfig) -> int:
    """Tokens of the largest step that an engine captures: what the cost model says of graphs, else what it does when
    nothing is said. 0: none."""
    said, usual, bounds = config.raw["cost"], RealConfig(), limits(config)
    if config.device.kind != "cuda" or not said.get("cuda_graphs", usual.cuda_graphs):
        return 0
    num_decodes: int = said.get("max_captured_size", usual.max_captured_size)
    num_tokens: int = said.get("max_captured_tokens", usual.max_captured_tokens)
    return min(max(min(num_decodes, bounds.max_num_seqs), num_tokens), bounds.max_num_batched_tokens)


def build_scheduler(config: RunConfig, pools: Pools) -> Scheduler:
    """The core, the same for both backends."""
    cache, scheduler = config.cache, config.scheduler
    check_plans_ahead(config)
    check_policies(config, pools)
    eviction = _eviction(config)
    blocks = BlockManager(
        block_size=cache.block_size,
        num_gpu_blocks=pools.num_gpu_blocks,
        num_cpu_blocks=pools.num_cpu_blocks,
        watermark=scheduler.watermark if cache.watermark is None else cache.watermark,
        rules=scheduler.kv_rules,
        eviction=eviction,
        key_source=TokenKeys(cache.block_size) if cache.prefix_caching else None,
        isolate_tenants=cache.isolate_tenants,
        lookahead_slots=scheduler.lookahead_slots,
        sliding_window=sliding_window(config),
    )
    composition = make_policy("scheduler.composition", scheduler.composition)
    queue = make_policy("scheduler.queue_order", scheduler.queue_order)
    admission = make_policy("scheduler.admission", scheduler.admission)
    preemption = make_policy("scheduler.preemption", scheduler.preemption)
    victims = make_policy("scheduler.victim", _victim(scheduler, queue))
    _check_made(config, pools, composition, preemption)
    oracle = make_policy("scheduler.oracle", scheduler.oracle)
    context = PolicyContext(blocks, limits(config), oracle, build_estimator(config), config.seed)
    try:
        for policy in (oracle, eviction, queue, admission, preemption, victims):
            bind(policy, context)
        if hasattr(victims, "bind_queue"):
            victims.bind_queue(queue)
    except TestbedError:
        raise
    except Exception as error:  # noqa: BLE001  # a user's class may raise anything
        raise policy_failure(error, config) or error from None
    return Scheduler(
        limits=context.limits,
        blocks=blocks,
        composition=composition,
        queue=queue,
        victims=victims,
        admission=admission,
        preemption=preemption,
        eos_token_id=config.model.eos_token_id,
    )


def _eviction(config: RunConfig) -> EvictionPolicy:
    policy = cast(EvictionPolicy, make_policy("cache.eviction", config.cache.eviction))
    by_last_step = config.scheduler.kv_rules.lru_by == "last_step"
    return LRUByLastStep() if by_last_step and type(policy) is LRU else policy


def _victim(scheduler: SchedulerConfig, queue: Any) -> Any:
    """`auto`: the lowest priority where the queue goes by priority, otherwise the most recently admitted (vLLM V1)."""
    if scheduler.victim != "auto":
        return scheduler.victim
    return "lowest_priority" if getattr(queue, "goes_by_priority", False) else "most_recently_admitted"


def _check_made(config: RunConfig, pools: Pools, composition: Any, preemption: Any) -> None:
    """Refuses policies that contradict the settings, however they were named. Raises ConfigError."""
    if isinstance(preemption, Swap) and pools.num_cpu_blocks == 0:
        raise ConfigError(
            "scheduler.preemption=swap needs CPU blocks, and there are none: raise cache.num_cpu_blocks or "
            "cache.swap_space_gib, or choose scheduler.preemption=recompute"
        )
    bounds = limits(config)
    threshold, budget = bounds.long_prefill_token_threshold, bounds.max_num_batched_tokens
    if threshold > budget and isinstance(composition, Unified):
        raise ConfigError(
            f"scheduler.long_prefill_token_threshold ({threshold}) is larger than max_num_batched_tokens ({budget}); a "
            "chunk cannot exceed the budget: lower it, or set 0 (off)"
        )
    num_seqs = sampling_params(config).num_seqs
    least = min(("max_num_seqs", "max_num_batched_tokens"), key=lambda name: getattr(bounds, name))
    if num_seqs > getattr(bounds, least):
        raise ConfigError(
            f"sampling asks for {num_seqs} sequences of each request, and scheduler.{least} is "
            f"{getattr(bounds, least)}: none could ever run; raise it, or lower sampling.n, best_of or beam_width"
        )


def check_policies(config: RunConfig, pools: Pools) -> None:
    """Refuses settings that contradict each other. Raises ConfigError with the reason."""
    cache, scheduler = config.cache, config.scheduler
    share = scheduler.watermark if cache.watermark is None else cache.watermark
    watermark = scheduler.kv_rules.watermark_blocks(share, pools.num_gpu_blocks)
    if watermark >= pools.num_gpu_blocks:
        raise ConfigError(
            f"a watermark of {share} leaves {watermark} of {pools.num_gpu_blocks} KV blocks free: no prompt could ever "
            "be admitted; lower cache.watermark or raise cache.num_gpu_blocks"
        )
    budget = limits(config).max_num_batched_tokens
    if scheduler.kv_rules.chunks_fill_blocks and cache.prefix_caching and budget < cache.block_size:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens is {budget}, and with scheduler.kv_rules.chunks_fill_blocks a step must "
            f"fill a block of {cache.block_size} tokens; raise it, or lower cache.block_size"
        )
    if cache.eviction != "lru" and scheduler.kv_rules.free_order == "one_queue":
        raise ConfigError(
            "scheduler.kv_rules.free_order=one_queue hands blocks out in the order released; it goes with "
            "cache.eviction=lru only"
        )


def build_estimator(config: RunConfig) -> CostEstimator:
    """Prices for policies: of the run's cost model; a replay takes that of the run that it replays."""
    recorded = recorded_run(config)
    if recorded is not None:
        return build_estimator(RunConfig.from_container(read_config(Path(recorded))))
    return CostEstimator(estimator_name(config), build_cost(config))


def estimator_name(config: RunConfig) -> str:
    """What the manifest says of the prices that policies are given, in both modes: cost model and device."""
    recorded = recorded_run(config)
    if recorded is not None:
        return estimator_name(RunConfig.from_container(read_config(Path(recorded))))
    cost = config.raw["cost"]
    return f"{cost.get('name') or cost.get('_target_')} on {config.device.name}"


def unused_settings(config: RunConfig) -> list[str]:
    """Settings that were changed and that nothing reads: two arms that differ in one are the same."""
    backend, alone = config.backend, SimConfig()
    composition = make_policy("scheduler.composition", config.scheduler.composition)
    defaults = {item.name: item.default for item in fields(SchedulerConfig)}
    rules, standard = config.scheduler.kv_rules, KVRules()
    unread = [name for name in ("budget", "chunks_fill_blocks") if name not in getattr(composition, "own_rules", ())]
    notes = [
        f"scheduler.kv_rules.{name} has no effect with composition {type(composition).__name__}"
        for name in unread
        if getattr(rules, name) != getattr(standard, name)
    ]
    if isinstance(backend, SimConfig):
        notes += unread_settings(config)
        if backend.replicas_per_link != alone.replicas_per_link and not backend.swap_overlap:
            notes.append("backend.replicas_per_link has no effect with backend.swap_overlap=false")
    if isinstance(backend, SimConfig | RealConfig) and backend.router != alone.router and backend.num_replicas == 1:
        notes.append("backend.router has no effect with backend.num_replicas=1")
    return notes + [
        f"scheduler.{name} has no effect with composition {type(composition).__name__}"
        for name in getattr(composition, "unused_limits", ())
        if getattr(config.scheduler, name) != defaults[name]
    ]


# --- backends ---


def recorded_run(config: RunConfig) -> str | None:
    """The real run that `cost=recorded` replays; None for other cost models."""
    values = config.raw["cost"]
    if values.get("name") != "recorded":
        return None
    return freeze(RecordedConfig, "cost", values).run


def check_simulated(row: TraceRequest) -> None:
    """Refuses a row that the simulator cannot serve. Raises ConfigError."""
    refuse_unforced(row.request_id, row.num_output_tokens)


def build_sim_backend(config: RunConfig, trace: TraceSource) -> SimBackend:
    """Refuses a whole trace that it cannot serve; of a streamed one, whoever reads it checks the rows."""
    for row in trace if isinstance(trace, Trace) else ():
        if row.output is None:
            check_simulated(row)
    assert isinstance(config.backend, SimConfig)
    return SimBackend(
        build_cost(config), seed=config.seed, vocab_size=vocab_size(config), eos_token_id=config.model.eos_token_id,
        scheduler_time=config.backend.scheduler_time,
    )  # fmt: skip


def check_token_ids(config: RunConfig, trace: Trace) -> None:
    """Refuses explicit token ids that the model does not have. Raises TraceError with the place."""
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


def build_vllm_backend(config: RunConfig, observe: Path | None = None) -> Any:
    """Starts vLLM in this process. Whoever gets it closes it. observe: vLLM's own scheduler decides, and leaves a log
    there. Raises ConfigError for what it, or this testbed in it, cannot do."""
    assert isinstance(config.backend, VllmConfig)
    composition = make_policy("scheduler.composition", config.scheduler.composition)
    check_hits(config, composition)
    if config.model.path is None:
        raise ConfigError("backend=vllm needs model.path=<a folder with config.json and weights>: vLLM loads it itself")
    if num_cpu_blocks(config) and "num_cpu_blocks" in config.raw["cache"] and config.cache.num_cpu_blocks:
        raise ConfigError("backend=vllm has no CPU blocks to swap to: leave cache.num_cpu_blocks out, or set it to 0")
    from real.vllm.backend import VllmBackend

    bounds = _bounds_of_engine(config)
    if not getattr(composition, "splits_prompts", True):  # one that has outgrown the budget is computed alone
        bounds["max_num_batched_tokens"] = max(bounds["max_num_batched_tokens"], bounds["max_model_len"])
    return VllmBackend(
        str(config.model.path),
        config.backend,
        **bounds,
        kv_dtype=config.cache.kv_dtype,
        tensor_parallel_size=config.tensor_parallel_size,
        prefix_caching=config.cache.prefix_caching,
        is_async=config.scheduler.async_scheduling,
        observe=None if observe is None else str(observe),
    )


def build_real_backend(config: RunConfig, *, swaps: bool | None = None) -> Any:
    """Loads the model, on as many ranks as the device is said to have. Whoever gets it closes it. swaps: whether it is
    given plans that swap; None: as the configured preemption has it.

    Raises ConfigError if the packages of the real engine are not installed, and for what a device cannot do right.
    """
    with _real_packages():
        from real.backend import RealBackend
        from real.parallel.backend import RankedBackend
    num_ranks = config.tensor_parallel_size
    make: Any = RealBackend if num_ranks == 1 else partial(RankedBackend, num_ranks=num_ranks)
    return make(config.model, config.backend, **_options_of_engine(config, swaps))


def computes_beside(config: RunConfig) -> bool:
    """Whether a device computes steps while this process does something else."""
    if isinstance(config.backend, VllmConfig):
        return config.scheduler.async_scheduling  # else a plan is launched on the way to waiting for it
    if not isinstance(config.backend, RealConfig):
        return False
    from real.device import resolve_device

    return resolve_device(config.backend.device).type == "cuda"


def build_replicas(config: RunConfig) -> tuple[list[Any], Any]:
    """The same in processes of their own, `backend.num_replicas` of them, and what they say of themselves."""
    assert isinstance(config.backend, RealConfig)
    with _real_packages():
        from real.parallel.replica import ReplicaSetup, start_replicas
    setup = ReplicaSetup(config.model, config.backend, config.tensor_parallel_size, _options_of_engine(config))
    return start_replicas(setup, config.backend.num_replicas)


@contextmanager
def _real_packages() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"backend=real needs the package {error.name!r}: pip install '.[real]' in the repository (or `make demo`)"
        ) from None


def _options_of_engine(config: RunConfig, swaps: bool | None = None) -> dict[str, Any]:
    """What our own engine is made with. Raises ConfigError for what a device cannot do right."""
    assert isinstance(config.backend, RealConfig)
    check_hits(config, make_policy("scheduler.composition", config.scheduler.composition))
    check_plans_ahead(config)
    check_pace(config)
    return {
        **_bounds_of_engine(config),
        "num_cpu_blocks": num_cpu_blocks(config),
        "swaps": can_swap(config) if swaps is None else swaps,
        "sliding_window": sliding_window(config),
        "kv_dtype": _kv_dtype(config, config.backend),
    }


def _bounds_of_engine(config: RunConfig) -> dict[str, Any]:
    """What any engine of this machine is made with: the bounds of its steps, its memory for KV, and the seed."""
    bounds = limits(config)
    return {
        "block_size": config.cache.block_size,
        "max_num_batched_tokens": bounds.max_num_batched_tokens,
        "max_num_seqs": bounds.max_num_seqs,
        "max_model_len": bounds.max_model_len,
        "gpu_memory_utilization": config.cache.gpu_memory_utilization,
        "num_gpu_blocks": config.cache.num_gpu_blocks,
        "seed": config.seed,
    }


def _kv_dtype(config: RunConfig, backend: RealConfig) -> str | None:
    """The format of K and V if it is not the weights'. Raises ConfigError for one that the engine does not keep."""
    kv_dtype, own = config.cache.kv_dtype, backend.dtype or config.model.dtype
    if kv_dtype in (None, own):
        return None
    if kv_dtype not in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        raise ConfigError(
            f"cache.kv_dtype is {kv_dtype!r}, and the real engine computes in {own}; it keeps K and V in that, or as "
            "fp8_e4m3 or fp8_e5m2"
        )
    return "fp8_e4m3" if kv_dtype == "fp8" else kv_dtype
