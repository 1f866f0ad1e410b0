"""Checks for settings that a simulator can run but a real engine cannot, or hardly: made before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from experiments.configuration.config import RunConfig
from experiments.configuration.names import device_named
from experiments.configuration.policies import make_policy
from real.config import RealConfig
from real.vllm.config import VllmConfig
from sim.config import SimConfig
from testbed.composites import declared
from testbed.errors import ConfigError
from testbed.policies.preemption import Cheaper, Swap

_LARGE = 100_000_000  # parameters; a CPU takes about a second and more for a step of such a model


def check_device(overrides: Sequence[str], config: RunConfig) -> None:
    """Raises ConfigError if the user named a GPU but the real engine would run on another device.

    overrides: those that the user gave; a default device is no claim about this machine.
    """
    asked = f"device={config.device.name}"
    if not config.is_real or asked not in overrides or config.device.kind != "cuda":
        return
    if config.raw["backend"].get("device") == "cpu":
        raise ConfigError(f"{asked} and backend.device=cpu contradict each other; leave one of them out")
    try:
        import torch
    except ModuleNotFoundError:
        return  # backend=real reports the missing package
    found = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if found is None or device_named(found) not in (None, config.device.name):
        there = "no GPU that torch can use" if found is None else found
        raise ConfigError(
            f"{asked}: this machine has {there}; leave device out to run on what there is, or simulate it (backend=sim)"
        )


def slow_engine(config: RunConfig) -> list[str]:
    """Returns a note if the real engine would run a large model on a CPU."""
    num = config.model.num_parameters
    if not isinstance(config.backend, RealConfig) or num < _LARGE:
        return []
    try:
        from real.device import resolve_device
    except ModuleNotFoundError:
        return []  # as above
    if resolve_device(config.backend.device).type != "cpu":
        return []
    size = f"{config.model.name}, of {num / 1e6:,.0f} million parameters,"
    return [f"the engine runs on a CPU: {size} may take hours; to try it out, set model=tiny"]


def unlike_clocks(configs: Iterable[RunConfig]) -> list[str]:
    """Returns a note if several runs of one sweep each scale their time by a probe of their own."""
    engines = [one.backend for one in configs if isinstance(one.backend, RealConfig | VllmConfig)]
    num = sum(engine.pace == "probe_scaled" and engine.probe_ns is None for engine in engines)
    if num < 2:
        return []
    why = f"each of {num} points scales its time by its own probe, so that points differ by the machine's state"
    return [f"backend.pace=probe_scaled without backend.probe_ns: {why}; give all one, as a first run prints it"]


def check_plans_ahead(config: RunConfig) -> None:
    """Raises ConfigError for settings that do not work with asynchronous scheduling (the next step is planned while one
    runs)."""
    if not config.scheduler.async_scheduling:
        return
    if config.is_real and config.tensor_parallel_size > 1:
        raise ConfigError(
            "scheduler.async_scheduling=true needs device.tensor_parallel_size=1 with backend=real: ranks take one "
            "step at a time"
        )
    if isinstance(config.backend, SimConfig) and config.backend.swap_overlap:
        raise ConfigError(
            "scheduler.async_scheduling=true needs backend.swap_overlap=false: transfers beside steps are simulated "
            "for one step at a time"
        )
    is_merged = config.scheduler.kv_rules.duplicates == "merged" and config.cache.prefix_caching
    if isinstance(config.backend, VllmConfig) and is_merged:
        raise ConfigError(
            "scheduler.kv_rules.duplicates=merged changes block tables while a token is on its way, and vLLM's workers "
            f"take a new table only with all tokens (as scheduler={config.scheduler.name} has it): set "
            "scheduler.kv_rules={hits_visible:commit,duplicates:listed,hits_frozen:false}, cache.prefix_caching=false, "
            "or vLLM's async_scheduling=False"
        )


def check_pace(config: RunConfig) -> None:
    """Raises ConfigError for pace=probe_scaled without a single engine on a CPU."""
    if getattr(config.backend, "pace", None) != "probe_scaled":
        return
    ranks = config.tensor_parallel_size
    for key, is_meant in (
        (f"device.tensor_parallel_size={ranks}", ranks > 1),
        ("backend.device=cuda", getattr(config.backend, "device", None) == "cuda"),
    ):
        if is_meant:
            raise ConfigError(f"backend.pace=probe_scaled times a step of one engine on a CPU, not with {key}")


def check_hits(config: RunConfig, composition: Any) -> None:
    """Raises ConfigError for KV rules that count blocks as computed before they are: a quirk of vLLM 0.8.5 on which its
    decisions depend, and with which a model reads wrong KV.

    hits_frozen: a block may be evicted between its lookup and its use. hits_visible=plan: a block that is a hit as soon
    as its step is planned may be in a chunk that is not computed yet.
    """
    rules = config.scheduler.kv_rules
    if config.is_simulated or not config.cache.prefix_caching:
        return
    name, key = config.scheduler.name, "scheduler.kv_rules"
    if rules.hits_visible == "plan" and declared(composition, "splits_prompts", True):
        raise ConfigError(
            f"{key}.hits_visible=plan counts chunks as cached before they are computed (as does {name}), and a "
            "real engine would give wrong tokens: set cache.prefix_caching=false, or "
            f"{key}={{hits_visible:commit,duplicates:listed,hits_frozen:false}}; or simulate it"
        )
    if rules.hits_frozen:
        raise ConfigError(
            f"{key}.hits_frozen=true counts blocks as cached that were evicted since (as does {name}), and a real "
            f"engine would give wrong tokens: set {key}.hits_frozen=false or cache.prefix_caching=false; or simulate it"
        )


def check_in_vllm(config: RunConfig, max_model_len: int, *, is_ours: bool = True) -> None:
    """Raises ConfigError for settings that vLLM does not support, or not under this testbed's scheduler (is_ours)."""
    preemption, window, sampling = config.scheduler.preemption, config.sliding_window, config.sampling
    if is_ours and isinstance(make_policy("scheduler.preemption", preemption), Swap | Cheaper):
        raise ConfigError(
            f"scheduler.preemption={preemption}: vLLM has no CPU blocks to swap to; set it to recompute or auto"
        )
    if is_ours and window is not None and window < max_model_len:
        key = "model" if config.cache.sliding_window is None else "cache"
        raise ConfigError(
            f"{key}.sliding_window={window}: vLLM's workers read the blocks that this releases; leave it out, run a "
            f"model without a window, or set scheduler.max_model_len to {window} at most"
        )
    num_gpu_blocks, block_size = config.cache.num_gpu_blocks, config.cache.block_size
    if num_gpu_blocks is not None and num_gpu_blocks * block_size < max_model_len:
        raise ConfigError(
            f"cache.num_gpu_blocks={num_gpu_blocks} of {block_size} tokens each hold no request of max_model_len "
            f"({max_model_len}), and vLLM does not start with fewer: set scheduler.max_model_len to "
            f"{num_gpu_blocks * block_size} at most, or cache.num_gpu_blocks to {-(-max_model_len // block_size)}"
        )
    if max(sampling.n, sampling.best_of or 1, sampling.beam_width) > 1:
        raise ConfigError("backend=vllm has no groups of sequences: set sampling.n=1, no best_of, no beam_width")
    if sampling.prompt_logprobs is not None:
        raise ConfigError("backend=vllm returns no logprobs of prompts: leave sampling.prompt_logprobs out")


def check_steps(config: RunConfig, composition: Any, num_tokens: int, max_model_len: int) -> None:
    """Raises ConfigError if a step of the composition may have more tokens than vLLM's workers were sized for.

    A composition that does not split prompts computes a prompt longer than the token budget in a step of its own. A
    preempted sequence that has outgrown the budget is computed the same way.
    """
    if not declared(composition, "splits_prompts", True) and max_model_len > num_tokens:
        raise ConfigError(
            f"scheduler={config.scheduler.name} splits no prompt: a step may have max_model_len ({max_model_len}) "
            f"tokens, and vLLM's workers were sized for {num_tokens}: start it with max_num_batched_tokens of as many"
        )
