"""Configuration of the KV cache, and the rules in which systems differ, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from testbed.checks import require, require_whole, require_whole_or_null
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
    isolate_tenants: bool = False  # whether requests share cached prefixes only with those of their own tenant
    sliding_window: int | None = None  # tokens that attention looks back at; null: as many as the model's config says
    kv_dtype: str | None = None  # of K and V: fp8 halves a block's bytes; null: the model's

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
    """How a system deals with KV blocks, where systems differ; docs/policies.md has the table. The defaults are ours.

    A preset is a composition plus one of these.
    """

    # --- admission ---
    # blocks taken on admission: for the whole prompt, or for the tokens of its first chunk
    allocate: Literal["whole", "chunk"] = "whole"
    # whether all known tokens must fit before a first chunk runs
    full_length_must_fit: bool = False
    # whether cached blocks count in the admission test, or all blocks must be free as if nothing were cached
    admission_counts_hits: bool = True
    # when a prompt that exceeds the model's length or the pool is ended: as soon as it arrives, or at the queue's head
    never_fits_at: Literal["add", "head"] = "add"
    # what is compared with max_model_len: the prompt, or what its first chunk leaves computed (longer prompts then run)
    length_limit: Literal["prompt", "chunk"] = "prompt"

    # --- watermark: admissions leave int(share x (num_gpu_blocks + extra)) blocks free ---
    watermark_extra_blocks: int = 0
    watermark_when_idle: bool = True  # also while nothing is running
    watermark_for_resumed: bool = True  # also for sequences that were preempted by recompute
    watermark_for_swapped_in: bool = True

    # --- growth and swap ---
    # blocks that must be free for a running sequence to go on: as many as it needs, or one for each, needed or not
    growth_test: Literal["exact", "one_per_sequence"] = "exact"
    # blocks that a swap must find free, beside one for each sequence to grow: all of the group's, or its full ones
    swap_test: Literal["all_blocks", "full_blocks"] = "all_blocks"
    # a victim may be admitted again by the same step, or is back in the queue only after the step's admissions
    victims_return: Literal["this_step", "next_step"] = "this_step"

    # --- prefix cache ---
    # when a block may be hit by others: once its step is committed; once it is allocated (by a later sequence of the
    # same batch too); or once the step is planned (the same batch shares the block, but computes it again)
    hits_visible: Literal["commit", "allocation", "plan"] = "commit"
    # hits end before the block of the last token, or all full blocks may be hit and only the last token is computed
    hit_cap: Literal["last_block", "last_token"] = "last_block"
    # whether a waiting sequence's hit is looked up once and kept until its blocks are freed, or looked up at each step
    hits_frozen: bool = False
    # several blocks of the same content: all are kept, the newest alone is found, or they become one block
    duplicates: Literal["listed", "replaced", "merged"] = "listed"
    # free blocks are handed out: those without content first, or all in the order released
    free_order: Literal["uncached_first", "one_queue"] = "uncached_first"
    # what `lru` goes by: when a block was released, or which step last scheduled its sequence
    lru_by: Literal["release", "last_step"] = "release"

    # --- token budget ---
    # what a prompt counts for: tokens to compute, all its tokens, or the longest of the batch (padding)
    budget: Literal["uncached", "sum", "padded"] = "uncached"
    # whether, with prefix caching, a chunk that leaves a prompt unfinished must fill its last block
    chunks_fill_blocks: bool = False

    def watermark_blocks(self, share: float, num_gpu_blocks: int) -> int:
        """GPU blocks that admissions leave free."""
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
