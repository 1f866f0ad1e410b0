"""Options of the real backend. Plain values, checked here; importing this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.checks import choose, require, require_whole, require_whole_or_null
from testbed.errors import ConfigError
from testbed.routing.config import FleetConfig
from testbed.specs.ranges import MAX_PART_NS

DEVICES = ("auto", "cuda", "cpu")
DTYPES = ("float32", "bfloat16", "float16")
ATTENTION_NAMES = ("auto", "flash_attn_3", "flash_attn", "varlen", "triton", "cpu", "torch")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
PACES = ("real_time", "as_fast_as_possible", "probe_scaled")
MAX_NUM_REPLICAS = 256
MAX_NUM_THREADS = 1024  # torch crashes with many more


def check_probe(pace: str, probe_ns: int | None) -> None:
    require_whole_or_null("backend.probe_ns", probe_ns, 1, MAX_PART_NS)
    if probe_ns is not None and pace != "probe_scaled":
        raise ConfigError("backend.probe_ns is of backend.pace=probe_scaled; choose it, or set probe_ns=null")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is built for: the largest step that the core plans, its KV memory, and the seed; per rank.

    max_model_len: the longest sequence. num_gpu_blocks: None: as many as fit, measured (CUDA), or as `cpu_kv_bytes`
    holds (CPU). num_cpu_blocks: None: no swap space. swaps: whether plans can swap; if not, no host memory is allocated
    for it. sliding_window: number of tokens that a token attends to, as in the core (None: all). A model that was
    trained with a window requires the same one; others take any. kv_dtype: format of K and V, fp8_e4m3 or fp8_e5m2;
    None: the format of the computation. seed: for dummy weights and for requests without a seed.
    """

    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks: int | None = None
    num_cpu_blocks: int | None = None
    swaps: bool = True
    sliding_window: int | None = None
    kv_dtype: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len"):
            require_whole(name, getattr(self, name), 1)
        require_whole_or_null("sliding_window", self.sliding_window, 1)


@dataclass(frozen=True, slots=True)
class RealConfig(FleetConfig):
    """How the engine runs. The model is a ModelSpec, the work comes as plans.

    device: `auto` takes CUDA if there is a GPU, but in a run with device=cpu the CPU. dtype: of weights and KV; None:
    the model's. attention: `auto` takes the first provider that can run, in the order of ATTENTION_NAMES. load_format:
    `auto` reads safetensors if the model's path is a folder, and generates random weights otherwise. cpu_kv_bytes: KV
    memory if the device is the CPU.
    num_threads: of torch on the CPU; None: torch's default. pace: `real_time` waits for arrivals;
    `as_fast_as_possible` moves the clock forward instead. `probe_scaled` does so too, and scales step times to a
    machine of constant speed: a probe is timed at intervals and compared with probe_ns (None:
    its duration at the start). speed: 2.0 replays a trace twice as fast: arrivals and think times are divided by it;
    recorded times stay in the engine's own time. cuda_graphs: steps are captured when the engine starts, and replayed
    (CUDA only). These are steps of only decodes up to max_captured_size rows, and other steps up to max_captured_tokens
    tokens (0: none). k_scale, v_scale: keys and values are divided by these before they are stored as
    cache.kv_dtype=fp8_e4m3 or fp8_e5m2. rank_timeout_s: how long to wait for a rank or a replica before the run fails.
    """

    device: str = "auto"
    dtype: str | None = None
    attention: str = "auto"
    load_format: str = "auto"
    cpu_kv_bytes: int = 256 * 1024**2
    num_threads: int | None = None
    pace: str = "real_time"
    probe_ns: int | None = None
    speed: float = 1.0
    cuda_graphs: bool = True
    max_captured_size: int = 512
    max_captured_tokens: int = 2048  # beyond, an 8B model computes for longer than the host takes to launch its layers
    k_scale: float = 1.0
    v_scale: float = 1.0
    rank_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        choose("backend.device", self.device, DEVICES)
        if self.dtype is not None:
            choose("backend.dtype", self.dtype, DTYPES)
        choose("backend.attention", self.attention, ATTENTION_NAMES)
        choose("backend.load_format", self.load_format, LOAD_FORMATS)
        choose("backend.pace", self.pace, PACES)
        require_whole("backend.cpu_kv_bytes", self.cpu_kv_bytes, 1, 10**18)
        require_whole("backend.max_captured_size", self.max_captured_size, 1)
        require_whole("backend.max_captured_tokens", self.max_captured_tokens, 0)
        for name in ("k_scale", "v_scale", "rank_timeout_s"):
            require(f"backend.{name}", getattr(self, name), getattr(self, name) > 0, "a finite number above 0")
        check_probe(self.pace, self.probe_ns)
        require("backend.speed", self.speed, self.speed > 0, "above 0: 2 replays a trace twice as fast")
        require_whole_or_null("backend.num_threads", self.num_threads, 1, MAX_NUM_THREADS)
        require_whole("backend.num_replicas", self.num_replicas, 1, MAX_NUM_REPLICAS)
        if self.num_replicas > 1 and self.pace == "probe_scaled":
            raise ConfigError(
                "backend.pace=probe_scaled is the time of one process, and each of backend.num_replicas has its own; "
                "choose real_time or as_fast_as_possible"
            )
