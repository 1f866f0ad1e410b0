"""Devices by their data sheets, and the bounds of each field. Pure data; knows no model."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.checks import require
from testbed.errors import ConfigError
from testbed.foreign_text import number, whole
from testbed.specs.ranges import MAX_PART_NS, Expected

DEVICE_KINDS = ("cuda", "cpu")
INTERCONNECTS = ("nvlink", "pcie_p2p", "pcie_host")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """An accelerator (or a CPU) by its data sheet: dense rates without sparsity, in SI units.

    An attention kernel over prompts assigns each tile of query rows of one head to one multiprocessor, which iterates
    over the keys. A tile that is not full takes as long as a full one; a decode in a step with prefills is such a tile.
    A kernel that packs heads (FlashAttention-3) puts the rows of all heads that share K and V into one tile.
    """

    name: str
    kind: str = "cuda"  # cuda, cpu
    memory_bytes: int = 80 * 10**9
    memory_bytes_per_s: float = 3.35e12
    cache_bytes: int = 0  # of the last-level cache, shared by all multiprocessors
    flops_per_s: float = 989e12  # dense, at 2-byte precision
    interconnect: str = "nvlink"  # how devices reach one another: nvlink (as published), pcie_p2p, pcie_host
    interconnect_bytes_per_s: float = 450e9  # one direction, between devices; used for nvlink; 0: there is none
    interconnect_efficiency: float = 1.0  # share of it that collectives reach; used for nvlink
    interconnect_latency_ns: int = 5_000  # of one hop; used for nvlink
    interconnect_factor: float = 1.0  # fitted: multiplies the predicted time of collectives
    host_link_bytes_per_s: float = 55e9  # PCIe, one direction, as measured rather than nominal
    host_link_latency_ns: int = 10_000
    compute_efficiency: float = 0.7  # share of flops_per_s that large GEMMs reach
    memory_efficiency: float = 0.85  # share of memory_bytes_per_s that streaming kernels reach
    attention_efficiency: float = 0.7  # share of flops_per_s that attention of long prompts reaches
    num_sms: int = 1  # multiprocessors
    attention_tile_rows: int = 1  # query rows of a tile
    attention_tile_keys: int = 0  # time to begin and end a tile, as a number of keys
    attention_packs_heads: bool = True  # else each of the heads that share K and V has tiles of its own
    attention_floor_ns: int = 0  # time of an attention kernel over prompts in addition to its work
    decode_attention_floor_ns: int = 0  # the same for a kernel over decodes only, whose keys are split and merged
    gemm_tile_rows: int = 1  # rows of a GEMM are computed in multiples of this
    gemm_floor_ns: int = 0  # floor of a GEMM: fill, drain, the wait for the kernel before it
    kernel_floor_ns: int = 0  # floor of norms, rotary embedding, activation, and each of the sampler's kernels
    kernel_factor: float = 1.0  # fitted: multiplies the predicted time of kernels other than collectives
    step_overhead_ns: int = 500_000  # host work and launches of a step that the device waits for
    source: str = ""

    def __post_init__(self) -> None:
        for field, expected in DEVICE_FIELDS.items():
            value = getattr(self, field)
            require(f"device.{field}", value, expected.holds(value), expected.text)
        if self.interconnect == "nvlink" and not self.interconnect_bytes_per_s:
            raise ConfigError(
                f"device.interconnect=nvlink, and {self.name} has none: choose pcie_p2p or pcie_host, or give the "
                "rate of one direction, device.interconnect_bytes_per_s"
            )


_NAME = Expected("a name", lambda value: isinstance(value, str) and bool(value))
_RATE = Expected("a number from 1 to 1e30", number(1, 1e30))  # per second: a quotient by it stays finite
_SHARE = Expected("a share from 1e-6 to 1", number(1e-6, 1))
_FACTOR = Expected("a number from 0.001 to 1000", number(1e-3, 1e3))
_COUNT = Expected("a whole number from 1 to 1,000,000", whole(1, 10**6))
_NS = Expected(f"a whole number of ns, from 0 to {MAX_PART_NS:,}", whole(0, MAX_PART_NS))

DEVICE_FIELDS: dict[str, Expected] = {
    "name": _NAME,
    "kind": Expected("one of " + ", ".join(DEVICE_KINDS), lambda value: value in DEVICE_KINDS),
    "memory_bytes": Expected("a whole number of bytes, from 1 to 1e18", whole(1, 10**18)),
    "memory_bytes_per_s": _RATE,
    "cache_bytes": Expected("a whole number of bytes, from 0 to 1e18", whole(0, 10**18)),
    "flops_per_s": _RATE,
    "interconnect": Expected("one of " + ", ".join(INTERCONNECTS), lambda value: value in INTERCONNECTS),
    "interconnect_bytes_per_s": Expected("a number from 1 to 1e30, or 0", lambda v: number(0, 0)(v) or _RATE.holds(v)),
    "interconnect_efficiency": _SHARE,
    "interconnect_latency_ns": _NS,
    "interconnect_factor": _FACTOR,
    "host_link_bytes_per_s": _RATE,
    "host_link_latency_ns": _NS,
    "compute_efficiency": _SHARE,
    "memory_efficiency": _SHARE,
    "attention_efficiency": _SHARE,
    "num_sms": _COUNT,
    "attention_tile_rows": _COUNT,
    "attention_tile_keys": Expected("a whole number from 0 to 1,000,000", whole(0, 10**6)),
    "attention_packs_heads": Expected("true or false", lambda value: isinstance(value, bool)),
    "attention_floor_ns": _NS,
    "decode_attention_floor_ns": _NS,
    "gemm_tile_rows": _COUNT,
    "gemm_floor_ns": _NS,
    "kernel_floor_ns": _NS,
    "kernel_factor": _FACTOR,
    "step_overhead_ns": _NS,
    "source": Expected("a string", lambda value: isinstance(value, str)),
}
