"""Configuration of `backend=vllm`: vLLM's engine, in this process. Plain data; needs no vLLM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from real.config import PACES
from testbed.errors import ConfigError
from testbed.foreign_text import unknown

LOAD_FORMATS = ("auto", "dummy")
DECIDERS = ("testbed", "vllm")


@dataclass(frozen=True)
class VllmConfig:
    """How vLLM runs; the model is model.path. decides: this testbed's scheduler inside vLLM, or vLLM's own, observed.
    dtype: None takes the model's. load_format: `dummy` draws random weights. pace, speed: as of backend=real. options:
    more arguments of vllm.LLM.
    """

    decides: str = "testbed"
    dtype: str | None = None
    load_format: str = "auto"
    enforce_eager: bool = False
    pace: str = "real_time"
    speed: float = 1.0
    options: Any = None

    def __post_init__(self) -> None:
        for name, choices in (("decides", DECIDERS), ("load_format", LOAD_FORMATS), ("pace", PACES)):
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(unknown(f"backend.{name} is {value!r}", str(value), choices))
        if not 0 < self.speed < math.inf:
            raise ConfigError(f"backend.speed is {self.speed}; it must be a finite number above 0")
        if self.options is not None and not isinstance(self.options, dict):
            raise ConfigError(f"backend.options is {self.options!r}; it must be a mapping of arguments of vllm.LLM")
