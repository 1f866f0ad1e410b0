"""The keys of the `cost` group: one dataclass for each cost model. Hydra reads them, so they are not compiled."""

from __future__ import annotations

from dataclasses import dataclass, fields

from testbed.checks import choose, require, require_whole
from testbed.errors import ConfigError
from testbed.specs.device import MIXED_ATTENTION, DeviceSpec
from testbed.specs.ranges import MAX_PART_NS, MAX_SIZE

LOGITS = ("all_gather", "gather")
OUTSIDE = ("warn", "refuse", "allow")
FILTERING = ("select", "sort")
FP8_GEMMS = ("w8a8", "w8a16")


@dataclass(frozen=True, slots=True)
class RooflineConfig:
    """Settings of the engine that belong neither to the model nor to the device.

    logits: with several ranks, either every rank gets all logits and samples (all_gather, as vLLM V1), or rank 0
    samples and broadcasts the tokens (gather, as vLLM V0 and nano-vllm). filtering: how `sampling.top_k` and `top_p`
    are applied: by a sort of the whole vocabulary (vLLM before 0.21) or by kernels without a sort (FlashInfer's).
    mixed_attention: of the attention library, as in DeviceSpec; None: the device's. fp8_gemms: how 8-bit weights are
    multiplied: with activations quantised before each GEMM (w8a8), or at 16 bits (w8a16, as this engine and Marlin);
    None: w8a8 where the device has it, as vLLM.
    """

    cuda_graphs: bool = True  # steps replay a captured graph, padded to its size; larger steps run eagerly
    max_captured_size: int = 512  # rows of a step with one token of each sequence; sizes: 1, 2, 4, multiples of 8
    max_captured_tokens: int = 2048  # of any other step, as backend.max_captured_tokens; 0: none of these is captured
    graph_launch_ns: int = 20_000  # host time to replay a graph; an estimate
    kernel_launch_ns: int = 5_000  # host time of an eager launch, counted if the device waits for it; an estimate
    logits: str = "all_gather"
    filtering: str = "select"
    mixed_attention: str | None = None
    fp8_gemms: str | None = None

    def __post_init__(self) -> None:
        for name, least, most in (
            ("max_captured_size", 1, MAX_SIZE),
            ("max_captured_tokens", 0, MAX_SIZE),
            ("graph_launch_ns", 0, MAX_PART_NS),
            ("kernel_launch_ns", 0, MAX_PART_NS),
        ):
            require_whole(f"cost.{name}", getattr(self, name), least, most)
        choose("cost.logits", self.logits, LOGITS)
        choose("cost.filtering", self.filtering, FILTERING)
        if self.mixed_attention is not None:
            choose("cost.mixed_attention", self.mixed_attention, MIXED_ATTENTION)
        if self.fp8_gemms is not None:
            choose("cost.fp8_gemms", self.fp8_gemms, FP8_GEMMS)

    def multiplies_fp8(self, device: DeviceSpec) -> bool:
        """Whether 8-bit weights are multiplied in FP8. Raises ConfigError if that is asked of a device without it."""
        if self.fp8_gemms == "w8a8" and not device.fp8_efficiency:
            raise ConfigError(
                f"cost.fp8_gemms is w8a8, and device {device.name} has no FP8 arithmetic (device.fp8_efficiency is 0); "
                "choose w8a16, or give that efficiency"
            )
        return self.fp8_gemms != "w8a16" and device.fp8_efficiency > 0


@dataclass(frozen=True, slots=True)
class TablesConfig(RooflineConfig):
    """Which tables to use, in addition to the roofline's keys: the roofline predicts the operators that tables lack.

    path: a file that `testbed tables import` wrote; null: the tables of the installed package aiconfigurator-core for
    the device, `engine` and `version` (null: the newest).
    """

    path: str | None = None
    engine: str = "vllm"
    version: str | None = None


@dataclass(frozen=True, slots=True)
class CalibratedConfig:
    """path: the fit that `testbed calibrate` wrote; null: the one that comes with the testbed for this model on this
    device (experiments/fits).

    The factors adapt a fit to another machine: its host time, and everything else. repeated_saving: as in Calibration;
    None: the fit's.
    """

    path: str | None = None
    outside: str = "warn"  # a step outside the profiled range: warn, refuse, allow
    host_factor: float = 1.0
    device_factor: float = 1.0
    repeated_saving: float | None = None

    @property
    def factors(self) -> dict[str, float]:
        return {"host_factor": self.host_factor, "device_factor": self.device_factor}

    def __post_init__(self) -> None:
        for name, value in self.factors.items():
            require(f"cost.{name}", value, 0.001 <= value <= 1000, "from 0.001 to 1000")
        saving = self.repeated_saving
        require("cost.repeated_saving", saving, saving is None or 0 <= saving <= 1, "null, or a share from 0 to 1")
        choose("cost.outside", self.outside, OUTSIDE)


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Coefficients in seconds. The defaults have the magnitude of an 8B model in bfloat16 on one H100."""

    base_s: float = 6e-3  # each step: reading the weights, launches, host
    per_prefill_token_s: float = 2.5e-5
    per_decode_s: float = 2e-5
    per_decode_context_token_s: float = 4.5e-8
    per_prefill_attention_pair_s: float = 1e-9
    per_swapped_block_s: float = 4e-5
    per_copied_block_s: float = 1.5e-6

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            require(f"cost.{item.name}", value, 0 <= value <= 1e6, "from 0 to 1e6 seconds")


@dataclass(frozen=True, slots=True)
class ConstantConfig:
    """Every step takes the same time."""

    step_s: float = 0.01  # length of every step, seconds; no host overhead is added

    def __post_init__(self) -> None:
        require("cost.step_s", self.step_s, 1e-9 <= self.step_s <= 1e6, "from 1e-9 (1 ns) to 1e6 seconds")


@dataclass(frozen=True, slots=True)
class RecordedConfig:
    """`cost=recorded`: step times and outcomes from a real run's tape."""

    run: str | None = None  # the real run's folder

    def __post_init__(self) -> None:
        if self.run is None:
            raise ConfigError("cost=recorded needs cost.run=<folder of a real run>")
