"""Configuration of the KV cache, and the rules in which systems differ, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from testbed.errors import ConfigError

MAX_BLOCK_SIZE = 512
MAX_SWAP_SPACE_GIB = 1_000_000
MAX_NUM_BLOCKS = 100_000_000  # of a pool: the core keeps about 50 bytes for each; records count in 32 bits


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The `cache` group.

    None means: num_gpu_blocks from memory, num_cpu_blocks from swap_space_gib, watermark the preset's.
    """

    block_size: int = 16  # tokens a block, 1 to 512
    num_gpu_blocks: int | None = None
    num_cpu_blocks: int | None = None
    swap_space_gib: float = 4.0
    gpu_memory_utilization: float = 0.9
    watermark: float | None = None  # share of the GPU blocks that admissions leave free
    prefix_caching: bool = True
    eviction: Any = "lru"  # a name, or {_target_: a class of yours}

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise ConfigError(f"cache.block_size is {self.block_size}; it must be 1 to {MAX_BLOCK_SIZE} tokens")
        for field, least in (("num_gpu_blocks", 1), ("num_cpu_blocks", 0)):
            num_blocks = getattr(self, field)
            if num_blocks is not None and not least <= num_blocks <= MAX_NUM_BLOCKS:
                raise ConfigError(
                    f"cache.{field} is {num_blocks}; it must be at least {least}, at most {MAX_NUM_BLOCKS:,}, or null"
                )
        if not 0 <= self.swap_space_gib <= MAX_SWAP_SPACE_GIB:
            raise ConfigError(f"cache.swap_space_gib is {self.swap_space_gib}; it must be 0 to {MAX_SWAP_SPACE_GIB:,}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"cache.gpu_memory_utilization is {self.gpu_memory_utilization}; it must be in (0, 1]")
        if self.watermark is not None and not 0 <= self.watermark < 1:
            raise ConfigError(f"cache.watermark is {self.watermark}; it must be in [0, 1)")


def check_pool_sizes(num_gpu_blocks: int, num_cpu_blocks: int) -> None:
    """Refuses pools that were derived from memory and are larger than the core can keep. Raises ConfigError."""
    if num_gpu_blocks > MAX_NUM_BLOCKS:
        raise ConfigError(
            f"the device's memory holds {num_gpu_blocks:,} KV blocks; at most {MAX_NUM_BLOCKS:,} can be managed: "
            "set cache.num_gpu_blocks, or raise cache.block_size"
        )
    if num_cpu_blocks > MAX_NUM_BLOCKS:
        raise ConfigError(
            f"cache.swap_space_gib holds {num_cpu_blocks:,} KV blocks; at most {MAX_NUM_BLOCKS:,} can be managed: "
            "lower it, set cache.num_cpu_blocks, or raise cache.block_size"
        )


@dataclass(frozen=True, slots=True)
class KVRules:
    """How a system deals with KV blocks, where systems differ. A preset is a composition plus one of these."""

    # blocks taken on admission: for the whole prompt, or for the tokens of its first chunk
    allocate: Literal["whole", "chunk"] = "whole"
    # whether all known tokens must fit before a first chunk runs
    full_length_must_fit: bool = False
    # when a computed block may be hit by others: once its step is committed, or once it is allocated
    hits_visible: Literal["commit", "allocation"] = "commit"
    # whether the watermark holds also when nothing is running
    watermark_when_idle: bool = True
    # watermark blocks = int(share x (num_gpu_blocks + this))
    watermark_extra_blocks: int = 0
