"""What no_evict promises, held while a small paged pool is run."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from testbed.policies.admission import (
    NoEvict,
)
from tests.testbed.admission_kit import Seq, allows, bound


class Pool:
    """Reference-counted blocks; sequences fork at the end of their prompt and copy what they share before writing."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_gpu_blocks = num_blocks
        self.block_size = block_size
        self.lookahead_slots = 0
        self.counts: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.prompts: dict[int, tuple[int, int]] = {}  # family, length: prompts of a family begin alike
        self.next_block = 0

    @property
    def num_free_blocks(self) -> int:
        return self.num_gpu_blocks - len(self.counts)

    def table(self, seq_id: int) -> list[int]:
        return self.tables[seq_id]

    def lookup(self, seq: Seq) -> Any:
        family, length = self.prompts[seq.seq_id]
        found: list[int] = []
        for other, table in self.tables.items():
            kin, kin_length = self.prompts[other]
            if kin == family:
                found = max(found, table[: min(length - 1, kin_length) // self.block_size], key=len)
        return SimpleNamespace(blocks=found, num_unreferenced=0)

    def take(self, seq: Seq) -> None:
        assert self.num_free_blocks, f"sequence {seq.seq_id} cannot grow"
        self.counts[self.next_block] = 1
        self.tables[seq.seq_id].append(self.next_block)
        self.next_block += 1
        seq.num_slots = len(self.tables[seq.seq_id]) * self.block_size

    def drop(self, block: int) -> None:
        self.counts[block] -= 1
        if not self.counts[block]:
            del self.counts[block]

    def share(self, seq: Seq, blocks: list[int]) -> None:
        for block in blocks:
            self.counts[block] += 1
        self.tables[seq.seq_id] = list(blocks)
        seq.num_slots = len(blocks) * self.block_size

    def write(self, seq: Seq, position: int) -> None:
        table, index = self.tables[seq.seq_id], position // self.block_size
        if index == len(table):
            self.take(seq)
        elif self.counts[table[index]] > 1:
            assert self.num_free_blocks, f"sequence {seq.seq_id} cannot copy"
            self.drop(table[index])
            self.counts[self.next_block] = 1
            table[index] = self.next_block
            self.next_block += 1

    def release(self, seq: Seq) -> None:
        for block in self.tables.pop(seq.seq_id):
            self.drop(block)


@dataclass
class Job:
    """A request: `outputs` tokens for each sequence, none more than `declared`."""

    prompt: int
    declared: int
    outputs: list[int]
    family: int


JOBS = st.builds(
    lambda prompt, declared, shares, family: Job(
        prompt, declared, [max(1, declared * share // 4) for share in shares], family
    ),
    st.integers(1, 30),
    st.integers(1, 20),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(0, 3),
)


def decode(pool: Pool, leader: Seq, job: Job) -> Seq | None:
    """One token for every live member; gives the first of those that remain."""
    if not leader.num_output_tokens and leader.num_seqs > 1:  # the prompt's end: the members part
        members = [leader] + [Seq(leader.seq_id + 100 * k, job.prompt) for k in range(1, leader.num_seqs)]
        for member in members[1:]:
            pool.prompts[member.seq_id] = (-1, 0)
            pool.share(member, pool.tables[leader.seq_id])
    else:
        members = leader.together
        for member in members:
            pool.write(member, member.num_tokens - 1)
    live = []
    for member in members:
        member.num_output_tokens += 1
        if member.num_output_tokens == job.outputs[member.seq_id // 100]:
            pool.release(member)
        else:
            live.append(member)
    for member in live:
        member.members, member.num_seqs, member.max_tokens = live, len(live), job.declared
    return live[0] if live else None


@given(jobs=st.lists(JOBS, min_size=1, max_size=12), block_size=st.integers(1, 8), extra=st.integers(0, 12))
def test_no_evict_never_leaves_a_running_sequence_without_room(jobs: list[Job], block_size: int, extra: int) -> None:
    largest = max(
        job.prompt // block_size + len(job.outputs) * (1 + job.declared // block_size + 1) for job in jobs
    )  # each fits alone
    pool = Pool(largest + extra, block_size)
    policy: NoEvict = bound(NoEvict(), pool)  # type: ignore[arg-type]
    waiting = [Seq(index, job.prompt, job.declared, num_seqs=len(job.outputs)) for index, job in enumerate(jobs)]
    for seq in waiting:
        pool.prompts[seq.seq_id] = (jobs[seq.seq_id].family, seq.num_prompt_tokens)
    running: dict[int, Seq] = {}  # by job
    for _ in range(1000):
        while waiting and allows(policy, waiting[0], running.values()):
            seq = waiting.pop(0)
            pool.share(seq, pool.lookup(seq).blocks)
            while seq.num_slots < seq.num_prompt_tokens:
                pool.take(seq)
            running[seq.seq_id] = seq
        if not running:
            break
        for index, leader in list(running.items()):
            left = decode(pool, leader, jobs[index])
            if left is None:
                del running[index]
            else:
                running[index] = left
    assert not waiting
    assert not running
    assert not pool.counts
