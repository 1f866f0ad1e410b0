"""Swapping: whole sequences move between the GPU's blocks and the CPU's, and the tests of whether they may.

Sequences that are scheduled together move together. A device swaps out, then swaps in, then copies.
"""

from __future__ import annotations

from testbed.blocks.chains import Chains
from testbed.blocks.copy_on_write import CopyOnWrite
from testbed.blocks.demand import Demand
from testbed.blocks.gpu_blocks import GPUBlocks
from testbed.blocks.sharing import PrefixSharing
from testbed.blocks.swap_space import RELEASED, SwapSpace
from testbed.blocks.verdict import Verdict
from testbed.core.sequence import Sequence


class Swapping:
    """Works on the block tables of the manager. watermark_blocks: what swapping in leaves free."""

    def __init__(
        self,
        gpu: GPUBlocks,
        cpu: SwapSpace,
        tables: dict[int, list[int]],
        chains: Chains,
        prefixes: PrefixSharing,
        copies: CopyOnWrite,
        demand: Demand,
        *,
        watermark_blocks: int,
    ) -> None:
        self._watermark_blocks = watermark_blocks
        self._gpu = gpu
        self._cpu = cpu
        self._tables = tables
        self._chains = chains
        self._prefixes = prefixes
        self._merged = prefixes.merged
        self._copies = copies
        self._demand = demand
        self._counts_all = demand.rules.swap_test == "all_blocks"

    def num_held_blocks(self, seq: Sequence) -> int:
        """Distinct GPU blocks of the sequence and those scheduled together with it."""
        if seq.siblings is None:
            return sum(1 for block in self._tables[seq.seq_id] if block != RELEASED)
        return len(dict.fromkeys(b for one in seq.siblings for b in self._tables[one.seq_id] if b != RELEASED))

    # --- out ---

    def can_swap_out(self, seq: Sequence) -> Verdict:
        """Whether the CPU pool takes the sequence and those with it. NEVER: it is smaller than what they hold."""
        if self._counts_all:
            num_blocks = self.num_held_blocks(seq)
        else:
            num_blocks = sum(
                self._num_counted(one, self._tables[one.seq_id]) - self._cpu.num_held(self._chains.full_contents(one))
                for one in seq.together
            )
        if num_blocks > self._cpu.num_blocks:
            return Verdict.NEVER
        return Verdict.OK if num_blocks <= self._cpu.num_free else Verdict.LATER

    def swap_out(self, seq: Sequence) -> list[tuple[int, int]]:
        """Moves the blocks of the sequence and those with it to the CPU; the (GPU, CPU) pairs to copy."""
        seqs = seq.together
        contents = {} if self._merged is None else {one.seq_id: self._chains.full_contents(one) for one in seqs}
        tables = {one.seq_id: self._tables.pop(one.seq_id) for one in seqs}
        origins = self._copies.take_back(tables.values())
        for one in seqs:
            self._gpu.release_all(tables[one.seq_id][:], self._prefixes.settle(one))
            one.num_slots = 0
        return [(origins.get(gpu, gpu), cpu) for gpu, cpu in self._cpu.put(tables, contents)]

    # --- in ---

    def can_swap_in(self, seq: Sequence) -> Verdict:
        """Whether the blocks of a swapped-out sequence, and one more for each to grow, leave the watermark free."""
        seqs = seq.together
        if self._counts_all:
            tables = [self._cpu.tables[one.seq_id] for one in seqs]
            num_blocks = len(dict.fromkeys(block for table in tables for block in table if block != RELEASED))
            num_blocks += max(len(seqs), self._num_growing(seqs, tables))
        else:
            num_blocks = sum(
                self._num_counted(one, self._cpu.tables[one.seq_id]) - self._num_there(one) for one in seqs
            )
        watermark = self._watermark_blocks
        if num_blocks + watermark > self._gpu.pool.num_blocks:
            return Verdict.NEVER
        num_free = self._gpu.num_free - len(self._copies.unread_blocks())
        return Verdict.OK if num_free - num_blocks >= watermark else Verdict.LATER

    def _num_counted(self, seq: Sequence, table: list[int]) -> int:
        """What `swap_test=full_blocks` counts; at least the blocks that move: a chunk that was taken back has left some
        that it did not fill."""
        return max(self._demand.num_touched(seq), sum(1 for block in table if block != RELEASED))

    def _num_growing(self, seqs: list[Sequence], tables: list[list[int]]) -> int:
        """Blocks that the next token of each takes: new ones, and copies of a block that several would write into."""
        demand = self._demand
        num_new = 0
        writers: dict[int, int] = {}
        for one, table in zip(seqs, tables, strict=True):
            num_new += demand.num_new_blocks(one, 1, len(table) * demand.block_size)
            index = one.num_computed_tokens // demand.block_size
            if index < len(table):
                writers[table[index]] = writers.get(table[index], 0) + 1
        return num_new + sum(writers.values()) - len(writers)

    def _num_there(self, seq: Sequence) -> int:
        """Full blocks whose content others reference on the GPU: swapping in takes those."""
        return 0 if self._merged is None else self._merged.num_referenced(self._chains.full_contents(seq))

    def swap_in(self, seq: Sequence) -> list[tuple[int, int]]:
        """Moves the blocks of the sequence and those with it back to the GPU; the (CPU, GPU) pairs to copy."""
        block_size = self._demand.block_size
        moved: dict[int, int] = {}
        unread = self._copies.unread_blocks()
        for one in seq.together:
            table = self._tables[one.seq_id] = []
            self._chains.restart(one)
            num_full = 0 if self._merged is None else len(self._chains.full_contents(one))
            for index, cpu_block in enumerate(self._cpu.drop(one.seq_id)):
                if cpu_block == RELEASED:
                    block = RELEASED
                elif cpu_block in moved:
                    self._gpu.pool.count([moved[cpu_block]])
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
                    self._prefixes.publish(one, (index + 1) * block_size)
            one.num_slots = len(table) * block_size
            if table[:1] == [RELEASED]:
                self._chains.stop(one)
        return list(moved.items())

    def _take_but(self, unread: list[int]) -> int:
        """A new block that is none of these; there must be one."""
        (block,) = self._gpu.take(1)
        aside = []
        while block in unread:
            aside.append(block)
            (block,) = self._gpu.take(1)
        self._gpu.pool.count(aside)
        for held in reversed(aside):
            self._gpu.release(held, 0)
        return block
