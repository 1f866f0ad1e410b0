"""A fake device that remembers what its KV slots hold, on both sides.

A prefix of tokens is named by an integer, so "this slot holds exactly this token at this position after exactly these
tokens" is one comparison. It executes a plan in the order that the plan promises: swap out, swap in, copy, compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from testbed.core.plan import BatchPlan, ScheduledSequence

Prefixes = list[int]  # the name of tokens[: i + 1], for each i
EMPTY = 0


class Device:
    """block_size slots in each block of two pools. 0: nothing was ever written there."""

    def __init__(self, block_size: int, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self.block_size = block_size
        self.gpu = [[EMPTY] * block_size for _ in range(num_gpu_blocks)]
        self.cpu = [[EMPTY] * block_size for _ in range(num_cpu_blocks)]
        self._names: dict[tuple[int | str, int], int] = {}

    def name(self, parent: int | str, token: int) -> int:
        """The prefix that has `token` after the prefix `parent` (at the beginning: after a cache salt)."""
        return self._names.setdefault((parent, token), len(self._names) + 1)

    def wipe(self) -> None:
        """Nothing that was written is worth reading any more."""
        for pool in (self.gpu, self.cpu):
            pool[:] = [[EMPTY] * self.block_size for _ in pool]

    def move(self, plan: BatchPlan) -> None:
        """Everything that comes before the computation; all sources of a kind are read before anything is written."""
        _move_all(plan.swap_out, self.gpu, self.cpu)
        _move_all(plan.swap_in, self.cpu, self.gpu)
        _move_all(plan.copies, self.gpu, self.gpu)

    def compute(
        self, rows: Sequence[ScheduledSequence], prefixes_of: Callable[[int], Prefixes],
        is_needed: Callable[[ScheduledSequence, int], bool], *, reads_own_step: bool,
    ) -> None:  # fmt: skip
        """Writes the rows' slots in order. What a row reads must be there before the step or, if `reads_own_step`, when
        its turn comes. is_needed: whether a row reads this position at all.
        """
        size, written = self.block_size, dict[tuple[int, int], int]()
        if not reads_own_step:
            for row in rows:
                self._check_reads(row, prefixes_of(row.seq_id), is_needed)
        for row in rows:
            prefixes, table = prefixes_of(row.seq_id), row.block_table
            if reads_own_step:
                self._check_reads(row, prefixes, is_needed)
            for position in range(row.start, row.start + row.num_tokens):
                block, offset = table[position // size], position % size
                assert block >= 0, f"seq {row.seq_id} writes position {position} into no block"
                name = written.setdefault((block, offset), prefixes[position])
                assert name == prefixes[position], f"two rows write slot {offset} of block {block}"
                self.gpu[block][offset] = name

    def _check_reads(
        self, row: ScheduledSequence, prefixes: Prefixes, is_needed: Callable[[ScheduledSequence, int], bool]
    ) -> None:
        size, table = self.block_size, row.block_table
        for position in range(row.start):
            block = table[position // size]
            if block < 0 or self.gpu[block][position % size] != prefixes[position]:
                message = f"seq {row.seq_id} reads a foreign token at {position} of {row.start}"
                assert not is_needed(row, position), message

    def holds(
        self, table: list[int], prefixes: Prefixes, num_tokens: int, *, first: int, skip: Collection[int], on_gpu: bool
    ) -> None:
        """The computed tokens of a sequence are where its table says, from position `first` on."""
        pool, size = self.gpu if on_gpu else self.cpu, self.block_size
        for index in range(first // size, -(-num_tokens // size)):
            low, high = max(first, index * size), min(num_tokens, (index + 1) * size)
            block = pool[table[index]][low - index * size : high - index * size]
            if block != prefixes[low:high]:
                wrong = [p for p, found in zip(range(low, high), block, strict=True) if found != prefixes[p]]
                assert not [p for p in wrong if p not in skip], f"tokens at {wrong} are lost, on_gpu={on_gpu}"


def _move_all(pairs: tuple[tuple[int, int], ...], sources: list[list[int]], targets: list[list[int]]) -> None:
    """Two pairs may have one destination only if they bring the same content."""
    moved: dict[int, list[int]] = {}
    for source, target in pairs:
        content = sources[source][:]
        assert moved.setdefault(target, content) == content, f"two blocks move to block {target}"
    for target, content in moved.items():
        targets[target][:] = content
