"""The block manager: block tables of sequences, admission against the watermark, growth, forks, release.

It owns every table and every reference. A sequence is known to it by id, tokens and counts only; sequences that are
scheduled together (`Sequence.together`) are admitted, grown and moved together. Three parts work on its tables and have
files of their own: prefix caching (`sharing.py`), copy-on-write, and swapping.
"""

from __future__ import annotations

from itertools import chain

from testbed.blocks.chains import Chains
from testbed.blocks.config import KVRules, check_pool_sizes
from testbed.blocks.copy_on_write import CopyOnWrite
from testbed.blocks.demand import Demand
from testbed.blocks.eviction import EvictionPolicy
from testbed.blocks.gpu_blocks import GPUBlocks
from testbed.blocks.keys import KeySource
from testbed.blocks.sharing import NO_HIT, PrefixHit, PrefixSharing
from testbed.blocks.swap_space import RELEASED, SwapSpace
from testbed.blocks.swapping import Swapping
from testbed.blocks.verdict import Verdict
from testbed.core.sequence import Sequence

__all__ = ["NO_HIT", "RELEASED", "BlockManager", "PrefixHit", "Verdict"]


class BlockManager:
    """Paged KV memory for sequences.

    num_cpu_blocks is the size of the swap pool. watermark: share of the GPU blocks that admissions leave free.
    key_source None: no prefix caching. isolate_tenants: tenants share no prefixes. lookahead_slots: extra slots that a
    decoding sequence reserves (speculative decoding). sliding_window: tokens that attention looks back at
    (None: all); blocks wholly outside are released.
    Raises ConfigError for a pool that is larger than can be managed, and for options that do not go together.
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        watermark: float,
        rules: KVRules,
        eviction: EvictionPolicy,
        key_source: KeySource | None,
        isolate_tenants: bool = False,
        lookahead_slots: int = 0,
        sliding_window: int | None = None,
    ) -> None:
        check_pool_sizes(num_gpu_blocks, num_cpu_blocks)
        self._demand = Demand(block_size, rules, lookahead_slots, sliding_window)
        self.block_size = block_size
        self.num_gpu_blocks = num_gpu_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self.watermark_blocks = int(watermark * (num_gpu_blocks + rules.watermark_extra_blocks))
        self.rules = rules
        self.lookahead_slots = lookahead_slots
        self.sliding_window = sliding_window
        self.publishes_at_allocation = rules.hits_visible != "commit"
        self.caches_prefixes = key_source is not None
        self._tables: dict[int, list[int]] = {}
        self._gpu = GPUBlocks(num_gpu_blocks, rules, eviction, gives_back_singly=sliding_window is not None)
        self._chains = Chains(key_source, block_size=block_size, isolate_tenants=isolate_tenants)
        self._prefixes = PrefixSharing(self._gpu, self._tables, self._chains, rules=rules)
        self._merged = self._prefixes.merged
        self.copies = CopyOnWrite(self._gpu, self._tables, block_size)
        self._cpu = SwapSpace(num_cpu_blocks, by_content=self._merged is not None)
        swap = Swapping(
            self._gpu, self._cpu, self._tables, self._chains, self._prefixes, self.copies, self._demand,
            watermark_blocks=self.watermark_blocks if rules.watermark_for_swapped_in else 0,
        )  # fmt: skip
        # what its parts do is theirs: these are their methods
        self.num_blocks_for = self._demand.num_blocks_for
        self.lookup = self._prefixes.lookup
        self.publish = self._prefixes.publish
        self.publish_each = self._prefixes.publish_each
        self.withdraw = self._prefixes.withdraw
        self.salt_of = self._chains.salt_of
        self.num_held_blocks = swap.num_held_blocks
        self.can_swap_out, self.swap_out = swap.can_swap_out, swap.swap_out
        self.can_swap_in, self.swap_in = swap.can_swap_in, swap.swap_in

    # --- state ---

    @property
    def num_free_blocks(self) -> int:
        """GPU blocks that an allocation can have: the free ones, and the cached ones that nothing references."""
        return self._gpu.num_free

    @property
    def num_free_cpu_blocks(self) -> int:
        return self._cpu.num_free

    @property
    def is_plain(self) -> bool:
        """Whether a decoding sequence needs nothing but a new block at each border, whoever comes first."""
        return not (self._merged is not None or self.lookahead_slots or self.sliding_window)

    @property
    def num_queried_tokens(self) -> int:
        """Known tokens of first admissions, and how many of them were found in the cache."""
        return self._prefixes.num_queried_tokens

    @property
    def num_hit_tokens(self) -> int:
        return self._prefixes.num_hit_tokens

    @property
    def merges_content(self) -> bool:
        return self._merged is not None

    def table(self, seq_id: int) -> list[int]:
        """Logical block i of the sequence is physical block `table[i]`."""
        return self._tables[seq_id]

    def cpu_table(self, seq_id: int) -> list[int]:
        """The same of a swapped-out sequence, in the CPU pool."""
        return self._cpu.tables[seq_id]

    # --- admission ---

    def never_fits(self, seq: Sequence) -> bool:
        """Whether the known tokens and the watermark exceed the pool itself."""
        least = self.watermark_blocks if self.rules.watermark_when_idle else 0
        return self.num_gpu_blocks - self._demand.num_held_at_most(seq.num_tokens) < least

    def never_fits_reason(self, seq: Sequence) -> str:
        num_blocks = self._demand.num_held_at_most(seq.num_tokens)
        return (
            f"{seq.num_tokens} tokens need {num_blocks} KV blocks beside a watermark of "
            f"{self.watermark_blocks}, and the pool has {self.num_gpu_blocks}"
        )

    def can_admit(self, seq: Sequence, num_tokens: int, hit: PrefixHit, *, is_idle: bool) -> Verdict:
        """Whether blocks for the sequence's first `num_tokens` tokens leave the watermark free."""
        if self.never_fits(seq):
            return Verdict.NEVER
        rules = self.rules
        watermark = self.watermark_blocks
        if (is_idle and not rules.watermark_when_idle) or (seq.num_preemptions and not rules.watermark_for_resumed):
            watermark = 0
        needed = self.num_blocks_for(seq.num_tokens if rules.allocate == "whole" else num_tokens)
        if rules.full_length_must_fit:
            needed = max(needed, self._demand.num_held_at_most(seq.num_tokens))
        available = self.num_free_blocks
        if rules.admission_counts_hits:
            needed -= len(hit.blocks)
            available -= hit.num_unreferenced
        return Verdict.OK if available - needed >= watermark else Verdict.LATER

    def admit(self, seq: Sequence, num_tokens: int, hit: PrefixHit) -> None:
        """Gives the sequence a table: the hit's blocks, and new ones up to its first `num_tokens` tokens."""
        assert seq.seq_id not in self._tables, f"{seq} has a table already"
        if self.rules.allocate == "whole":
            num_tokens = seq.num_tokens
        if self._merged is not None:
            table = self._tables[seq.seq_id] = []
            self._merged.fill(seq, table, num_tokens)
        else:
            table = self._tables[seq.seq_id] = self._prefixes.adopt(seq, hit)
            table += self._gpu.take(self.num_blocks_for(num_tokens) - len(table))
        seq.num_slots = len(table) * self.block_size
        self._prefixes.count(seq, hit.num_tokens)

    # --- growth ---

    def can_grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether the next `num_tokens` tokens of a running sequence, and of those with it, get blocks now."""
        if self.rules.growth_test == "one_per_sequence":
            if seq.is_prefilling and seq.num_slots >= seq.num_tokens:  # its blocks are there: the next one is wanted
                return self.num_free_blocks >= (seq.num_tokens % self.block_size > 0)
            if self.num_free_blocks < len(seq.together):
                return False
        needed, num_new_blocks = 0, self._demand.num_new_blocks
        shared: dict[int, int] = {}  # shared blocks that would be copied, with the references that remain
        for one in seq.together:
            needed += num_new_blocks(one, num_tokens, one.num_slots)
            if one.group is not None:
                needed += self.copies.num_needed(one, shared)
        return needed <= self._gpu.num_free

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Slots for the next `num_tokens` tokens of one sequence; copies a shared block that it would write into."""
        if seq.group is not None:
            self.copies.write(seq)
        num_blocks = self._demand.num_new_blocks(seq, num_tokens, seq.num_slots)
        if num_blocks:
            self._tables[seq.seq_id] += self._gpu.take(num_blocks)
            seq.num_slots += num_blocks * self.block_size

    def grow_each(self, seqs: list[Sequence]) -> None:
        """One more block for each of these sequences, in order; there are enough."""
        tables, block_size = self._tables, self.block_size
        for seq, block in zip(seqs, self._gpu.take(len(seqs)), strict=True):
            tables[seq.seq_id].append(block)
            seq.num_slots += block_size

    def grow_ahead(self, batches: list[list[Sequence]], filling: list[Sequence]) -> bool:
        """What as many decode steps do, if it can be done at once: `grow_each` for one batch after the other, and
        `publish_each` for each of them, and for those that the step after these fills. There are enough blocks."""
        seqs = list(chain.from_iterable(batches))
        if not self._prefixes.are_alone(seqs + filling):
            return False
        if seqs:
            tables, block_size = self._tables, self.block_size
            for seq, block in zip(seqs, self._gpu.take_each([len(batch) for batch in batches]), strict=True):
                tables[seq.seq_id].append(block)
                seq.num_slots += block_size
        return True

    def release_outside_window(self, seq: Sequence) -> None:
        """Gives back the blocks that no later token of the sequence looks at."""
        assert self.sliding_window is not None
        table = self._tables[seq.seq_id]
        index = max(0, seq.num_computed_tokens + 1 - self.sliding_window) // self.block_size - 1
        while index >= 0 and table[index] != RELEASED:
            self._gpu.release(table[index], index)
            table[index] = RELEASED
            index -= 1
            self._chains.stop(seq)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares every block of its parent; nothing is allocated."""
        table = self._tables[parent.seq_id]
        held = [block for block in table if block != RELEASED]
        self._gpu.pool.count(held)
        for block in held:
            self._gpu.pool.share(block)
        self._tables[child.seq_id] = table[:]
        child.num_slots = parent.num_slots
        self._prefixes.fork(parent, child)

    # --- publication ---

    def scheduled(self, seq: Sequence, num_tokens: int) -> None:
        """The first `num_tokens` tokens will be computed when this step ends; some systems let others hit them now."""
        if self.publishes_at_allocation:
            self.publish(seq, num_tokens)

    def planned(self) -> None:
        """The step is decided: what it allocated for its content counts as computed for the next one."""
        if self._merged is not None:
            self._merged.planned()
        self._cpu.planned()

    # --- release ---

    def free(self, seq: Sequence, *, is_planning: bool = False) -> None:
        """Releases the table of one sequence, wherever it lies; cached blocks stay, evictable. It may come back.

        is_planning: within a step that is being decided, which `planned` ends.
        """
        table = self._tables.pop(seq.seq_id, None)
        if table is None:
            self._cpu.drop(seq.seq_id)
            if not is_planning:
                self._cpu.planned()
        else:
            if self._gpu.last_steps is not None and seq.last_step >= 0:
                for block in table:
                    self._gpu.last_steps[block] = seq.last_step
            if self.copies.pairs:
                self.copies.take_back([table])
            self._gpu.release_all(table, self._prefixes.settle(seq))
        seq.num_slots = 0
        self._chains.freed(seq)

    def forget(self, seq: Sequence) -> None:
        """The sequence will not come back."""
        assert seq.seq_id not in self._tables, f"{seq} still has a table"
        self._chains.forget(seq)

    # --- inside ---

    def check_invariants(self) -> None:
        self._gpu.check_invariants(list(self._tables.values()))
        self._cpu.check_invariants()
        assert not self._tables.keys() & self._cpu.tables.keys(), "a sequence is on both sides"
