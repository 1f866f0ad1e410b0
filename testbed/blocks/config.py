"""Configuration of the KV cache, and the KV rules: the differences between systems as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from testbed.checks import require, require_whole, require_whole_or_null
from testbed.errors import ConfigError

MAX_BLOCK_SIZE = 512
MAX_SWAP_SPACE_GIB = 1_000_000
MAX_NUM_BLOCKS = 100_000_000  # of a pool: the core uses about 50 bytes for each; records have 32-bit counts


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The `cache` group.

    None: num_gpu_blocks is derived from memory, num_cpu_blocks from swap_space_gib; watermark is the preset's.
    """

    block_size: int = 16  # tokens a block, 1 to 512
    num_gpu_blocks: int | None = None
    num_cpu_blocks: int | None = None
    swap_space_gib: float = 4.0
    gpu_memory_utilization: float = 0.9
    watermark: float | None = None  # share of the GPU blocks that admissions leave free
    prefix_caching: bool = True
    eviction: Any = "lru"  # a name, or {_target_: your own class}
    isolate_tenants: bool = False  # whether requests share cached prefixes only with those of their own tenant
    sliding_window: int | None = None  # tokens that attention looks back at; null: as in the model's config
    kv_dtype: str | None = None  # of K and V; fp8 halves the bytes of a block; null: the model's

    def __post_init__(self) -> None:
        require_whole("cache.block_size", self.block_size, 1, MAX_BLOCK_SIZE, also=" tokens")
        require_whole_or_null("cache.num_gpu_blocks", self.num_gpu_blocks, 1, MAX_NUM_BLOCKS)
        require_whole_or_null("cache.num_cpu_blocks", self.num_cpu_blocks, 0, MAX_NUM_BLOCKS)
        gib, share, watermark = self.swap_space_gib, self.gpu_memory_utilization, self.watermark
        require("cache.swap_space_gib", gib, 0 <= gib <= MAX_SWAP_SPACE_GIB, f"from 0 to {MAX_SWAP_SPACE_GIB:,}")
        require("cache.gpu_memory_utilization", share, 0 < share <= 1, "in (0, 1]")
        require_whole_or_null("cache.sliding_window", self.sliding_window, 1)
        require("cache.watermark", watermark, watermark is None or 0 <= watermark < 1, "in [0, 1), or null")


def check_pool_sizes(num_gpu_blocks: int, num_cpu_blocks: int) -> None:
    """Raises ConfigError for pool sizes, derived from memory, that exceed what the core can manage."""
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
    """How a system handles KV blocks, where systems differ; docs/policies.md has the table of the presets' values.

    A preset combines a composition, other policies, and one of these. The defaults are the testbed's own rules.
    """

    # --- admission ---
    # blocks allocated on admission: for the whole prompt, or for the tokens of its first chunk
    allocate: Literal["whole", "chunk"] = "whole"
    # whether all tokens so far must fit before the first chunk runs
    full_length_must_fit: bool = False
    # whether the admission test counts cached blocks as present, or requires free blocks for the whole prompt
    admission_counts_hits: bool = True
    # when a prompt that exceeds the model's length or the pool is rejected: on arrival, or at the head of the queue
    never_fits_at: Literal["add", "head"] = "add"
    # compared with max_model_len: the prompt, or the tokens computed after its first chunk (longer prompts then run)
    length_limit: Literal["prompt", "chunk"] = "prompt"

    # --- watermark: admissions leave int(share x (num_gpu_blocks + extra)) blocks free ---
    watermark_extra_blocks: int = 0
    watermark_when_idle: bool = True  # also while nothing is running
    watermark_for_resumed: bool = True  # also for sequences that were preempted by recompute
    watermark_for_swapped_in: bool = True

    # --- growth and swap ---
    # free blocks that growth requires: as many as it takes, or one for each sequence, needed or not
    growth_test: Literal["exact", "one_per_sequence"] = "exact"
    # free blocks that a swap requires: all of the group's (plus growth on swap-in), or its full ones and one more each
    swap_test: Literal["all_blocks", "full_blocks"] = "all_blocks"
    # a victim returns to the queue within the same step, or only after the step's admissions
    victims_return: Literal["this_step", "next_step"] = "this_step"

    # --- prefix cache ---
    # when other sequences can hit a block: after the commit of its step; after its allocation (also in the same batch);
    # or after its step is planned (in the same batch the block is shared, but computed again)
    hits_visible: Literal["commit", "allocation", "plan"] = "commit"
    # hits end before the block of the last token, or all full blocks can be hit and only the last token is computed
    hit_cap: Literal["last_block", "last_token"] = "last_block"
    # whether a waiting sequence's hit is looked up once and kept until its blocks are freed, or looked up every step
    hits_frozen: bool = False
    # blocks of equal content: all are kept, only the newest can be found, or they become one block
    duplicates: Literal["listed", "replaced", "merged"] = "listed"
    # allocation order of free blocks: those without content first, or all in the order released
    free_order: Literal["uncached_first", "one_queue"] = "uncached_first"
    # `lru` orders blocks by their release, or by the step that last scheduled their sequence
    lru_by: Literal["release", "last_step"] = "release"

    # --- token budget ---
    # what a prompt takes from the budget: its tokens to compute, all its tokens, or the longest of the batch (padding)
    budget: Literal["uncached", "sum", "padded"] = "uncached"
    # whether, with prefix caching, a chunk that leaves a prompt unfinished must fill its last block
    chunks_fill_blocks: bool = False

    def watermark_blocks(self, share: float, num_gpu_blocks: int) -> int:
        """Returns the number of GPU blocks that admissions leave free."""
        return int(share * (num_gpu_blocks + self.watermark_extra_blocks))

    def __post_init__(self) -> None:
        key = "scheduler.kv_rules"
        require_whole(f"{key}.watermark_extra_blocks", self.watermark_extra_blocks, 0, MAX_NUM_BLOCKS)
        if self.duplicates != "merged" and (self.hits_frozen or self.hits_visible == "plan"):
            raise ConfigError(f"{key}.hits_frozen and {key}.hits_visible=plan need {key}.duplicates=merged")
        if self.duplicates == "merged" and (self.allocate != "whole" or self.hits_visible != "plan"):
            raise ConfigError(f"{key}.duplicates=merged needs {key}.allocate=whole and {key}.hits_visible=plan")
        if self.duplicates == "replaced" and self.free_order != "one_queue":
            raise ConfigError(f"{key}.duplicates=replaced needs {key}.free_order=one_queue")
