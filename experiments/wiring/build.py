"""Builds trace, scheduler and simulator from a RunConfig. Real engines are built in build_engine.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from experiments.configuration.config import RunConfig
from experiments.configuration.on_device import check_plans_ahead
from experiments.configuration.policies import make_policy
from experiments.configuration.saved import read_config
from experiments.wiring.costs import CostEstimator, block_bytes, build_cost, check_counted, quantised_otherwise
from experiments.wiring.foreign import CheckedOracle, failures_named, own_classes
from experiments.wiring.traces import vocab_size
from real.config import RealConfig
from real.vllm.config import VllmConfig
from sim.backend import SimBackend
from sim.config import SimConfig
from sim.cost.config import RooflineConfig
from testbed.blocks.eviction import LRU, LRUByLastStep
from testbed.blocks.interfaces import EvictionPolicy
from testbed.blocks.keys import TokenKeys
from testbed.blocks.manager import BlockManager
from testbed.checks import choose
from testbed.composites import declared, with_parts
from testbed.core.scheduler import Scheduler
from testbed.errors import ConfigError, DeviceError, RequestError
from testbed.policies.compositions.unified import Unified
from testbed.policies.config import SchedulerConfig
from testbed.policies.context import PolicyContext, bind
from testbed.policies.preemption import Recompute, Swap
from testbed.routing.config import FleetConfig
from testbed.specs.memory import activation_bytes, graph_bytes, num_blocks_of_budget, num_kv_blocks
from testbed.specs.model import check_ranks
from testbed.traces.classes import ClassFields
from testbed.traces.schema import Trace, TraceRequest, TraceSource

# --- core ---


@dataclass(frozen=True, slots=True)
class Pools:
    num_gpu_blocks: int
    num_cpu_blocks: int


def num_cpu_blocks(config: RunConfig) -> int:
    """Returns the number of CPU blocks on each rank. As in vLLM, cache.swap_space_gib is the memory of each rank."""
    if config.cache.num_cpu_blocks is not None:
        return config.cache.num_cpu_blocks
    return int(config.cache.swap_space_gib * 2**30) // block_bytes(config)


def can_swap(config: RunConfig) -> bool:
    """Whether a plan of this scheduler may swap: False if it always preempts by recompute. Beams are swapped always."""
    recomputes = isinstance(make_policy("scheduler.preemption", config.scheduler.preemption), Recompute)
    return not recomputes or config.sampling.beam_width > 1


def simulated_pools(config: RunConfig) -> Pools:
    """Returns the KV pools of a simulated engine; by default as many blocks as the real engine takes: on a GPU those
    that fit into its memory, on a CPU those of its default budget. Raises ModelError for a model whose memory is not
    known."""
    num_gpu = config.cache.num_gpu_blocks
    if num_gpu is None:
        check_counted(config)
    if num_gpu is None and config.device.kind == "cpu":
        num_gpu = num_blocks_of_budget(RealConfig().cpu_kv_bytes, block_bytes(config), config.cache.block_size)
    elif num_gpu is None:
        num_gpu = _num_blocks_that_fit(config)
    return Pools(num_gpu, num_cpu_blocks(config))


def _num_blocks_that_fit(config: RunConfig) -> int:
    """Returns the KV blocks that fit into a simulated GPU. Raises DeviceError if none does."""
    bounds, size = config.limits, config.tensor_parallel_size
    check_ranks(config.model, size)
    try:
        return num_kv_blocks(
            memory_bytes=config.device.memory_bytes,
            utilization=config.cache.gpu_memory_utilization,
            weight_bytes=config.model.weight_bytes(size),
            activation_bytes=activation_bytes(config.model, bounds.max_num_batched_tokens, bounds.max_num_seqs, size),
            graph_bytes=graph_bytes(config.model, _largest_captured(config), size),
            block_bytes=block_bytes(config),
        )
    except DeviceError as error:
        if not (quantised := quantised_otherwise(config.model)):
            raise
        raise DeviceError(f"{quantised}, which take memory as {config.model.dtype} here: {error}") from None


def pool_notes(config: RunConfig) -> list[str]:
    """Returns a note if the simulated GPU could not hold the KV pool that was asked for, and the weights."""
    num, device = config.cache.num_gpu_blocks, config.device
    if num is None or not isinstance(config.backend, SimConfig) or device.kind == "cpu":
        return []
    needed = num * block_bytes(config) + config.model.weight_bytes(config.tensor_parallel_size)
    if needed <= device.memory_bytes:
        return []
    told, has = -(-needed // 2**30), device.memory_bytes // 2**30  # rounded apart, as they may be close
    return [f"cache.num_gpu_blocks={num} and the weights take {told:,} GiB: more than {device.name} has ({has:,} GiB)"]


def _largest_captured(config: RunConfig) -> int:
    """Returns the tokens of the largest step that an engine captures as a CUDA graph: by the cost model's settings, or
    the real engine's defaults for cost models without them. 0: no graphs."""
    said, bounds = config.cost if isinstance(config.cost, RooflineConfig) else RealConfig(), config.limits
    if config.device.kind != "cuda" or not said.cuda_graphs:
        return 0
    num_decodes = min(said.max_captured_size, bounds.max_num_seqs)
    return min(max(num_decodes, said.max_captured_tokens), bounds.max_num_batched_tokens)


class MadePolicies(NamedTuple):
    """The policies of one scheduler, not bound yet."""

    composition: Any
    queue: Any
    admission: Any
    preemption: Any
    victims: Any
    oracle: Any
    eviction: EvictionPolicy


def make_policies(config: RunConfig) -> MadePolicies:
    """Makes the chosen policies. Raises ConfigError for one that does not exist or cannot be constructed."""
    chosen = config.scheduler
    queue = make_policy("scheduler.queue_order", chosen.queue_order)
    return MadePolicies(
        composition=make_policy("scheduler.composition", chosen.composition),
        queue=queue,
        admission=make_policy("scheduler.admission", chosen.admission),
        preemption=make_policy("scheduler.preemption", chosen.preemption),
        victims=make_policy("scheduler.victim", _victim(chosen, queue)),
        oracle=make_policy("scheduler.oracle", chosen.oracle),
        eviction=_eviction(config),
    )


_LARGE = 1 << 16  # blocks


def check_makeable(config: RunConfig) -> None:
    """Raises ConfigError for policies that do not exist or cannot be constructed, for limits and KV rules that the
    model does not allow, and for settings that contradict each other; called before a sweep runs. A pool that goes by a
    device's memory is taken as large: whether a model fits there is told by its point."""
    if isinstance(config.backend, VllmConfig) and config.backend.decides == "vllm":
        return
    build_scheduler(config, Pools(config.cache.num_gpu_blocks or _LARGE, num_cpu_blocks(config)))
    if isinstance(config.backend, FleetConfig):
        make_policy("backend.router", config.backend.router)


def build_scheduler(config: RunConfig, pools: Pools, estimator: CostEstimator | None = None) -> Scheduler:
    """estimator: for the policies; None: one of its own."""
    with failures_named(config):
        return _build(config, pools, estimator or build_estimator(config))


def _build(config: RunConfig, pools: Pools, estimator: CostEstimator) -> Scheduler:
    cache, scheduler = config.cache, config.scheduler
    check_plans_ahead(config)
    check_policies(config, pools)
    made = make_policies(config)
    _check_made(config, pools, made)
    blocks = BlockManager(
        block_size=cache.block_size,
        num_gpu_blocks=pools.num_gpu_blocks,
        num_cpu_blocks=pools.num_cpu_blocks,
        watermark=config.watermark,
        rules=scheduler.kv_rules,
        eviction=made.eviction,
        key_source=TokenKeys(cache.block_size) if cache.prefix_caching else None,
        max_model_len=config.limits.max_model_len,
        isolate_tenants=cache.isolate_tenants,
        lookahead_slots=scheduler.lookahead_slots,
        sliding_window=config.sliding_window,
    )
    is_ours = type(made.oracle).__module__.startswith("testbed.")
    oracle = made.oracle if is_ours else CheckedOracle(made.oracle)
    context = PolicyContext(blocks, config.limits, oracle, estimator, config.seed)
    for policy in sorted(made, key=lambda policy: policy is not made.oracle):  # it comes first: the others may ask it
        bind(policy, context)
    for victims in with_parts([made.victims]):
        if hasattr(victims, "bind_queue"):
            victims.bind_queue(made.queue)
    return Scheduler(
        limits=context.limits,
        blocks=blocks,
        composition=made.composition,
        queue=made.queue,
        victims=made.victims,
        admission=made.admission,
        preemption=made.preemption,
        eos_token_id=config.model.eos_token_id,
        oracle=oracle,
    )


def _eviction(config: RunConfig) -> EvictionPolicy:
    policy = cast(EvictionPolicy, make_policy("cache.eviction", config.cache.eviction))
    by_last_step = config.scheduler.kv_rules.lru_by == "last_step"
    return LRUByLastStep() if by_last_step and type(policy) is LRU else policy


def _victim(scheduler: SchedulerConfig, queue: Any) -> Any:
    """Returns the victim choice. `auto`: lowest priority if the queue is ordered by priority, otherwise most recently
    admitted (vLLM V1)."""
    if scheduler.victim != "auto":
        return scheduler.victim
    return "lowest_priority" if declared(queue, "goes_by", "") == "priority" else "most_recently_admitted"


def victim_of_auto(config: RunConfig) -> str | None:
    """Returns the victim choice for which `auto` stands, for the manifest; None if another one is named."""
    chosen = config.scheduler
    if chosen.victim != "auto":
        return None
    return str(_victim(chosen, make_policy("scheduler.queue_order", chosen.queue_order)))


def _check_made(config: RunConfig, pools: Pools, made: MadePolicies) -> None:
    """Raises ConfigError if the made policies contradict the settings, however the policies were named."""
    if isinstance(made.preemption, Swap) and pools.num_cpu_blocks == 0:
        raise ConfigError(
            "scheduler.preemption=swap needs CPU blocks, and there are none: raise cache.num_cpu_blocks or "
            "cache.swap_space_gib, or choose scheduler.preemption=recompute"
        )
    for key, policy in (("queue_order", made.queue), ("victim", made.victims)):
        if goes_by := declared(policy, "goes_by", ""):
            choose(f"scheduler.{key}: goes_by of {type(policy).__name__}", goes_by, ClassFields.NAMES)
    if config.scheduler.kv_rules.free_order == "one_queue" and type(made.eviction) not in (LRU, LRUByLastStep):
        raise ConfigError(
            "scheduler.kv_rules.free_order=one_queue hands blocks out in the order released; it goes with "
            "cache.eviction=lru only"
        )
    bounds = config.limits
    threshold, budget = bounds.long_prefill_token_threshold, bounds.max_num_batched_tokens
    if threshold > budget and isinstance(made.composition, Unified):
        raise ConfigError(
            f"scheduler.long_prefill_token_threshold ({threshold}) is larger than max_num_batched_tokens ({budget}); a "
            "chunk cannot exceed the budget: lower it, or set 0 (off)"
        )
    num_seqs = config.sampling.num_seqs
    least = min(("max_num_seqs", "max_num_batched_tokens"), key=lambda name: getattr(bounds, name))
    if num_seqs > getattr(bounds, least):
        raise ConfigError(
            f"sampling asks for {num_seqs} sequences of each request, and scheduler.{least} is "
            f"{getattr(bounds, least)}: none could ever run; raise it, or lower sampling.n, best_of or beam_width"
        )


def check_policies(config: RunConfig, pools: Pools) -> None:
    """Raises ConfigError, with the reason, for settings that contradict each other."""
    cache, scheduler = config.cache, config.scheduler
    watermark = scheduler.kv_rules.watermark_blocks(config.watermark, pools.num_gpu_blocks)
    if watermark >= pools.num_gpu_blocks and scheduler.kv_rules.watermark_when_idle:
        raise ConfigError(
            f"a watermark of {config.watermark} leaves {watermark} of {pools.num_gpu_blocks} KV blocks free: no prompt "
            "could ever be admitted; lower cache.watermark or raise cache.num_gpu_blocks"
        )
    budget = config.limits.max_num_batched_tokens
    if scheduler.kv_rules.chunks_fill_blocks and cache.prefix_caching and budget < cache.block_size:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens is {budget}, and with scheduler.kv_rules.chunks_fill_blocks a step must "
            f"fill a block of {cache.block_size} tokens; raise it, or lower cache.block_size"
        )


def build_estimator(config: RunConfig) -> CostEstimator:
    return CostEstimator(build_cost(_priced_as(config)), config.scheduler.estimator, config.seed)


def estimator_name(config: RunConfig) -> str:
    """Returns the estimator's cost model and device, for the manifest of simulated and real runs."""
    priced = _priced_as(config)
    return f"{priced.cost_name} on {priced.device.name}"


def _priced_as(config: RunConfig) -> RunConfig:
    """Returns the configuration that step times follow: the run's own, or for a replay that of the replayed run."""
    if config.recorded_run is None:
        return config
    return _priced_as(RunConfig.from_container(read_config(Path(config.recorded_run))))


def may_ask(config: RunConfig, what: str) -> bool:
    """Whether a policy asks its context's `oracle` or `estimator`; a user's own class may."""
    if own_classes(config):
        return True
    return any(what in getattr(policy, "asks", ()) for policy in with_parts(make_policies(config)))


# --- backends ---


def check_simulated(row: TraceRequest) -> None:
    """Raises RequestError for a request whose output is not forced: the simulator has no model to sample from."""
    if row.output is None:
        where = f"{row.place}: " if row.place else ""
        raise RequestError(
            f"{where}request {row.request_id!r} forces no output, and the simulator has no model to sample from; "
            "give it output_tokens or output_token_ids"
        )


def build_sim_backend(config: RunConfig, trace: TraceSource) -> SimBackend:
    """Builds the simulated backend. Raises ConfigError if it cannot serve the trace; rows of a streamed trace are
    checked where they are read."""
    for row in trace if isinstance(trace, Trace) else ():
        check_simulated(row)
    assert isinstance(config.backend, SimConfig)
    return SimBackend(
        build_cost(config), seed=config.seed, vocab_size=vocab_size(config), eos_token_id=config.model.eos_token_id,
        scheduler_time=config.backend.scheduler_time,
    )  # fmt: skip
