"""The block manager: block tables of sequences, admission against the watermark, growth, copy-on-write, prefix caching,
swap, release.

It owns every table and every reference. A sequence is known to it by id, tokens and counts only; sequences that are
scheduled together (`Sequence.together`) are admitted, grown and moved together.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from itertools import chain

from testbed.blocks.chains import Chains
from testbed.blocks.config import KVRules, check_pool_sizes
from testbed.blocks.eviction import EvictionPolicy
from testbed.blocks.gpu_blocks import GPUBlocks
from testbed.blocks.keys import KeySource
from testbed.blocks.sharing import NO_HIT, PrefixHit, PrefixSharing
from testbed.blocks.swap_space import RELEASED, SwapSpace
from testbed.errors import ConfigError
from testbed.sequence import Sequence

__all__ = ["NO_HIT", "RELEASED", "BlockManager", "PrefixHit", "Verdict"]


class Verdict(Enum):
    """May it be admitted, or swapped: now, later, or never?"""

    OK = auto()
    LATER = auto()
    NEVER = auto()


class BlockManager:
    """Paged KV memory for sequences.

    num_cpu_blocks is the size of the swap pool. watermark: share of the GPU blocks that admissions leave free.
    key_source None: no prefix caching. isolate_tenants: tenants share no prefixes. lookahead_slots: extra slots that a
    decoding sequence reserves (speculative decoding). sliding_window: tokens that attention looks back at
    (None: all); blocks wholly outside are released.
    Raises ConfigError for a pool that is larger than can be managed.
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
        _check_goes_together(rules, lookahead_slots, sliding_window)
        self.block_size = block_size
        self.num_gpu_blocks = num_gpu_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self.watermark_blocks = int(watermark * (num_gpu_blocks + rules.watermark_extra_blocks))
        self.rules = rules
        self.lookahead_slots = lookahead_slots
        self.sliding_window = sliding_window
        self.publishes_at_allocation = rules.hits_visible != "commit"
        self.caches_prefixes = key_source is not None
        self.copies: list[tuple[int, int]] = []  # copies-on-write of the step being planned, which takes them
        self._tables: dict[int, list[int]] = {}
        self._gpu = GPUBlocks(num_gpu_blocks, rules, eviction)
        self._chains = Chains(key_source, block_size=block_size, isolate_tenants=isolate_tenants)
        self._prefixes = PrefixSharing(
            self._gpu, self._tables, self._chains, rules=rules, sliding_window=sliding_window
        )
        self._merged = self._prefixes.merged
        self._swap = SwapSpace(num_cpu_blocks, by_content=self._merged is not None)
        # what sequences share is the business of PrefixSharing; these are its methods
        self.lookup = self._prefixes.lookup
        self.publish = self._prefixes.publish
        self.publish_each = self._prefixes.publish_each
        self.withdraw = self._prefixes.withdraw
        self.salt_of = self._chains.salt_of

    # --- state ---

    @property
    def num_free_blocks(self) -> int:
        """GPU blocks that an allocation can have: the free ones, and the cached ones that nothing references."""
        return self._gpu.num_free

    @property
    def num_free_cpu_blocks(self) -> int:
        return self._swap.num_free

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
        return self._swap.tables[seq_id]

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_held_blocks(self, seq: Sequence) -> int:
        """Distinct GPU blocks of the sequence and those scheduled together with it."""
        if seq.siblings is None:
            return sum(1 for block in self._tables[seq.seq_id] if block != RELEASED)
        return len(dict.fromkeys(b for one in seq.siblings for b in self._tables[one.seq_id] if b != RELEASED))

    # --- admission ---

    def never_fits(self, seq: Sequence) -> bool:
        """Whether the known tokens and the watermark exceed the pool itself."""
        least = self.watermark_blocks if self.rules.watermark_when_idle else 0
        return self.num_gpu_blocks - self._num_held_at_most(seq.num_tokens) < least

    def never_fits_reason(self, seq: Sequence) -> str:
        return (
            f"{seq.num_tokens} tokens need {self._num_held_at_most(seq.num_tokens)} KV blocks beside a watermark of "
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
            needed = max(needed, self._num_held_at_most(seq.num_tokens))
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

    # --- growth and copy-on-write ---

    def can_grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether the next `num_tokens` tokens of a running sequence, and of those with it, get blocks now."""
        if self.rules.growth_test == "one_per_sequence":
            if seq.is_prefilling and seq.num_slots >= seq.num_tokens:  # its blocks are there: the next one is wanted
                return self.num_free_blocks >= (seq.num_tokens % self.block_size > 0)
            if self.num_free_blocks < len(seq.together):
                return False
        shared: dict[int, int] = {}  # shared blocks that would be copied, with the references that remain
        needed = sum(self._num_missing(one, num_tokens, shared) for one in seq.together)
        return needed <= self.num_free_blocks

    def _num_missing(self, seq: Sequence, num_tokens: int, shared: dict[int, int]) -> int:
        missing = self.num_blocks_for(self._num_wanted(seq, num_tokens)) - len(self._tables[seq.seq_id])
        block = self._shared_block(seq)
        if block is None:
            return max(0, missing)
        left = shared.setdefault(block, self._gpu.pool.ref_counts[block])
        shared[block] = left - 1
        return max(0, missing) + (left > 1)  # the last of those who share it writes in place

    def _num_wanted(self, seq: Sequence, num_tokens: int) -> int:
        lookahead = 0 if seq.is_prefilling else self.lookahead_slots
        return seq.num_computed_tokens + num_tokens + lookahead

    def _shared_block(self, seq: Sequence) -> int | None:
        """The partly filled block that the sequence writes next, if others hold it too. Published blocks are full."""
        if seq.group is None:
            return None
        index = seq.num_computed_tokens // self.block_size
        table = self._tables[seq.seq_id]
        if index >= len(table):
            return None
        block = table[index]
        return block if self._gpu.pool.ref_counts[block] > 1 and self._gpu.cache.entry_of[block] is None else None

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Slots for the next `num_tokens` tokens of one sequence; copies a shared block that it would write into."""
        block = self._shared_block(seq)
        if block is not None:
            self._gpu.pool.drop(block)
            (copy,) = self._gpu.take(1)
            self._tables[seq.seq_id][seq.num_computed_tokens // self.block_size] = copy
            self.copies.append((block, copy))
        missing = self._num_wanted(seq, num_tokens) - seq.num_slots
        if missing > 0:
            num_blocks = self.num_blocks_for(missing)
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
        for block in table:
            if block != RELEASED:
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
        self._swap.planned()

    # --- swap ---

    def can_swap_out(self, seq: Sequence) -> Verdict:
        """Whether the CPU pool takes the sequence and those with it. NEVER: it is smaller than what they hold."""
        if self.rules.swap_test == "all_blocks":
            num_blocks = self.num_held_blocks(seq)
        else:
            num_blocks = sum(
                self._num_touched(one) - self._swap.num_held(self._chains.full_contents(one)) for one in seq.together
            )
        if num_blocks > self.num_cpu_blocks:
            return Verdict.NEVER
        return Verdict.OK if num_blocks <= self._swap.num_free else Verdict.LATER

    def swap_out(self, seq: Sequence) -> list[tuple[int, int]]:
        """Moves the blocks of the sequence and those with it to the CPU; the (GPU, CPU) pairs to copy."""
        seqs = seq.together
        contents = {one.seq_id: self._chains.full_contents(one) for one in seqs} if self._merged is not None else {}
        tables = {one.seq_id: self._tables.pop(one.seq_id) for one in seqs}
        origins = self._take_back_copies(tables.values())
        for one in seqs:
            self._gpu.release_all(tables[one.seq_id], self._prefixes.settle(one))
            one.num_slots = 0
        return [(origins.get(gpu, gpu), cpu) for gpu, cpu in self._swap.put(tables, contents)]

    def can_swap_in(self, seq: Sequence) -> Verdict:
        """Whether the blocks of a swapped-out sequence, and one more for each to grow, leave the watermark free."""
        seqs = seq.together
        if self.rules.swap_test == "all_blocks":
            tables = [self._swap.tables[one.seq_id] for one in seqs]
            num_blocks = len(dict.fromkeys(block for table in tables for block in table if block != RELEASED))
            num_blocks += max(len(seqs), self._num_growing(seqs, tables))
        else:
            num_blocks = sum(self._num_touched(one) - self._num_there(one) for one in seqs)
        watermark = self.watermark_blocks if self.rules.watermark_for_swapped_in else 0
        if num_blocks + watermark > self.num_gpu_blocks:
            return Verdict.NEVER
        num_free = self.num_free_blocks - len(self._unread_blocks())
        return Verdict.OK if num_free - num_blocks >= watermark else Verdict.LATER

    def _num_growing(self, seqs: list[Sequence], tables: list[list[int]]) -> int:
        """Blocks that the next token of each takes: new ones, and copies of a block that several would write into."""
        num_new = 0
        writers: dict[int, int] = {}
        for one, table in zip(seqs, tables, strict=True):
            num_new += max(0, self.num_blocks_for(self._num_wanted(one, 1)) - len(table))
            index = one.num_computed_tokens // self.block_size
            if index < len(table):
                writers[table[index]] = writers.get(table[index], 0) + 1
        return num_new + sum(writers.values()) - len(writers)

    def _num_touched(self, seq: Sequence) -> int:
        """Full blocks, and one for the next token: what `swap_test=full_blocks` counts. The blocks of a whole prompt
        count from its admission on, and want no more if they are filled to the last."""
        is_whole = seq.is_prefilling and self.rules.allocate == "whole"
        num_tokens = seq.num_tokens if is_whole else seq.num_computed_tokens
        return num_tokens // self.block_size + (not is_whole or num_tokens % self.block_size > 0)

    def _num_there(self, seq: Sequence) -> int:
        """Full blocks whose content others reference on the GPU: a swap in takes those."""
        return 0 if self._merged is None else self._merged.num_referenced(self._chains.full_contents(seq))

    def swap_in(self, seq: Sequence) -> list[tuple[int, int]]:
        """Moves the blocks of the sequence and those with it back to the GPU; the (CPU, GPU) pairs to copy."""
        moved: dict[int, int] = {}
        unread = self._unread_blocks()
        for one in seq.together:
            table = self._tables[one.seq_id] = []
            self._chains.restart(one)
            num_full = 0 if self._merged is None else len(self._chains.full_contents(one))
            for index, cpu_block in enumerate(self._swap.drop(one.seq_id)):
                if cpu_block == RELEASED:
                    block = RELEASED
                elif cpu_block in moved:
                    self._gpu.pool.share(moved[cpu_block])
                    block = moved[cpu_block]
                else:
                    found = None
                    if self._merged is not None and index < num_full:
                        found = self._merged.block_of(one, index)
                    block = self._take_but(unread) if found is None else found
                    moved[cpu_block] = block
                table.append(block)
                if index < num_full:
                    self.publish(one, (index + 1) * self.block_size)
            one.num_slots = len(table) * self.block_size
            if table[:1] == [RELEASED]:
                self._chains.stop(one)
        return list(moved.items())

    def _unread_blocks(self) -> list[int]:
        """Free blocks that copies of this step are still to be made from: a device swaps in before it copies."""
        counts = self._gpu.pool.ref_counts
        return list(dict.fromkeys(source for source, _ in self.copies if not counts[source]))

    def _take_but(self, unread: list[int]) -> int:
        """A new block that is none of these; there must be one."""
        (block,) = self._gpu.take(1)
        aside = []
        while block in unread:
            aside.append(block)
            (block,) = self._gpu.take(1)
        for held in reversed(aside):
            self._gpu.release(held, 0)
        return block

    # --- release ---

    def free(self, seq: Sequence, *, is_planning: bool = False) -> None:
        """Releases the table of one sequence, wherever it lies; cached blocks stay, evictable. It may come back.

        is_planning: within a step that is being decided, which `planned` ends.
        """
        table = self._tables.pop(seq.seq_id, None)
        if table is None:
            self._swap.drop(seq.seq_id)
            if not is_planning:
                self._swap.planned()
        else:
            if self._gpu.last_steps is not None and seq.last_step >= 0:
                for block in table:
                    self._gpu.last_steps[block] = seq.last_step
            if self.copies:
                self._take_back_copies([table])
            self._gpu.release_all(table, self._prefixes.settle(seq))
        seq.num_slots = 0
        self._chains.freed(seq)

    def _take_back_copies(self, tables: Iterable[list[int]]) -> dict[int, int]:
        """Copies of this step into blocks that are given up now are not made; by such a block, its source."""
        if not self.copies:
            return {}
        given_up = dict.fromkeys(block for table in tables for block in table)
        origins = {copy: source for source, copy in self.copies if copy in given_up}
        self.copies = [pair for pair in self.copies if pair[1] not in origins]
        return origins

    def forget(self, seq: Sequence) -> None:
        """The sequence will not come back."""
        assert seq.seq_id not in self._tables, f"{seq} still has a table"
        self._chains.forget(seq)

    # --- inside ---

    def _num_held_at_most(self, num_tokens: int) -> int:
        """Blocks that so many tokens of one sequence hold at a time, if it computes them in small chunks."""
        num_blocks = self.num_blocks_for(num_tokens + self.lookahead_slots)
        if self.sliding_window is not None and self.rules.allocate == "chunk":
            num_blocks = min(num_blocks, self.num_blocks_for(self.sliding_window) + 2)
        return num_blocks

    def check_invariants(self) -> None:
        self._gpu.check_invariants(list(self._tables.values()))
        self._swap.check_invariants()
        assert not self._tables.keys() & self._swap.tables.keys(), "a sequence is on both sides"


def _check_goes_together(rules: KVRules, lookahead_slots: int, sliding_window: int | None) -> None:
    """Raises ConfigError for options that the rules of a mirrored system do not know."""
    if lookahead_slots and (rules.growth_test != "exact" or rules.swap_test != "all_blocks"):
        raise ConfigError(
            f"scheduler.lookahead_slots is {lookahead_slots}, which scheduler.kv_rules.growth_test={rules.growth_test} "
            f"and swap_test={rules.swap_test} do not count; set it to 0, or the rules to exact and all_blocks"
        )
    if sliding_window is not None and rules.duplicates != "listed":
        raise ConfigError(
            f"cache.sliding_window={sliding_window} releases blocks that "
            f"scheduler.kv_rules.duplicates={rules.duplicates} would still name; set it to null, or take another preset"
        )
