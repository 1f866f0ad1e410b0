"""Configuration of the scheduler: its limits, and its policies by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from testbed.blocks.config import KVRules
from testbed.checks import require, require_whole, require_whole_or_null
from testbed.core.limits import Limits
from testbed.errors import ConfigError

_WITHOUT_TOKEN_BUDGET = (  # their systems limit a batch by its sequences only
    "static", "testbed.policies.compositions.static.Static",
    "iteration_level", "testbed.policies.compositions.iteration_level.IterationLevel",
)  # fmt: skip
_SHORTEST_BUDGET, _SHORTEST_OF_BATCHES = 2048, 16_384  # tokens; the latter are 32 prompts of 512


@dataclass(frozen=True, slots=True)
class EstimatorConfig:
    """The error of the step times that policies are told: those of the run's cost model, times `factor`, and times a
    log-normal factor of median 1 for each shape of a step. sigma: standard deviation of its logarithm."""

    factor: float = 1.0
    sigma: float = 0.0

    def __post_init__(self) -> None:
        require("scheduler.estimator.factor", self.factor, 1e-3 <= self.factor <= 1e3, "from 0.001 to 1000")
        require("scheduler.estimator.sigma", self.sigma, 0 <= self.sigma <= 3, "from 0 to 3")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The `scheduler` group. A policy is a name, or {_target_: your own class}."""

    name: str = "custom"
    composition: Any = "unified"  # unified, prefill_first, decode_first, prefill_decode_split, iteration_level, static
    max_num_seqs: int = 256  # running sequences
    max_num_batched_tokens: int | None = 2048  # tokens a step; null: as many as max_model_len, or more (resolve_limits)
    max_model_len: int | None = None  # null: the model's
    preemption: Any = "auto"  # auto, recompute, swap, cheaper
    queue_order: Any = "fcfs"
    admission: Any = "watermark"
    victim: Any = "auto"  # auto: the lowest priority under queue_order=priority, else the most recently admitted
    oracle: Any = "none"  # the predictor of output lengths: none, perfect, noisy, binned
    estimator: EstimatorConfig = field(default_factory=EstimatorConfig)  # how wrong the predictor of step times is
    long_prefill_token_threshold: int = 0  # unified: most tokens of a prefill in a step; decode_first: longer is long
    max_num_partial_prefills: int = 1  # prompts that may be partly prefilled at the same time (decode_first)
    max_long_partial_prefills: int = 1  # those of them that are longer than the threshold (decode_first)
    lookahead_slots: int = 0  # extra slots that a decoding sequence reserves; nothing is drafted or verified
    async_scheduling: bool = False  # a step is planned while the one before it runs (vLLM's default on GPUs since 0.14)
    watermark: float = 0.01  # the preset's; cache.watermark overrides it
    kv_rules: KVRules = field(default_factory=KVRules)

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_partial_prefills", "max_long_partial_prefills"):
            require_whole(f"scheduler.{name}", getattr(self, name), 1)
        for name in ("max_num_batched_tokens", "max_model_len"):
            require_whole_or_null(f"scheduler.{name}", getattr(self, name), 1)
        require_whole("scheduler.lookahead_slots", self.lookahead_slots, 0)
        require_whole("scheduler.long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        require("scheduler.watermark", self.watermark, 0 <= self.watermark < 1, "in [0, 1)")


def resolve_limits(config: SchedulerConfig, model_max_len: int) -> Limits:
    """Returns the limits, with the model's length as a default. Raises ConfigError if max_model_len exceeds it.

    A step without a budget of its own has room for the longest prompt, and for a few thousand tokens.
    """
    max_model_len = config.max_model_len or model_max_len
    if max_model_len > model_max_len:
        raise ConfigError(
            f"scheduler.max_model_len is {max_model_len}, but the model has {model_max_len} positions; lower it"
        )
    given = config.composition
    named = given.get("_target_") if isinstance(given, Mapping) else given
    shortest = _SHORTEST_OF_BATCHES if named in _WITHOUT_TOKEN_BUDGET else _SHORTEST_BUDGET
    return Limits(
        config.max_num_seqs,
        config.max_num_batched_tokens or max(max_model_len, shortest),
        max_model_len,
        config.long_prefill_token_threshold,
        config.max_num_partial_prefills,
        config.max_long_partial_prefills,
        2 if config.async_scheduling else 1,
    )
