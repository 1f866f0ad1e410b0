"""The wiring: from a RunConfig to a trace, a scheduler and a backend. The only place that joins rooms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from experiments.config import COST_CONFIGS, RunConfig
from experiments.settings import MooncakeTraceConfig, RecordedConfig, ShareGPTTraceConfig, TraceConfig, unknown
from experiments.structured import freeze
from sim.backend import SimBackend, refuse_unforced
from sim.cost.base import CostModel
from sim.cost.constant import ConstantConfig, ConstantCost
from sim.cost.linear import LinearConfig, LinearCost
from sim.cost.roofline import RooflineConfig, RooflineCost
from testbed.blocks.eviction import LRU
from testbed.blocks.keys import TokenKeys
from testbed.blocks.manager import BlockManager
from testbed.errors import ConfigError, TestbedError, TraceError
from testbed.policies.compositions.decode_first import DecodeFirst
from testbed.policies.compositions.prefill_first import PrefillFirst
from testbed.policies.compositions.unified import Unified
from testbed.policies.config import Limits, SchedulerConfig
from testbed.policies.queue_order import FCFS
from testbed.policies.victim import MostRecentlyAdmitted
from testbed.request import SamplingParams
from testbed.scheduler import Scheduler
from testbed.specs import ModelSpec, activation_bytes, num_kv_blocks
from testbed.traces import transforms
from testbed.traces.generators import SyntheticConfig, generate
from testbed.traces.readers import READERS
from testbed.traces.schema import TokenIds, Trace

# Names of policies; a user's own class is named by {_target_: module.Class} instead.
COMPOSITIONS: dict[str, Callable[[], Any]] = {
    "unified": Unified,
    "prefill_first": PrefillFirst,
    "decode_first": DecodeFirst,
}
QUEUE_ORDERS: dict[str, Callable[[], Any]] = {"fcfs": FCFS}
VICTIMS: dict[str, Callable[[], Any]] = {"most_recently_admitted": MostRecentlyAdmitted}
EVICTIONS: dict[str, Callable[[], Any]] = {"lru": LRU}


def make_policy(key: str, choice: Any, named: Mapping[str, Callable[[], Any]]) -> Any:
    """A policy by name, or a user's class by `{_target_: …, …}`. Raises ConfigError with the valid names.

    A user's object must have the public methods that the named ones share.
    """
    if isinstance(choice, dict):
        if "_target_" not in choice:
            found = ", ".join(map(str, choice)) or "nothing"
            raise ConfigError(f"{key} has {found} where a class is named by _target_: {{_target_: your.Class}}")
        policy = instantiate(key, choice)
        wanted = set.intersection(*(set(_methods(example)) for example in named.values()))
        missing = sorted(name for name in wanted if not hasattr(policy, name))
        if missing:
            raise ConfigError(f"{key}: {choice['_target_']} lacks {', '.join(missing)}; see docs/extending.md")
        return policy
    if not isinstance(choice, str) or choice not in named:
        raise ConfigError(unknown(f"{key} is {choice!r}", str(choice), list(named)) + ", or {_target_: your.Class}")
    return named[choice]()


def _methods(example: Callable[[], Any]) -> list[str]:
    """What a policy is called with: the public methods of its class, and its length and order where it has them."""
    special = ("__len__", "__iter__")
    return [name for name in dir(example) if (callable(getattr(example, name)) and name in special) or name[0] != "_"]


def instantiate(key: str, node: dict[str, Any], **arguments: Any) -> Any:
    """An object named by `_target_`. Raises ConfigError in one line."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as hydra_instantiate

    try:
        return hydra_instantiate({key: value for key, value in node.items() if key != "name"}, **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, TestbedError):
            raise error.__cause__ from None
        reason = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(f"{key}: cannot make {node.get('_target_')!r}: {reason}") from None


# --- trace ---


def build_trace(config: RunConfig) -> Trace:
    """Reads or generates the trace, then applies what the `trace` group asks for."""
    settings, values = config.trace, config.raw["trace"]
    if "_target_" in values:
        trace = cast(Trace, instantiate("trace", values))
    elif settings.name == "synthetic":
        trace = generate(freeze(SyntheticConfig, "trace", values), config.seed)
        if settings.limit is not None:
            trace = transforms.limit(trace, settings.limit)
    elif settings.name in READERS:
        if settings.path is None:
            raise ConfigError(f"trace={settings.name} needs trace.path=<file>")
        trace = READERS[settings.name](settings.path, limit=settings.limit, **_reader_options(settings))
    else:
        raise ConfigError(unknown(f"trace is {settings.name!r}", settings.name, ["synthetic", *READERS]))
    return _transformed(trace, settings)


def _transformed(trace: Trace, settings: TraceConfig) -> Trace:
    if settings.start_s or settings.end_s is not None:
        trace = transforms.window(trace, settings.start_s, settings.end_s)
    if settings.rate_scale != 1.0:
        trace = transforms.scale_rate(trace, settings.rate_scale)
    if settings.max_prompt_tokens is not None or settings.max_output_tokens is not None:
        trace = transforms.clip_lengths(trace, settings.max_prompt_tokens, settings.max_output_tokens)
    return trace


def _reader_options(settings: Any) -> dict[str, Any]:
    if isinstance(settings, MooncakeTraceConfig):
        return {"spread_batches": settings.spread_batches}
    if isinstance(settings, ShareGPTTraceConfig):
        tokenizer = None if settings.tokenizer is None else _load_tokenizer(settings.tokenizer)
        return {"tokenizer": tokenizer, "max_turns": settings.max_turns}
    return {}


def _load_tokenizer(path: str) -> Callable[[str], list[int]]:
    """A local Hugging Face tokenizer as text -> token ids."""
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except ImportError:
        raise ConfigError("trace.tokenizer needs transformers: pip install 'llm-serving-testbed[real]'") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"trace.tokenizer: no tokenizer at {path} ({str(error).splitlines()[0]})") from None
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def vocab_size(config: RunConfig) -> int:
    """The range of synthetic tokens: the trace's own setting, within the model's vocabulary."""
    size = config.trace.vocab_size or config.model.vocab_size
    if size > config.model.vocab_size:
        raise ConfigError(
            f"trace.vocab_size is {size}, but model {config.model.name} has {config.model.vocab_size} tokens; lower it"
        )
    return size


def sampling_params(config: RunConfig) -> SamplingParams:
    settings = config.sampling
    return SamplingParams(settings.temperature, settings.max_tokens, ignore_eos=settings.ignore_eos)


# --- core ---


@dataclass(frozen=True, slots=True)
class Pools:
    """How many KV blocks there are."""

    num_gpu_blocks: int
    num_cpu_blocks: int


def limits(config: RunConfig) -> Limits:
    return Limits.resolve(config.scheduler, config.model.max_position_embeddings)


def block_bytes(config: RunConfig, model: ModelSpec | None = None) -> int:
    return config.cache.block_size * (model or config.model).kv_bytes_per_token()


def num_cpu_blocks(config: RunConfig) -> int:
    if config.cache.num_cpu_blocks is not None:
        return config.cache.num_cpu_blocks
    return int(config.cache.swap_space_gib * 2**30) // block_bytes(config)


def simulated_pools(config: RunConfig) -> Pools:
    """As many blocks as the device's memory holds, by the formula that the real engine uses."""
    num_gpu = config.cache.num_gpu_blocks
    if num_gpu is None:
        bounds = limits(config)
        size = config.tensor_parallel_size
        num_gpu = num_kv_blocks(
            memory_bytes=config.device.memory_bytes,
            utilization=config.cache.gpu_memory_utilization,
            weight_bytes=config.model.num_parameters * config.model.dtype_bytes // size,
            activation_bytes=activation_bytes(config.model, bounds.max_num_batched_tokens, bounds.max_num_seqs),
            block_bytes=max(1, block_bytes(config) // size),
        )
    return Pools(num_gpu, num_cpu_blocks(config))


def build_scheduler(config: RunConfig, pools: Pools, *, record_decisions: bool) -> Scheduler:
    """The core, the same for both backends."""
    cache, scheduler = config.cache, config.scheduler
    blocks = BlockManager(
        block_size=cache.block_size,
        num_gpu_blocks=pools.num_gpu_blocks,
        num_cpu_blocks=pools.num_cpu_blocks,
        watermark=scheduler.watermark if cache.watermark is None else cache.watermark,
        rules=scheduler.kv_rules,
        eviction=make_policy("cache.eviction", cache.eviction, EVICTIONS),
        key_source=TokenKeys(cache.block_size) if cache.prefix_caching else None,
    )
    return Scheduler(
        limits=limits(config),
        blocks=blocks,
        composition=make_policy("scheduler.composition", scheduler.composition, COMPOSITIONS),
        queue=make_policy("scheduler.queue_order", scheduler.queue_order, QUEUE_ORDERS),
        victims=make_policy("scheduler.victim", scheduler.victim, VICTIMS),
        eos_token_id=config.model.eos_token_id,
        record_decisions=record_decisions,
    )


def unused_settings(config: RunConfig) -> list[str]:
    """Settings that were changed and that the composition does not read: two arms that differ in one are the same."""
    composition = make_policy("scheduler.composition", config.scheduler.composition, COMPOSITIONS)
    defaults = {item.name: item.default for item in fields(SchedulerConfig)}
    return [
        f"scheduler.{name} has no effect with composition {type(composition).__name__}"
        for name in getattr(composition, "unused_limits", ())
        if getattr(config.scheduler, name) != defaults[name]
    ]


# --- backends ---


def build_cost(config: RunConfig) -> CostModel:
    """The cost model of a simulated run."""
    values = config.raw["cost"]
    if "_target_" in values:
        model = instantiate("cost", values)
        if not hasattr(model, "price"):
            raise ConfigError(f"cost: {values['_target_']} lacks price; see docs/extending.md")
        return cast(CostModel, model)
    name = values.get("name", "")
    if name == "constant":
        return ConstantCost(freeze(ConstantConfig, "cost", values))
    if name == "linear":
        return LinearCost(freeze(LinearConfig, "cost", values))
    if name == "roofline":
        return RooflineCost(
            config.model,
            config.device,
            freeze(RooflineConfig, "cost", values),
            tensor_parallel_size=config.tensor_parallel_size,
            block_bytes=block_bytes(config),
        )
    raise ConfigError(unknown(f"cost is {name!r}", name, [*COST_CONFIGS, "recorded"]))


def recorded_run(config: RunConfig) -> str | None:
    """The real run that `cost=recorded` replays; None for other cost models."""
    values = config.raw["cost"]
    if values.get("name") != "recorded":
        return None
    return freeze(RecordedConfig, "cost", values).run


def build_sim_backend(config: RunConfig, trace: Trace) -> SimBackend:
    for row in trace.rows:
        refuse_unforced(row.request_id, row.num_output_tokens)
    return SimBackend(build_cost(config))


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


def build_real_backend(config: RunConfig) -> Any:
    """Loads the model. Raises ConfigError if the packages of the real engine are not installed."""
    if config.tensor_parallel_size != 1:
        raise ConfigError(
            f"device.tensor_parallel_size is {config.tensor_parallel_size}, but the real engine runs on one device "
            "so far; simulate it with backend=sim"
        )
    try:
        from real.backend import RealBackend
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"backend=real needs the package {error.name!r}: pip install 'llm-serving-testbed[real]' (or `make demo`)"
        ) from None
    bounds = limits(config)
    return RealBackend(
        config.model,
        config.backend,  # type: ignore[arg-type]  # backend=real has a RealConfig
        block_size=config.cache.block_size,
        max_num_batched_tokens=bounds.max_num_batched_tokens,
        max_num_seqs=bounds.max_num_seqs,
        max_model_len=bounds.max_model_len,
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
        num_gpu_blocks=config.cache.num_gpu_blocks,
        num_cpu_blocks=num_cpu_blocks(config),
        seed=config.seed,
    )
