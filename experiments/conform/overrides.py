"""A case's configuration as overrides of a preset: the keys that a user would type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.configuration.compose import compose_config, to_overrides
from experiments.configuration.config import RunConfig
from testbed.policies.compositions.unified import Unified

SCHEDULER_KEYS = (
    "max_num_seqs", "max_num_batched_tokens", "max_model_len", "preemption_mode", "queue_order",
    "long_prefill_token_threshold", "max_num_partial_prefills", "async_scheduling",
)  # fmt: skip
CACHE_KEYS = ("block_size", "num_gpu_blocks", "num_cpu_blocks", "prefix_caching", "watermark")


def case_config(preset: str, config: dict[str, Any], options: Mapping[str, Any] | None = None) -> RunConfig:
    """The preset with what the case sets; null leaves the preset's value, and no host pool. options: of vLLM V1's
    composition. Raises ConfigError."""
    given = {key: value for key, value in config.items() if value is not None}
    scheduler = {key.removesuffix("_mode"): given[key] for key in SCHEDULER_KEYS if key in given}
    cache = {"num_cpu_blocks": 0} | {key: given[key] for key in CACHE_KEYS if key in given}
    budget, threshold = given.get("max_num_batched_tokens"), scheduler.get("long_prefill_token_threshold", 0)
    if budget is not None and threshold > budget and preset in ("vllm_v1", "vllm_v1_async", "vllm_v1_0_8"):
        scheduler["long_prefill_token_threshold"] = budget  # a larger one never binds there, and is refused here
    if preset == "vllm_v0_chunked":  # logged without the front end, which refuses prompts longer than the model
        scheduler["kv_rules"] = {"length_limit": "chunk"}
    scheduler |= composition_of(options or {})
    settings: dict[str, Any] = {"scheduler": {"name": preset, **scheduler}, "cache": cache}
    if "max_model_len" in given:  # no model is run: its positions are as many as the case needs
        settings["model"] = {"max_position_embeddings": given["max_model_len"]}
    return compose_config(to_overrides(settings))


def composition_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """What a scheduler's configuration says of vLLM V1's composition with these options; none: the preset's own."""
    return {"composition": {"_target_": f"{Unified.__module__}.{Unified.__qualname__}", **options}} if options else {}
