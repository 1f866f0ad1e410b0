"""Options of the real backend. Plain values, checked here; importing this module does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from testbed.errors import ConfigError

DEVICES = ("auto", "cuda", "cpu")
DTYPES = ("float32", "bfloat16", "float16")
ATTENTION_NAMES = ("auto", "flash_attn", "triton", "torch")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
PACES = ("real_time", "as_fast_as_possible", "cpu_time")
MAX_NUM_REPLICAS = 256
MAX_NUM_THREADS = 1024  # torch does not survive many more


@dataclass(frozen=True, slots=True)
class RealConfig:
    """How the engine runs; what it runs is a ModelSpec, what it is fed is a plan.

    device: `auto` takes CUDA where there is a GPU. dtype: of weights and KV; None takes the model's. attention: `auto`
    takes the first provider that can run, in the order of ATTENTION_NAMES. load_format: `auto` reads safetensors when
    the model's path is a folder and draws random weights otherwise. cpu_kv_bytes: KV memory when the device is the CPU.
    num_threads: of torch on the CPU; None leaves torch's choice. pace: `real_time` waits for arrivals, `cpu_time` does
    by the CPU time of this process, `as_fast_as_possible` moves the clock forward instead. speed: 2.0 replays a trace
    twice as fast: arrivals and think times are divided by it; all that is recorded stays in the engine's own time.
    cuda_graphs: steps of decodes only, up to max_captured_size rows, are captured when the engine starts and replayed
    (CUDA only). k_scale, v_scale: what keys and values are divided by before they are stored as
    cache.kv_dtype=fp8_e4m3 or fp8_e5m2.
    rank_timeout_s: how long a rank, or a replica, is waited for before the run is given up.
    num_replicas: engines, each with a scheduler, blocks and a device of its own; router: which of them serves a
    request, a name or {_target_: a class of yours}, as with backend=sim.
    """

    device: str = "auto"
    dtype: str | None = None
    attention: str = "auto"
    load_format: str = "auto"
    cpu_kv_bytes: int = 256 * 1024**2
    num_threads: int | None = None
    pace: str = "real_time"
    speed: float = 1.0
    cuda_graphs: bool = True
    max_captured_size: int = 512
    k_scale: float = 1.0
    v_scale: float = 1.0
    rank_timeout_s: float = 300.0
    num_replicas: int = 1
    router: Any = "round_robin"

    def __post_init__(self) -> None:
        _check_choice("device", self.device, DEVICES)
        if self.dtype is not None:
            _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("attention", self.attention, ATTENTION_NAMES)
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        _check_choice("pace", self.pace, PACES)
        for name in ("cpu_kv_bytes", "max_captured_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"backend.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("k_scale", "v_scale", "rank_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"backend.{name} is {getattr(self, name)}; it must be a finite number above 0")
        if not 0 < self.speed < math.inf:
            raise ConfigError(f"backend.speed is {self.speed}; it must be above 0: 2 replays a trace twice as fast")
        if not 1 <= self.num_replicas <= MAX_NUM_REPLICAS:
            raise ConfigError(f"backend.num_replicas is {self.num_replicas}; it must be 1 to {MAX_NUM_REPLICAS}")
        if self.num_replicas > 1 and self.pace == "cpu_time":
            raise ConfigError(
                "backend.pace=cpu_time is the CPU time of one process, and each of backend.num_replicas has its own; "
                "choose real_time or as_fast_as_possible"
            )
        if self.num_threads is not None and not 1 <= self.num_threads <= MAX_NUM_THREADS:
            raise ConfigError(f"backend.num_threads is {self.num_threads}; it must be 1 to {MAX_NUM_THREADS}, or null")


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"backend.{key} is {value!r}; choose one of {', '.join(choices)}")
