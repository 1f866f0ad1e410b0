"""A step while it is being decided: what a batch composition sees, and the operations that it calls.

Owns the batch and the events of the step; changes queues and block tables through their owners. A sequence represents
its group: what is done to it is done to all of `seq.together`.
"""

from __future__ import annotations

from mypy_extensions import i64

from testbed.blocks.demand import AllocStatus
from testbed.blocks.manager import BlockManager
from testbed.blocks.prefixes import PrefixHit
from testbed.core.batch import Batch
from testbed.core.limits import Limits
from testbed.core.plan import Admission, BlockedBy, Ignored, Pair, Preemption
from testbed.core.policies import Policies, allows
from testbed.core.preempting import Preempting
from testbed.core.running import Running
from testbed.core.sequence import Sequence
from testbed.core.state import RUNNING
from testbed.core.waiting import Waiting


class Step:
    """The step decided at `now_ns`. number: steps planned before it. is_ahead: whether another step is in flight."""

    def __init__(
        self, number: int, now_ns: int, limits: Limits, blocks: BlockManager, running: Running, waiting: Waiting,
        policies: Policies, *, is_ahead: bool,
    ) -> None:  # fmt: skip
        self.number: i64 = number
        self.now_ns, self.limits, self.blocks = now_ns, limits, blocks
        self.batch = Batch(limits.max_num_batched_tokens)
        self.admitted: tuple[Admission, ...] = ()
        self.swap_in: tuple[Pair, ...] = ()
        self.swapped_in: tuple[str, ...] = ()
        self.free_gpu_blocks = self.free_cpu_blocks = 0  # set once the step is planned
        self.blocked_by: BlockedBy | None = None  # why the head of the queue is not admitted
        self.made_room = False  # whether sequences were preempted for the head of the queue, none for lack of blocks
        self._running, self._waiting, self._policies = running, waiting, policies
        self._is_ahead = is_ahead
        holds = is_ahead or blocks.holds_victims
        self.leaving = Preempting(self.batch, blocks, running, waiting, policies, holds=holds)
        self.deferred: tuple[Sequence, ...] = ()  # passed over, the last first: they return once the step is decided

    @property
    def rows(self) -> list[tuple[Sequence, int, int]]:
        """(seq, start, num_tokens): all that the step computes so far, num_tokens of seq from position start on."""
        return [(seq, seq.num_computed_tokens, self.batch.counts[index]) for index, seq in enumerate(self.batch.seqs)]

    @property
    def token_budget(self) -> i64:
        """Tokens that the step may still schedule."""
        return self.batch.token_budget

    @token_budget.setter
    def token_budget(self, num_tokens: i64) -> None:
        self.batch.token_budget = num_tokens

    @property
    def preempted(self) -> tuple[Preemption, ...]:
        """Preemptions for lack of blocks or for the head of the queue, without those of a reset."""
        return self.leaving.preempted[self.leaving.num_reset :]

    @property
    def ignored(self) -> tuple[Ignored, ...]:
        return tuple(self.leaving.ignored)

    @property
    def num_running(self) -> int:
        """Running sequences; a group that has not forked yet counts all sequences that it will have."""
        return self._running.num_seqs

    @property
    def num_waiting(self) -> int:
        return self._waiting.num_seqs

    @property
    def num_swapped(self) -> int:
        return len(self._running.swapped)

    @property
    def prefilling(self) -> dict[int, Sequence]:
        """Running sequences with an unfinished prefill, in order of admission or swap-in, those of this step too."""
        return self._running.prefilling

    def running(self) -> tuple[Sequence, ...]:
        """Returns a snapshot of the running sequences in order, one for each group; `reserve` may preempt later ones.
        Sequences that must wait for the outcome of a step in flight are left out."""
        running = self._running.in_order
        return tuple([seq for seq in running if not seq.awaits_outcome]) if self._is_ahead else running

    def swapped(self) -> list[Sequence]:
        """Returns the swapped-out sequences in the order swapped out, one for each group."""
        return list(self._running.swapped.values())

    @property
    def num_long_waiting(self) -> int:
        """Waiting sequences with a long prefill, without those passed over in this step."""
        return self._waiting.num_long

    def is_long(self, seq: Sequence) -> bool:
        """Whether the sequence's prefill is longer than `long_prefill_token_threshold` (0: 4 % of max_model_len)."""
        return self._waiting.is_long(seq)

    def head(self) -> Sequence | None:
        """Returns the head of the waiting queue, or None if nothing waits."""
        return self._waiting.head(self.now_ns)

    # --- running sequences ---

    def schedule(self, seq: Sequence, num_tokens: i64) -> None:
        """Adds the next `num_tokens` tokens of a sequence to the batch. Their slots must be reserved."""
        if seq.siblings is None:
            self._schedule_one(seq, num_tokens)
        else:
            for one in seq.siblings:
                self._schedule_one(one, num_tokens)

    def _schedule_one(self, seq: Sequence, num_tokens: i64) -> None:
        assert seq.state is RUNNING, f"{seq.request_id} is scheduled, and does not run: {seq}"
        end = seq.num_computed_tokens + num_tokens
        assert seq.num_computed_tokens < end <= seq.num_tokens, _miscounted(seq, num_tokens, seq.num_computed_tokens)
        assert end <= len(seq.block_table) * self.blocks.block_size, f"{seq.request_id}: reserve slots before"
        is_twice = seq.last_step == self.number and self.batch.num_tokens_of(seq) > 0  # 0: it was withdrawn since
        assert not is_twice, f"{seq.request_id} is scheduled twice in step {self.number}"
        self.batch.add(seq, num_tokens)
        if self.blocks.publishes_early:
            self.blocks.prefixes.publish(seq, min(end, seq.num_known_tokens))
        seq.last_step = self.number

    def decode(self, min_budget: int = 1) -> None:
        """Schedules a token for each sequence past its prefill, in order, while `min_budget` is left; may preempt."""
        for seq in self.running():
            if not seq.is_prefilling:
                if self.token_budget < max(min_budget, seq.num_together):
                    return
                if self.reserve(seq, 1):
                    self.schedule(seq, 1)

    def reserve(self, seq: Sequence, num_tokens: i64) -> bool:
        """Reserves slots for the next `num_tokens` tokens of a running sequence, preempting victims until they fit.
        Returns False if the sequence itself was preempted, now or earlier in this step, or has ended as ignored."""
        if seq.state is not RUNNING:
            return False
        blocks = self.blocks
        if blocks.sliding_window is not None:
            for one in seq.together:
                blocks.release_outside_window(one)
        if blocks.has_slots(seq, num_tokens):
            return True
        while not blocks.can_grow(seq, num_tokens):
            victim = self._policies.victims.choose(self._running.units)
            if len(self._running.units) == 1 and self._running.finds_no_room(seq):
                self.leaving.give_up(seq)
                return False
            self.leaving.preempt(victim, seq)
            if victim is seq:
                return False
        for one in seq.together:
            blocks.grow(one, num_tokens)
        return True

    def reorder(self, seqs: list[Sequence]) -> None:
        """Changes the running order; `seqs` must be all sequences that `running` returns."""
        if self._is_ahead:
            seqs = [seq for seq in self._running.in_order if seq.awaits_outcome] + seqs
        self._running.reorder(seqs)

    # --- preemption and swap ---

    def preempt(self, seq: Sequence) -> None:
        """Preempts a running sequence, by recompute or by swap as the policy prefers and memory allows."""
        self.leaving.preempt(seq)

    def can_swap_in(self, seq: Sequence) -> AllocStatus:
        """Whether a swapped-out sequence can get its blocks back. With NEVER, it has already ended as ignored."""
        status = self.blocks.swapping.can_swap_in(seq.together)
        if status is AllocStatus.NEVER:
            self.leaving.give_up_swapped(seq)
        return status

    def bring_in(self, seq: Sequence) -> None:
        """Swaps a sequence in; it continues at its position."""
        self._running.stop(seq)
        self.swap_in += self.blocks.swapping.swap_in(seq.together)
        self.swapped_in += (seq.request_id,)
        self._running.start(seq)

    def take_back(self, seq: Sequence, num_tokens: int) -> AllocStatus:
        """Swaps a sequence in and schedules its next `num_tokens` tokens, if its blocks fit; returns the status."""
        status = self.can_swap_in(seq)
        if status is AllocStatus.OK:
            self.bring_in(seq)
            self.resume(seq, num_tokens)
        return status

    def resume(self, seq: Sequence, num_tokens: int) -> None:
        """Schedules the next `num_tokens` tokens of a sequence just swapped in. `can_swap_in` tested a decode's growth.
        A prefill that finds no blocks continues in a later step; nothing is preempted for it."""
        end = seq.num_computed_tokens + num_tokens
        assert seq.num_computed_tokens < end <= seq.num_tokens, _miscounted(seq, num_tokens, seq.num_computed_tokens)
        is_new = end > len(seq.block_table) * self.blocks.block_size
        if seq.is_prefilling and is_new and not self.blocks.can_grow(seq, num_tokens):
            return
        for one in seq.together:
            self.blocks.grow(one, num_tokens)
        self.schedule(seq, num_tokens)

    def next_chunk(self, seq: Sequence) -> int:
        """Returns how many tokens a swapped-out sequence computes when it is swapped in; 0: the budget is too low. The
        rest of a prefill is computed in one chunk, unless it exceeds the budget of a whole step."""
        missing = seq.num_tokens - seq.num_computed_tokens
        if missing * seq.num_together <= self.token_budget:
            return missing
        return max(0, self.token_budget) if missing > self.limits.max_num_batched_tokens else 0

    # --- admission ---

    def can_admit(self, seq: Sequence, num_tokens: int, hit: PrefixHit) -> AllocStatus:
        """Whether the waiting sequence's first `num_tokens` tokens get blocks and the admission policy allows it. With
        LATER, `blocked_by` has the cause. With NEVER, the sequence has already ended as ignored."""
        running = self._running.units
        length = seq.num_prompt_tokens if self.blocks.rules.length_limit == "prompt" else num_tokens
        if length > self.limits.max_model_len:
            self.ignore(seq, self.limits.too_long_reason(seq.num_prompt_tokens))
            return AllocStatus.NEVER
        status = self.blocks.can_admit(seq, num_tokens, hit, is_idle=not running)
        if status is AllocStatus.NEVER:
            self.ignore(seq, self.blocks.never_fits_reason(seq))
        elif status is AllocStatus.LATER:
            self.blocked(BlockedBy.KV_BLOCKS)
        elif not allows(self._policies.admission, seq, running.values()):
            self.blocked(BlockedBy.ADMISSION)
            return AllocStatus.LATER
        return status

    def admit(self, seq: Sequence, hit: PrefixHit, num_tokens: int) -> None:
        """Moves a waiting sequence to the running ones and schedules `num_tokens` tokens after its prefix-cache hit."""
        assert 0 < num_tokens <= seq.num_tokens - hit.num_tokens, _miscounted(seq, num_tokens, hit.num_tokens)
        self._waiting.remove(seq)
        self.blocks.admit(seq, hit.num_tokens + num_tokens, hit)
        self._running.admit(seq)
        seq.restart(hit.num_tokens)
        self.admitted += (Admission(seq.seq_id, seq.request_id, hit.num_tokens, seq.num_preemptions > 0),)
        self.schedule(seq, num_tokens)

    def make_room(self) -> bool:
        """Preempts the running sequence that must yield to the head of the queue; returns whether there was one."""
        yields = self._waiting.yields
        if yields is None or self.admitted or self.swapped_in:  # admitted ones may share blocks that a victim computes
            return False
        victim = yields(self.running(), self.now_ns)  # without those that may end with a step in flight
        if victim is None:
            return False
        self.made_room = not self.preempted or self.made_room
        self.preempt(victim)
        self.blocked_by = None
        return True

    def is_closed(self) -> bool:
        """Whether nothing may be admitted: this step preempted for lack of blocks, or sequences are swapped out."""
        if self.made_room or not (self.preempted or self.num_swapped):
            return False
        self.blocked(BlockedBy.PREEMPTION if self.preempted else BlockedBy.SWAPPED_FIRST)
        return True

    def defer(self, seq: Sequence) -> None:
        """Passes a waiting sequence over in this step; it keeps its place in the queue."""
        self._waiting.remove(seq, passes_over=True)
        self.deferred = (seq, *self.deferred)

    def ignore(self, seq: Sequence, reason: str) -> None:
        """Ends a waiting sequence as ignored: it can never run."""
        self._waiting.remove(seq)
        self.leaving.end(seq, reason)

    def blocked(self, reason: BlockedBy) -> None:
        self.blocked_by = reason

    def close(self) -> tuple[Sequence, ...]:
        """Requeues deferred sequences and held victims. With a step in flight it returns the victims instead."""
        held = self.leaving.held
        for seq in self.deferred if self._is_ahead else self.deferred + held:
            self._waiting.push_back(seq)
        return held if self._is_ahead else ()


def _miscounted(seq: Sequence, num_tokens: int, start: int) -> str:
    return f"{seq.request_id} is scheduled for {num_tokens} tokens; it may be for 1 to {seq.num_tokens - start}"
