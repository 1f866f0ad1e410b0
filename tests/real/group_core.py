"""A core in small, made by hand: groups, block tables, copy-on-write and swaps, as the seam describes them.

It keeps to what a backend may count on: the rows of a group stand together; the member that goes on keeps its place,
and new members come last, in the order of (parent row, fork). Freed blocks are used again as soon as possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from testbed.core.outcome import Outcome
from testbed.core.plan import BatchPlan, ScheduledSequence
from testbed.core.request import SamplingParams
from tests.real.engine_helpers import plan_of

Pairs = list[tuple[int, int]]


@dataclass
class Member:
    seq_id: int
    tokens: list[int]
    table: list[int] = field(default_factory=list)  # GPU blocks; CPU blocks while the group is swapped out
    num_computed: int = 0
    logprobs: list[float] = field(default_factory=list)

    @property
    def score(self) -> float:
        return sum(self.logprobs)


@dataclass
class Group:
    group_id: int
    sampling: SamplingParams
    num_prompt_tokens: int
    num_output_tokens: int
    members: list[Member]
    num_born: int = 1
    is_swapped: bool = False
    has_forked: bool = False
    finished: list[list[int]] = field(default_factory=list)  # outputs
    scores: list[float] = field(default_factory=list)  # summed log-probability of each, where the backend says it


class HandCore:
    """Plans a step of every group that is not swapped out, and commits what came of it."""

    def __init__(self, num_gpu_blocks: int, num_cpu_blocks: int, block_size: int = 4, eos: int | None = None) -> None:
        self.block_size = block_size
        self.groups: list[Group] = []
        self.num_copies = 0
        self._eos = eos
        self._free_gpu = list(range(num_gpu_blocks))  # a stack: what was freed last is used first
        self._free_cpu = list(range(num_cpu_blocks))
        self._left_cpu: list[int] = []  # read by this plan's swap-in, so free only after it
        self._counts: Counter[int] = Counter()  # references to GPU blocks
        self._next_id = 0
        self._swap_out: Pairs = []
        self._swap_in: Pairs = []
        self._rows: list[tuple[Group, Member, ScheduledSequence]] = []

    def add(self, prompt: Sequence[int], sampling: SamplingParams, num_output_tokens: int) -> Group:
        group_id = self._next_id
        self._next_id += sampling.num_seqs  # a group's sequences are numbered in a row
        group = Group(group_id, sampling, len(prompt), num_output_tokens, [Member(group_id, list(prompt))])
        self.groups.append(group)
        return group

    def swap_out(self, group: Group) -> None:
        """With the next plan. Shared blocks move once."""
        moved: dict[int, int] = {}
        for member in group.members:
            for block in member.table:
                if block not in moved:
                    moved[block] = self._free_cpu.pop()
            for block in member.table:
                self._release(block)
            member.table = [moved[block] for block in member.table]
        self._swap_out += moved.items()
        group.is_swapped = True

    def swap_in(self, group: Group) -> None:
        moved: dict[int, int] = {}
        for member in group.members:
            for block in member.table:
                if block not in moved:
                    moved[block] = self._free_gpu.pop()
                    self._left_cpu.append(block)
                self._counts[moved[block]] += 1
            member.table = [moved[block] for block in member.table]
        self._swap_in += moved.items()
        group.is_swapped = False

    def plan(self, chunk: int = 64) -> BatchPlan:
        copies: Pairs = []
        self._rows = []
        for group in self.groups:
            for member in () if group.is_swapped else group.members:
                start, end = member.num_computed, min(member.num_computed + chunk, len(member.tokens))
                self._cover(member, start, end, copies)
                samples = end == len(member.tokens)
                line = ScheduledSequence(
                    seq_id=member.seq_id, start=start, num_tokens=end - start, tokens=member.tokens[start:end],
                    samples=samples, forced=False, block_table=member.table, sampling=group.sampling,
                    num_samples=group.sampling.num_seqs if samples and not group.has_forked else 1,
                    group_id=group.group_id, num_prompt_tokens=group.num_prompt_tokens,
                    history=member.tokens if group.sampling.needs_history else (), score=member.score,
                    num_finished=len(group.finished),
                )  # fmt: skip
                self._rows.append((group, member, line))
        moves = {"swap_out": tuple(self._swap_out), "swap_in": tuple(self._swap_in), "copies": tuple(copies)}
        self.num_copies += len(copies)
        self._swap_out, self._swap_in = [], []
        self._free_cpu += self._left_cpu
        self._left_cpu = []
        return plan_of(*(line for _, _, line in self._rows), **moves)

    def commit(self, outcomes: Sequence[Outcome] | None) -> None:
        sampled = [line.seq_id for _, _, line in self._rows if line.samples]
        assert [outcome.seq_id for outcome in outcomes or ()] == sampled, "one outcome for each row, in row order"
        found = iter(outcomes or ())
        born: list[tuple[Group, Member]] = []
        for group, member, line in self._rows:
            member.num_computed = line.start + line.num_tokens
            if not line.samples:
                continue
            outcome = next(found)
            group.has_forked = True
            given = [one.logprob for one in outcome.logprobs]
            for index, token in enumerate(outcome.forks, len(outcome.tokens)):
                child = Member(self._new_id(group), [*member.tokens, token], list(member.table), member.num_computed)
                child.logprobs = member.logprobs + given[index : index + 1]
                born.append((group, child))
                self._counts.update(member.table)
            assert len(outcome.tokens) == (not outcome.dropped)
            member.tokens += outcome.tokens
            member.logprobs += given[: len(outcome.tokens)]
            if outcome.dropped:
                self._end(group, member)
        for group, member in born:
            group.members.append(member)
        for group in self.groups:
            stops = self._stops(group)
            for member in list(group.members):
                output = member.tokens[group.num_prompt_tokens :]
                if len(output) == group.num_output_tokens or output[-1:] in stops:
                    group.finished.append(output)
                    group.scores.append(member.score)
                    self._end(group, member)
        self.groups = [group for group in self.groups if group.members]

    @property
    def num_free(self) -> tuple[int, int]:
        return len(self._free_gpu), len(self._free_cpu)

    def _new_id(self, group: Group) -> int:
        """The ids after the group's while they last; a beam search uses up more."""
        group.num_born += 1
        if group.num_born <= group.sampling.num_seqs:
            return group.group_id + group.num_born - 1
        self._next_id += 1
        return self._next_id - 1

    def _stops(self, group: Group) -> list[list[int]]:
        stops = list(group.sampling.stop_token_ids)
        return [[token] for token in stops + ([] if self._eos is None or group.sampling.ignore_eos else [self._eos])]

    def _cover(self, member: Member, start: int, end: int, copies: Pairs) -> None:
        """Own blocks for positions start … end - 1: a shared, partly filled last block is copied first."""
        if start % self.block_size and self._counts[member.table[-1]] > 1:
            shared, own = member.table[-1], self._take()
            copies.append((shared, own))
            self._counts[shared] -= 1
            member.table[-1] = own
        while len(member.table) * self.block_size < end:
            member.table.append(self._take())

    def _take(self) -> int:
        block = self._free_gpu.pop()
        self._counts[block] += 1
        return block

    def _release(self, block: int) -> None:
        self._counts[block] -= 1
        if not self._counts[block]:
            self._free_gpu.append(block)

    def _end(self, group: Group, member: Member) -> None:
        group.members.remove(member)
        for block in member.table:
            self._release(block)
