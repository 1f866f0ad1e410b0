"""The block manager: block tables of sequences, admission against the watermark, growth, forks, release.

It owns every table and every reference. Sequences that are scheduled together (`KVSequence.together`) are admitted,
grown and moved together. Prefix caching, copy-on-write and swapping are parts of it, in files of their own.
"""

from __future__ import annotations

from mypy_extensions import i64

from testbed.blocks.config import KVRules, check_pool_sizes
from testbed.blocks.copy_on_write import CopyOnWrite
from testbed.blocks.demand import AllocStatus, Demand
from testbed.blocks.eviction import evictor
from testbed.blocks.gpu_blocks import GPUBlocks
from testbed.blocks.interfaces import EvictionPolicy
from testbed.blocks.keys import KeySource
from testbed.blocks.kv_sequence import RELEASED, KVSequence
from testbed.blocks.pool import Pair
from testbed.blocks.prefixes import Prefixes, PrefixHit
from testbed.blocks.swap import Swapping, SwapSpace


class BlockManager:
    """Paged KV memory for sequences.

    num_cpu_blocks: size of the swap pool. watermark: share of the GPU blocks that admissions leave free.
    key_source: None disables prefix caching. isolate_tenants: tenants share no prefixes. lookahead_slots: extra slots
    that a decoding sequence reserves (speculative decoding), up to max_model_len. sliding_window: tokens that attention
    looks back at (None: all); blocks wholly outside the window are released.
    Raises ConfigError for a pool larger than `MAX_NUM_BLOCKS`, and for options that exclude each other.
    """

    def __init__(
        self, *, block_size: int, num_gpu_blocks: int, num_cpu_blocks: int, watermark: float, rules: KVRules,
        eviction: EvictionPolicy, key_source: KeySource | None, max_model_len: int, isolate_tenants: bool = False,
        lookahead_slots: int = 0, sliding_window: int | None = None,
    ) -> None:  # fmt: skip
        check_pool_sizes(num_gpu_blocks, num_cpu_blocks)
        self.block_size: i64 = block_size
        self.num_gpu_blocks, self.num_cpu_blocks = num_gpu_blocks, num_cpu_blocks
        self.watermark_blocks = rules.watermark_blocks(watermark, num_gpu_blocks)
        self.rules = rules
        self.lookahead_slots: i64 = lookahead_slots
        self.sliding_window = sliding_window
        self.publishes_early = rules.hits_visible != "commit"  # later sequences can hit scheduled blocks
        self.holds_victims = rules.victims_return == "next_step"
        self.fills_blocks = rules.chunks_fill_blocks and key_source is not None  # chunks do, except a prompt's last one
        self._wants_spare = rules.growth_test == "one_per_sequence"
        self.demand = Demand(block_size, rules, max_model_len, lookahead_slots, sliding_window)
        self._gpu = GPUBlocks(num_gpu_blocks, rules, evictor(eviction), key_source)
        self.prefixes = Prefixes(self._gpu, key_source, rules, isolate_tenants=isolate_tenants)
        self._copies = CopyOnWrite(self._gpu, block_size)
        self._cpu = SwapSpace(num_cpu_blocks)
        self.swapping = Swapping(
            self._gpu, self._cpu, self.prefixes, self._copies, self.demand,
            watermark_blocks=self.watermark_blocks if rules.watermark_for_swapped_in else 0,
            counts_all=rules.swap_test == "all_blocks",
        )  # fmt: skip

    # --- state ---

    @property
    def num_free_blocks(self) -> int:
        """GPU blocks that can be allocated: the free ones, and the cached ones without references."""
        return self._gpu.num_free

    @property
    def num_free_cpu_blocks(self) -> int:
        return self._cpu.pool.num_free

    @property
    def num_repeated_tokens(self) -> int:
        """Positions of shared GPU blocks, counted for each sequence that holds them but one."""
        return self._gpu.pool.num_repeats * self.block_size

    def hand_out_in(self, order: list[int]) -> None:
        """Sets the allocation order of the free GPU blocks, for example one as in a pool that has been in use."""
        assert sorted(order) == sorted(self._gpu.pool.free), "not the blocks that are free"
        self._gpu.pool.free[:] = order[::-1]

    # --- admission ---

    def lookup(self, seq: KVSequence) -> PrefixHit:
        """Returns the longest cached prefix of all tokens so far except the last."""
        return self.prefixes.lookup(seq)

    def never_fits_reason(self, seq: KVSequence) -> str:
        """Returns why the tokens so far and the watermark exceed the whole pool, or an empty string if they fit."""
        num_blocks = self.demand.num_held_at_most(seq.num_tokens)
        watermark = self.watermark_blocks if self.rules.watermark_when_idle else 0
        if self.num_gpu_blocks - num_blocks >= watermark:
            return ""
        ahead = f" and {self.lookahead_slots} lookahead slots" if self.lookahead_slots else ""
        return (
            f"{seq.num_tokens} tokens{ahead} need {num_blocks} KV blocks beside a watermark of {watermark}, and the "
            f"pool has {self.num_gpu_blocks}"
        )

    def can_admit(self, seq: KVSequence, num_tokens: int, hit: PrefixHit, *, is_idle: bool) -> AllocStatus:
        """Whether the watermark stays free if the sequence gets blocks for its first `num_tokens` tokens."""
        if self.never_fits_reason(seq):
            return AllocStatus.NEVER
        rules, watermark = self.rules, self.watermark_blocks
        if (is_idle and not rules.watermark_when_idle) or (seq.num_preemptions and not rules.watermark_for_resumed):
            watermark = 0
        needed = self.demand.num_blocks_for(seq.num_tokens if rules.allocate == "whole" else num_tokens)
        if rules.full_length_must_fit:
            needed = max(needed, self.demand.num_held_at_most(seq.num_tokens))
        available = self.num_free_blocks
        if rules.admission_counts_hits:
            needed -= len(hit.blocks)
            available -= hit.num_unreferenced
        return AllocStatus.OK if available - needed >= watermark else AllocStatus.LATER

    def admit(self, seq: KVSequence, num_tokens: int, hit: PrefixHit) -> None:
        """Gives the sequence a block table: the hit's blocks, then new ones for its first `num_tokens` tokens."""
        assert not seq.block_table, "a sequence is admitted that has a table already"
        if self.rules.allocate == "whole":
            num_tokens = seq.num_tokens
        if self.prefixes.merged is not None and seq.chain is not None:
            self.prefixes.merged.fill(seq.block_table, seq.chain, num_tokens)
        else:
            self.prefixes.adopt(seq, hit)
            self._take(seq, self.demand.num_blocks_for(num_tokens) - len(seq.block_table))
        self.prefixes.count_hit(seq, hit.num_tokens)

    # --- growth ---

    def has_slots(self, seq: KVSequence, num_tokens: i64) -> bool:
        """Whether the next `num_tokens` tokens fit into the blocks of a sequence that shares none. If so, `can_grow` is
        true and `grow` does nothing. It is the common case: without this test the loop takes a fifth longer."""
        missing = seq.num_computed_tokens + num_tokens + self.lookahead_slots - len(seq.block_table) * self.block_size
        return missing <= 0 and not self._wants_spare and not seq.shares_blocks

    def can_grow(self, seq: KVSequence, num_tokens: i64) -> bool:
        """Whether blocks are free for the next `num_tokens` tokens of a running sequence and of each sibling."""
        unit = seq.together
        if self._wants_spare:
            num_slots = len(seq.block_table) * self.block_size
            if seq.is_prefilling and num_slots >= seq.num_tokens:  # its prompt has blocks; the rule asks for a spare
                return self.num_free_blocks >= (seq.num_tokens % self.block_size > 0)
            if self.num_free_blocks < len(unit):
                return False
        needed = i64(0)
        for one in unit:
            needed += self.demand.num_new_blocks(one, num_tokens, len(one.block_table))
        if seq.shares_blocks:
            needed += self._copies.num_needed(unit)
        return needed <= self._gpu.num_free

    def grow(self, seq: KVSequence, num_tokens: i64) -> None:
        """Gives one sequence slots for its next `num_tokens` tokens; copies a shared block that it will write."""
        if seq.shares_blocks:
            self._copies.write(seq)
        self._take(seq, self.demand.num_new_blocks(seq, num_tokens, len(seq.block_table)))

    def _take(self, seq: KVSequence, num_blocks: i64) -> None:
        for _ in range(num_blocks):
            seq.block_table.append(self._gpu.take())

    def release_outside_window(self, seq: KVSequence) -> None:
        """Releases the blocks outside the sliding window, which no later token of the sequence attends to."""
        if self.sliding_window is None:
            return
        table = seq.block_table
        index = max(0, seq.num_computed_tokens + 1 - self.sliding_window) // self.block_size - 1
        while index >= 0 and table[index] != RELEASED:
            self._gpu.release(table[index], index)
            table[index] = RELEASED
            index -= 1
            if seq.chain is not None:
                seq.chain.is_broken = True  # a hit needs the whole prefix: nothing after the hole is cached

    def fork(self, parent: KVSequence, child: KVSequence) -> None:
        """Gives the child every block of its parent, shared; nothing is allocated."""
        for block in parent.block_table:
            if block != RELEASED:
                self._gpu.pool.share(block)
        child.block_table = parent.block_table[:]
        self.prefixes.fork(parent, child)

    def planned(self) -> tuple[Pair, ...]:
        """Ends the planning of a step: blocks allocated for their content count as computed in later steps, and the
        emptied CPU blocks are free. Returns the (source, destination) pairs to copy."""
        if self.prefixes.merged is not None:
            self.prefixes.merged.planned()
        self._cpu.planned()
        return self._copies.take()

    # --- release ---

    def free(self, seq: KVSequence) -> None:
        """Releases the GPU or CPU blocks of one sequence, which may be admitted again. Cached blocks become evictable.

        CPU blocks are free after a step is planned or, between two steps, after `reuse_cpu_blocks`.
        """
        if seq.cpu_table:
            self._cpu.drop(seq)
        self._copies.take_back([seq.block_table])
        self._gpu.release_table(seq.block_table, seq.last_step)
        seq.block_table = []
        if seq.chain is not None:
            seq.chain.frozen_hit = None  # its hit is looked up again

    def reuse_cpu_blocks(self) -> None:
        """Makes CPU blocks free that were emptied between two steps."""
        self._cpu.planned()

    def forget(self, seq: KVSequence) -> None:
        """Forgets a sequence that has ended."""
        assert not seq.block_table, "a sequence has ended that still has blocks"
        self.prefixes.forget(seq)

    # --- checks ---

    def check_invariants(self, seqs: list[KVSequence]) -> None:
        """seqs: all live sequences."""
        assert not any(seq.block_table and seq.cpu_table for seq in seqs), "a sequence is on both sides"
        self._gpu.check_invariants([seq.block_table for seq in seqs])
        self._cpu.check_invariants([seq.cpu_table for seq in seqs])
