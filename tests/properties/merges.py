"""Blocks of equal prefix that take each other's place, where a hit may cover what nobody computed (vLLM 0.8.5's quirk).

A member does not read its `merged` positions for sure: the block may be one that such a hit claimed.
"""

from __future__ import annotations

from collections.abc import Mapping

from testbed.core.plan import BatchPlan
from testbed.core.sequence import Sequence
from tests.properties.members import Member

Tables = list[tuple[Member, list[int]]]


class Merges:
    """Notes of each plan which positions of members are merged. Where prompts come in chunks, those in any block that
    was merged into; else those in a block that a member has, or had, from a hit."""

    def __init__(self, block_size: int, *, in_chunks: bool) -> None:
        self._block_size, self._in_chunks = block_size, in_chunks
        self._claimed: set[int] = set()  # blocks that members had from hits, until the first slot is written

    def note(self, plan: BatchPlan, members: list[Member], seqs: Mapping[int, Sequence]) -> None:
        copied, size = {target for _, target in plan.copies}, self._block_size
        on_gpu = [(member, seqs[member.seq_id].block_table) for member in members]
        self._claimed.update(block for member, table in on_gpu for block in table[: member.num_hit // size])
        _note_replaced(on_gpu, copied, size, None if self._in_chunks else self._claimed)
        _note_brought(on_gpu, {target for _, target in plan.swap_in}, size)
        if self._in_chunks:
            _note_shared([(member, seqs[member.seq_id].cpu_table) for member in members], size)
        for row in plan.scheduled:
            end = row.start + row.num_tokens
            self._claimed.difference_update(row.block_table[-(-row.start // size) : -(-end // size)])


def _note_replaced(tables: Tables, copied: set[int], block_size: int, claimed: set[int] | None) -> None:
    """Positions in blocks that took the place of the own ones, but by copies. claimed: in no others than these."""
    for member, table in tables:
        for index, (before, now) in enumerate(zip(member.table, table, strict=False)):
            if before != now and now not in copied and (claimed is None or now in claimed):
                member.merged.update(range(index * block_size, (index + 1) * block_size))
        member.table = table[:]


def _note_shared(tables: Tables, block_size: int) -> None:
    """On the CPU: those in blocks that others have too, where a victim's is written over the equal one. Members that go
    together share what is theirs."""
    for holders in _holders(tables, block_size).values():
        if len({member.unit[0].seq_id for member, _ in holders}) > 1:
            _note(holders)


def _note_brought(tables: Tables, brought: set[int], block_size: int) -> None:
    """On the GPU: those in blocks that a swap-in writes, if any who has one has it from a hit or a merge, which may be
    written over the equal one."""
    held = _holders(tables, block_size)
    for holders in [held[block] for block in brought & held.keys()]:
        if any(span.start < member.num_hit or span.start in member.merged for member, span in holders):
            _note(holders)


def _holders(tables: Tables, block_size: int) -> dict[int, list[tuple[Member, range]]]:
    """Who has a block, and as which positions."""
    held: dict[int, list[tuple[Member, range]]] = {}
    for member, table in tables:
        for index, block in enumerate(table):
            if block >= 0:
                held.setdefault(block, []).append((member, range(index * block_size, (index + 1) * block_size)))
    return held


def _note(holders: list[tuple[Member, range]]) -> None:
    for member, span in holders:
        member.merged.update(span)
