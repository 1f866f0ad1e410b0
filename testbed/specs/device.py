"""Devices by their data sheets, and the bounds of each field. Pure data; knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, get_args, get_type_hints

from testbed.checks import require
from testbed.errors import ConfigError
from testbed.foreign_text import number, whole
from testbed.specs.ranges import MAX_PART_NS, Expected

DEVICE_KINDS = ("cuda", "cpu")
INTERCONNECTS = ("none", "nvlink", "xgmi", "pcie_p2p", "pcie_host")
MIXED_ATTENTION = ("packed", "unpacked", "split")

_Name = Annotated[str, Expected("a name", lambda value: isinstance(value, str) and bool(value))]
_Text = Annotated[str, Expected("a string", lambda value: isinstance(value, str))]
_Kind = Annotated[str, Expected("one of " + ", ".join(DEVICE_KINDS), lambda value: value in DEVICE_KINDS)]
_Interconnect = Annotated[str, Expected("one of " + ", ".join(INTERCONNECTS), lambda value: value in INTERCONNECTS)]
_Mixed = Annotated[str, Expected("one of " + ", ".join(MIXED_ATTENTION), lambda value: value in MIXED_ATTENTION)]
_RATE = number(1, 1e30)  # per second: a quotient by it stays finite
_Rate = Annotated[float, Expected("a number from 1 to 1e30", _RATE)]
_RateOr0 = Annotated[
    float, Expected("a number from 1 to 1e30, or 0", lambda value: number(0, 0)(value) or _RATE(value))
]
_Share = Annotated[float, Expected("a share from 1e-6 to 1", number(1e-6, 1))]
_ShareOr0 = Annotated[
    float, Expected("a share from 1e-6 to 1, or 0", lambda value: number(0, 0)(value) or number(1e-6, 1)(value))
]
_Factor = Annotated[float, Expected("a number from 0.001 to 1000", number(1e-3, 1e3))]
_COUNT = whole(1, 10**6)
_Count = Annotated[int, Expected("a whole number from 1 to 1,000,000", _COUNT)]
_CountOrNone = Annotated[
    int | None, Expected("a whole number from 1 to 1,000,000, or null", lambda value: value is None or _COUNT(value))
]
_CountOr0 = Annotated[int, Expected("a whole number from 0 to 1,000,000", whole(0, 10**6))]
_Bytes = Annotated[int, Expected("a whole number of bytes, from 1 to 1e18", whole(1, 10**18))]
_BytesOr0 = Annotated[int, Expected("a whole number of bytes, from 0 to 1e18", whole(0, 10**18))]
_Ns = Annotated[int, Expected(f"a whole number of ns, from 0 to {MAX_PART_NS:,}", whole(0, MAX_PART_NS))]


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """An accelerator (or a CPU) by its data sheet: dense rates without sparsity, in SI units.

    An attention kernel over prompts assigns each tile of query rows of one head to one multiprocessor, which iterates
    over the keys. A tile that is not full takes as long as a full one; a decode in a kernel with prefills is such a
    tile. mixed_attention: of steps with prefills and decodes in the engine's usual library on this device. One kernel,
    with the rows of all heads that share K and V in one tile (packed: FlashAttention 3), or with tiles of each head
    (unpacked: FlashAttention 2); or a kernel for the prefills and one for the decodes (split: FlashInfer).
    """

    name: _Name
    kind: _Kind = "cuda"  # cuda, cpu
    memory_bytes: _Bytes = 80 * 10**9
    memory_bytes_per_s: _Rate = 3.35e12
    cache_bytes: _BytesOr0 = 0  # of the last-level cache, shared by all multiprocessors
    flops_per_s: _Rate = 989e12  # dense, at 2-byte precision
    interconnect: _Interconnect = "none"  # how devices reach one another: nvlink, xgmi (as published), pcie_*
    interconnect_bytes_per_s: _RateOr0 = 0.0  # one direction, of a device (nvlink) or of a link (xgmi); 0: none
    interconnect_efficiency: _Share = 1.0  # share of it that collectives reach; used for nvlink and xgmi
    interconnect_max_ranks: _CountOrNone = None  # devices that it joins at most; used for nvlink and xgmi
    interconnect_latency_ns: _Ns = 5_000  # of one hop; used for nvlink and xgmi
    interconnect_factor: _Factor = 1.0  # fitted: multiplies the predicted time of collectives
    host_link_bytes_per_s: _Rate = 55e9  # PCIe, one direction, as measured rather than nominal
    host_link_latency_ns: _Ns = 10_000
    compute_efficiency: _Share = 0.7  # share of flops_per_s that large GEMMs reach
    fp8_efficiency: _ShareOr0 = 0.0  # share of twice flops_per_s that large FP8 GEMMs reach; 0: no FP8 arithmetic
    memory_efficiency: _Share = 0.85  # share of memory_bytes_per_s that streaming kernels reach
    attention_efficiency: _Share = 0.7  # share of flops_per_s that attention of long prompts reaches
    num_sms: _Count = 1  # multiprocessors
    attention_tile_rows: _Count = 1  # query rows of a tile
    attention_tile_keys: _CountOr0 = 0  # time to begin and end a tile, as a number of keys
    mixed_attention: _Mixed = "packed"  # packed, unpacked, split
    attention_floor_ns: _Ns = 0  # time of an attention kernel over prompts in addition to its work
    decode_attention_floor_ns: _Ns = 0  # the same for a kernel over decodes only, whose keys are split and merged
    gemm_tile_rows: _Count = 1  # rows of a GEMM are computed in multiples of this
    gemm_floor_ns: _Ns = 0  # floor of a GEMM: fill, drain, the wait for the kernel before it
    kernel_floor_ns: _Ns = 0  # floor of norms, rotary embedding, activation, and each of the sampler's kernels
    kernel_factor: _Factor = 1.0  # fitted: multiplies the predicted time of kernels other than collectives
    step_overhead_ns: _Ns = 500_000  # host work and launches of a step that the device waits for
    source: _Text = ""

    def __post_init__(self) -> None:
        for field, expected in DEVICE_FIELDS.items():
            value = getattr(self, field)
            require(f"device.{field}", value, expected.holds(value), expected.text)
        if self.interconnect in ("nvlink", "xgmi") and not self.interconnect_bytes_per_s:
            raise ConfigError(
                f"device.interconnect={self.interconnect}, and {self.name} has none: choose pcie_p2p or pcie_host, or "
                "give the rate of one direction, device.interconnect_bytes_per_s"
            )

    @property
    def is_over_pcie(self) -> bool:
        """Whether devices reach one another over PCIe, at rates that are no fields of theirs."""
        return self.interconnect.startswith("pcie_")

    def check_joins(self, tensor_parallel_size: int) -> None:
        """Raises ConfigError if no interconnect is known, or if one does not join as many devices."""
        if self.interconnect == "none" and tensor_parallel_size > 1:
            raise ConfigError(
                f"device.tensor_parallel_size is {tensor_parallel_size}, and device {self.name} names no interconnect; "
                f"set device.interconnect to one of {', '.join(INTERCONNECTS[1:])}"
            )
        most = None if self.is_over_pcie else self.interconnect_max_ranks
        if most is not None and tensor_parallel_size > most:
            raise ConfigError(
                f"device.tensor_parallel_size is {tensor_parallel_size}; {self.interconnect} joins at most {most} of "
                f"{self.name}, and no network between nodes is modelled: lower it, or raise "
                "device.interconnect_max_ranks, which prices all as joined"
            )


DEVICE_FIELDS: dict[str, Expected] = {
    name: get_args(hint)[1] for name, hint in get_type_hints(DeviceSpec, include_extras=True).items()
}
