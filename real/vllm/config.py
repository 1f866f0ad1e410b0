"""Configuration of `backend=vllm`: vLLM's engine, in this process. Plain data; needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from real.config import PACES, check_probe
from testbed.checks import choose, require

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")  # vLLM's
LOAD_FORMATS = ("auto", "dummy")
DECIDERS = ("testbed", "vllm")


@dataclass(frozen=True)
class VllmConfig:
    """How vLLM runs; the model is model.path. decides: `testbed`: this testbed's scheduler inside vLLM; `vllm`: vLLM's
    own, observed. dtype: None: the model's. load_format: `dummy` generates random weights. enforce_eager: as vLLM's
    argument. pace, probe_ns, speed: as for backend=real. options: further arguments of vllm.LLM.
    """

    decides: str = "testbed"
    dtype: str | None = None
    load_format: str = "auto"
    enforce_eager: bool = False
    pace: str = "real_time"
    probe_ns: int | None = None
    speed: float = 1.0
    options: Any = None

    def __post_init__(self) -> None:
        for name, choices in (("decides", DECIDERS), ("load_format", LOAD_FORMATS), ("pace", PACES)):
            choose(f"backend.{name}", getattr(self, name), choices)
        if self.dtype is not None:
            choose("backend.dtype", self.dtype, DTYPES)
        check_probe(self.pace, self.probe_ns)
        require("backend.speed", self.speed, self.speed > 0, "a finite number above 0")
        is_mapping = isinstance(self.options, dict | None)
        require("backend.options", self.options, is_mapping, "a mapping of arguments of vllm.LLM")
