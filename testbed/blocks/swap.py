"""Swapping: moves whole sequences between GPU blocks and CPU blocks, and tests whether they fit.

Sequences that are scheduled together move together; a block that several of them share moves once and stays shared. A
device swaps out, then swaps in, then copies.
"""

from __future__ import annotations

from testbed.blocks.chain import CacheEntry
from testbed.blocks.copy_on_write import CopyOnWrite
from testbed.blocks.demand import AllocStatus, Demand
from testbed.blocks.gpu_blocks import GPUBlocks
from testbed.blocks.kv_sequence import RELEASED, KVSequence, num_distinct
from testbed.blocks.pool import BlockPool, Pair
from testbed.blocks.prefix_cache import PrefixCache
from testbed.blocks.prefixes import Prefixes

Unit = tuple[KVSequence, ...]  # sequences that are scheduled together


class SwapSpace:
    """The CPU blocks of swapped-out sequences. If the rules merge equal blocks, they are merged here too."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self._leaving: list[int] = []  # blocks that the step being planned empties; it must not fill them
        self._cache = PrefixCache(num_blocks)

    def num_held(self, seq: KVSequence, num_merged: int) -> int:
        """Returns how many of its first `num_merged` blocks have a block of equal content here."""
        return 0 if seq.chain is None else len(self._cache.match(seq.chain, num_merged))

    def put(self, seq: KVSequence, table: list[int], num_merged: int, moved: dict[int, int]) -> None:
        """Adds a sequence, for which there must be room; its first `num_merged` blocks are shared by content.
        moved: {GPU block: CPU block} of the sequences swapped out together; this method extends it."""
        parent: CacheEntry | None = None
        seq.cpu_table = []
        for index, block in enumerate(table):
            if block == RELEASED:
                seq.cpu_table.append(RELEASED)
                continue
            chain = seq.chain if index < num_merged else None
            found = self._cache.find(chain, index, parent) if chain is not None else None
            if block in moved:
                self.pool.share(moved[block])
            elif found is not None:
                moved[block] = found.blocks[0]
                self.pool.share(moved[block])
            else:
                moved[block] = self.pool.allocate()
                if chain is not None:
                    found = self._cache.publish(moved[block], chain, index, parent)
            if found is None:
                num_merged = 0  # after a key collision, or at their end
            parent = found
            seq.cpu_table.append(moved[block])

    def drop(self, seq: KVSequence) -> list[int]:
        """Removes a sequence; returns its CPU table, whose blocks are free once the step is planned (out before in)."""
        table, seq.cpu_table = seq.cpu_table, []
        for block in reversed(table):
            if block != RELEASED and self.pool.drop(block):
                self._cache.forget(block)
                self._leaving.append(block)
        return table

    def planned(self) -> None:
        """Ends the planning of a step: the blocks that it emptied are free."""
        for block in self._leaving:
            self.pool.put_back(block)
        self._leaving = []

    def check_invariants(self, tables: list[list[int]]) -> None:
        self.pool.check_invariants(tables, len(self._leaving))
        self._cache.check_invariants()


class Swapping:
    """Moves sequences and tests whether they fit. watermark_blocks: GPU blocks that a swap-in leaves free. counts_all:
    the tests count all blocks of the sequences, not only the full ones (KV rule `swap_test`)."""

    def __init__(
        self, gpu: GPUBlocks, cpu: SwapSpace, prefixes: Prefixes, copies: CopyOnWrite, demand: Demand, *,
        watermark_blocks: int, counts_all: bool,
    ) -> None:  # fmt: skip
        self._gpu, self._cpu, self._prefixes, self._copies, self._demand = gpu, cpu, prefixes, copies, demand
        self._watermark_blocks, self._counts_all = watermark_blocks, counts_all

    # --- out ---

    def can_swap_out(self, unit: Unit) -> bool:
        """Whether the CPU pool has room for these sequences."""
        num_blocks = num_distinct([one.block_table for one in unit])
        if not self._counts_all:
            on_cpu = [self._cpu.num_held(one, self._prefixes.num_merged_blocks(one)) for one in unit]
            num_blocks = sum([self._num_counted(one, one.block_table) for one in unit]) - sum(on_cpu)
        return num_blocks <= self._cpu.pool.num_free

    def swap_out(self, unit: Unit) -> tuple[Pair, ...]:
        """Moves the blocks of these sequences to the CPU; returns the (GPU, CPU) pairs to copy."""
        tables = [one.block_table for one in unit]
        origins = self._copies.take_back(tables)
        for one in unit:
            self._gpu.release_table(one.block_table)
            one.block_table = []
        moved: dict[int, int] = {}
        for one, table in zip(unit, tables, strict=True):
            self._cpu.put(one, table, self._prefixes.num_merged_blocks(one), moved)
        return tuple([(origins.get(gpu, gpu), cpu) for gpu, cpu in moved.items()])

    # --- in ---

    def can_swap_in(self, unit: Unit) -> AllocStatus:
        """Whether the blocks of swapped-out sequences, and one more for each to grow, leave the watermark free."""
        if self._counts_all:
            num_blocks = num_distinct([one.cpu_table for one in unit]) + max(len(unit), self._num_growing(unit))
        else:
            num_blocks = sum([self._num_counted(one, one.cpu_table) - self._num_on_gpu(one) for one in unit])
        watermark = self._watermark_blocks
        if num_blocks + watermark > self._gpu.pool.num_blocks:
            return AllocStatus.NEVER
        num_free = self._gpu.num_free - len(self._copies.unmoved_blocks())
        return AllocStatus.OK if num_free - num_blocks >= watermark else AllocStatus.LATER

    def swap_in(self, unit: Unit) -> tuple[Pair, ...]:
        """Moves the blocks of these sequences back to the GPU; returns the (CPU, GPU) pairs to copy."""
        moved: dict[int, int] = {}
        unmoved = self._copies.unmoved_blocks()
        for one in unit:
            self._bring(one, moved, unmoved)
        return tuple(moved.items())

    def _bring(self, seq: KVSequence, moved: dict[int, int], unmoved: list[int]) -> None:
        """Moves one sequence back. If equal blocks are merged, it reuses those on the GPU and publishes the others."""
        num_merged = self._prefixes.num_merged_blocks(seq)
        merged, chain = self._prefixes.merged, seq.chain
        seq.block_table = []
        if chain is not None:
            chain.start(0, None)
        for index, cpu_block in enumerate(self._cpu.drop(seq)):
            block = moved.get(cpu_block)
            if cpu_block == RELEASED:
                block = RELEASED
            elif block is not None:
                self._gpu.pool.share(block)
            else:
                if merged is not None and chain is not None and index < num_merged:
                    block = merged.block_of(chain, index)
                if block is None:
                    block = self._take_but(unmoved)
                moved[cpu_block] = block
            seq.block_table.append(block)
            if index < num_merged:
                self._prefixes.publish(seq, (index + 1) * self._demand.block_size)
        if chain is not None and seq.block_table[:1] == [RELEASED]:
            chain.is_broken = True  # a hit needs the whole prefix

    def _take_but(self, unmoved: list[int]) -> int:
        """Returns a new block that is not in `unmoved`; there must be one."""
        block = self._gpu.take()
        aside = []
        while block in unmoved:
            aside.append(block)
            block = self._gpu.take()
        for held in reversed(aside):
            self._gpu.release(held, 0)
        return block

    # --- counts ---

    def _num_counted(self, seq: KVSequence, table: list[int]) -> int:
        """Returns what `swap_test=full_blocks` counts, but at least the blocks that move (a withdrawn chunk's, too)."""
        return max(self._demand.num_touched(seq), num_distinct([table]))

    def _num_growing(self, unit: Unit) -> int:
        """Returns the blocks that the next tokens of these sequences need: new ones, and copies of shared blocks."""
        num_new = 0
        writers: dict[int, int] = {}
        for one in unit:
            num_new += self._demand.num_new_blocks(one, 1, len(one.cpu_table))
            index = one.num_computed_tokens // self._demand.block_size
            if index < len(one.cpu_table):
                writers[one.cpu_table[index]] = writers.get(one.cpu_table[index], 0) + 1
        return num_new + sum(writers.values()) - len(writers)

    def _num_on_gpu(self, seq: KVSequence) -> int:
        """Returns how many full blocks have content that others reference on the GPU; a swap-in reuses these."""
        num_merged = self._prefixes.num_merged_blocks(seq)
        merged, chain = self._prefixes.merged, seq.chain
        return 0 if merged is None or chain is None else merged.num_referenced(chain, num_merged)
