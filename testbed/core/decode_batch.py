"""The decoding sequences, kept from step to step, so that a decode step touches only those that cross a block border or
end.

A sequence that takes part in every decode step has one more token after each: its counts follow from a clock (`tick`),
and nothing is written to it. Owns who is in step, who crosses a border when (by position modulo the block size), and
who ends when (by the limit of its length). Groups of sequences are not here: they are stepped one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from testbed.core.sequence import Sequence

if TYPE_CHECKING:
    from testbed.blocks.manager import BlockManager


class Drawn(NamedTuple):
    """Decoding sequences whose token the backend draws, by column."""

    seqs: list[Sequence]
    seq_ids: tuple[int, ...]
    appends: list[Callable[[int], None]]  # to their tokens
    no_stops: tuple[None, ...]  # what outcomes have in these columns when nothing happens
    no_forks: tuple[tuple[int, ...], ...]
    no_drops: tuple[bool, ...]
    no_logprobs: tuple[tuple[()], ...]


class DecodeBatch:
    """Sequences in step with the decodes. running: those of the scheduler, in order, by unit id."""

    __slots__ = (
        "_block_size", "_crossing", "_disordered", "_drawn", "_drawn_of", "_ending", "_is_lent", "_is_stale",
        "_members", "_running", "context_tokens", "last_step", "num_drawn", "stop_tokens", "tick",
    )  # fmt: skip

    def __init__(self, block_size: int, running: dict[int, Sequence]) -> None:
        self.tick = 0  # decode steps so far
        self.context_tokens = 0  # sum of num_tokens: the positions that a decode of all attends to
        self.num_drawn = 0  # members that are not forced
        self.last_step = -1  # the last one that scheduled all members at once
        self.stop_tokens: set[int] = set()  # of every sequence that was ever here; asked, never iterated
        self._block_size = block_size
        self._running = running
        self._members: list[Sequence] = []
        self._is_stale = False
        self._is_lent = False
        self._drawn = Drawn([], (), [], (), (), (), ())
        self._drawn_of = self._members
        # Buckets of members: by border, in running order but for those that are disordered; by the tick of their end.
        self._crossing: list[list[Sequence]] = [[] for _ in range(block_size)]
        self._disordered: dict[int, None] = {}  # borders
        self._ending: dict[int, list[Sequence]] = {}

    @property
    def members(self) -> list[Sequence]:
        """In running order; the same list object for as long as it does not change."""
        if self._is_stale:
            self._members = [seq for seq in self._running.values() if seq.is_in_step]
            self._is_stale = False
        self._is_lent = True
        return self._members

    def reordered(self) -> None:
        """The order of the running sequences has changed."""
        self._is_stale = True
        self._disordered = dict.fromkeys(range(self._block_size))

    def join(self, seq: Sequence) -> None:
        """A running sequence has all but its newest token computed."""
        seq.join(self)
        if self._members and self._members[-1].admission > seq.admission:
            self._is_stale = True
        elif not self._is_stale:
            self._own_members().append(seq)
        self.context_tokens += seq.num_tokens
        self._put(seq)
        if not seq.is_forced:
            self.num_drawn += 1
            self.stop_tokens.update(seq.stop_tokens)

    def leave(self, seq: Sequence) -> None:
        """A member ends, or is preempted."""
        if not self._is_stale:
            self._own_members().remove(seq)
        self.context_tokens -= seq.num_tokens
        self._remove(seq)
        self.num_drawn -= not seq.is_forced
        seq.last_step = max(seq.last_step, self.last_step)
        seq.leave()

    def _own_members(self) -> list[Sequence]:
        """The members, to be changed: a step that was lent them must not see it."""
        if self._is_lent:
            self._members, self._is_lent = self._members[:], False
        return self._members

    def drawn(self, decoded: list[Sequence]) -> Drawn:
        """Those of the decoded sequences whose token is drawn; kept for as long as the same list is asked about."""
        if decoded is not self._drawn_of:
            seqs = [seq for seq in decoded if not seq.is_forced]
            num = len(seqs)
            appends = [seq.tokens.append for seq in seqs]
            seq_ids = tuple([seq.seq_id for seq in seqs])
            self._drawn = Drawn(seqs, seq_ids, appends, (None,) * num, ((),) * num, (False,) * num, ((),) * num)
            self._drawn_of = decoded
        return self._drawn

    def crossing(self) -> list[Sequence]:
        """Members whose computed tokens fill their blocks: the next one needs a new block."""
        return self._bucket(-self.tick % self._block_size)

    def grow(self, blocks: BlockManager, crossing: list[Sequence]) -> None:
        """Slots for the next token of every member; there are enough blocks. crossing: the answer of `crossing`."""
        if crossing:
            blocks.grow_each(crossing)
        if blocks.publishes_at_allocation:
            filling = self._bucket((-1 - self.tick) % self._block_size)  # their next computed token fills a block
            if filling:
                blocks.publish_each(filling, 1)

    def num_steps_to_end(self) -> int:
        """Decode steps until a member has reached the limit of its length."""
        return min(self._ending) - self.tick

    def num_steps_with_room(self, num_free: int, spare: int, max_steps: int) -> int:
        """How many of the next steps find blocks for all members that cross a border, and `spare` beside them. The
        blocks of the first are taken already; `num_free` are left."""
        left = num_free
        if left >= spare + len(self.members) * (max_steps // self._block_size + 1):
            return max_steps
        for index in range(1, max_steps):
            num_crossing = self.num_crossing(index)
            if left < num_crossing + spare:
                return index
            left -= num_crossing
        return max_steps

    def num_crossing(self, index: int) -> int:
        """How many members need a new block `index` steps from now."""
        return len(self._crossing[-(self.tick + index) % self._block_size])

    def num_quiet_steps(self, max_steps: int) -> int:
        """How many of the next steps neither take blocks nor fill one."""
        for index in range(min(max_steps, self._block_size)):
            if self.num_crossing(index):
                return max(0, index - 1)
        return max_steps

    def _bucket(self, border: int) -> list[Sequence]:
        """Members of one border, in running order; not to be changed, and not to be kept."""
        bucket = self._crossing[border]
        if border in self._disordered:
            bucket.sort(key=lambda seq: seq.admission)
            del self._disordered[border]
        return bucket

    def _put(self, seq: Sequence) -> None:
        border, end_tick = self._place(seq)
        bucket = self._crossing[border]
        if bucket and bucket[-1].admission > seq.admission:
            self._disordered[border] = None
        bucket.append(seq)
        self._ending.setdefault(end_tick, []).append(seq)

    def _remove(self, seq: Sequence) -> None:
        border, end_tick = self._place(seq)
        self._crossing[border].remove(seq)
        ending = self._ending[end_tick]
        ending.remove(seq)
        if not ending:
            del self._ending[end_tick]

    def _place(self, seq: Sequence) -> tuple[int, int]:
        """Border and end, constant while the sequence is in step: at tick t those with border -t have all their blocks
        full; at the tick of its end it has reached the limit of its length."""
        base = self.tick - seq.num_tokens
        return (-1 - base) % self._block_size, base + seq.token_limit

    def ending(self) -> list[Sequence]:
        """Members that have reached the limit of their length."""
        return self._ending.get(self.tick, [])

    def advance_all(self, num_members: int, num_steps: int = 1) -> None:
        """Decode steps of all members are over."""
        self.tick += num_steps
        self.context_tokens += num_members * num_steps

    def run_ahead(self, num_steps: int, blocks: BlockManager) -> list[int]:
        """So many steps of all members are over, in which nobody ends, and after each there are slots for the next.
        Returns how many blocks are free after each."""
        size, num_members = self._block_size, len(self.members)
        for border in list(self._disordered):
            self._bucket(border)
        first = -(self.tick + 1) % size
        each = self._crossing[first::-1] + self._crossing[:first:-1]  # of as many steps as a block has slots
        batches = each * (num_steps // size) + each[: num_steps % size]
        filling = each[num_steps % size]  # by the step that comes then
        if blocks.grow_ahead(batches, filling):
            self.advance_all(num_members, num_steps)
            taken = list(accumulate(map(len, batches)))
            before = blocks.num_free_blocks + taken[-1]
            return [before - num for num in taken]
        free: list[int] = []
        for batch in batches:
            self.advance_all(num_members)
            if batch and not blocks.publishes_at_allocation:
                blocks.publish_each(batch, 0)
            self.grow(blocks, batch)
            free.append(blocks.num_free_blocks)
        return free

    def advance(self, decoded: list[Sequence]) -> None:
        """A decode step is over: `decoded` emitted a token each, other members took no part."""
        members = self.members
        if len(decoded) == len(members):
            return self.advance_all(len(members))
        in_step = {seq.seq_id for seq in decoded}
        late = [seq for seq in members if seq.seq_id not in in_step]
        for seq in late:
            self._remove(seq)
        self.advance_all(len(decoded))
        for seq in late:
            seq.lag()
            self._put(seq)
        return None

    def check_invariants(self) -> None:
        members = self.members
        assert members == [seq for seq in self._running.values() if seq.is_in_step], "members in running order"
        assert self.context_tokens == sum(seq.num_tokens for seq in members)
        assert self.num_drawn == sum(1 for seq in members if not seq.is_forced)
        for seq in members:
            border, end_tick = self._place(seq)
            assert seq in self._crossing[border]
            assert seq in self._ending[end_tick]
        for border, bucket in enumerate(self._crossing):
            admissions = [seq.admission for seq in bucket]
            assert border in self._disordered or admissions == sorted(admissions), "a bucket is in running order"
        assert sum(map(len, self._crossing)) == sum(map(len, self._ending.values())) == len(members)
