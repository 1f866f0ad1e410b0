"""One step while it is being composed: the operations that a batch composition decides with, and all that it sees.

Owns the batch and the events of the step; changes queues and block tables through their owners. A sequence stands for
its group: what is done to it is done to `seq.together`.
"""

from __future__ import annotations

from mypy_extensions import i64

from testbed.blocks.manager import BlockManager
from testbed.blocks.prefixes import PrefixHit
from testbed.blocks.verdict import Verdict
from testbed.core.batch import Batch, Row
from testbed.core.limits import Limits
from testbed.core.plan import Admission, BlockedBy, Ignored, Pair, Preemption
from testbed.core.policies import Policies
from testbed.core.preempting import Preempting
from testbed.core.running import Running
from testbed.core.sequence import Sequence
from testbed.core.state import RUNNING
from testbed.core.waiting import Waiting


class Step:
    """A step being decided at `now_ns`; number: how many were planned before it. is_ahead: another is in flight."""

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
        self.free_gpu_blocks = self.free_cpu_blocks = 0  # once it is planned
        self.blocked_by: BlockedBy | None = None  # what keeps the head of the queue out
        self.made_room = False  # whether sequences were preempted for the head of the queue, none for want of blocks
        self._running, self._waiting, self._policies = running, waiting, policies
        self._is_ahead = is_ahead
        holds = is_ahead or blocks.holds_victims
        self.leaving = Preempting(self.batch, blocks, running, waiting, policies, holds=holds)
        self.deferred: tuple[Sequence, ...] = ()  # passed over, and then back in the queue too

    @property
    def rows(self) -> list[Row]:
        """(seq, start, num_tokens) of everything that the step computes so far."""
        counts = self.batch.counts
        return [(seq, seq.num_computed_tokens, counts[index]) for index, seq in enumerate(self.batch.seqs)]

    @property
    def token_budget(self) -> i64:
        """What is left of it."""
        return self.batch.token_budget

    @token_budget.setter
    def token_budget(self, num_tokens: i64) -> None:
        self.batch.token_budget = num_tokens

    @property
    def preempted(self) -> tuple[Preemption, ...]:
        """For want of blocks, or for the head of the queue; not those of a reset."""
        return self.leaving.preempted[self.leaving.num_reset :]

    @property
    def ignored(self) -> tuple[Ignored, ...]:
        return self.leaving.ignored

    @property
    def num_running(self) -> int:
        """Running sequences, those included that a group's prompt will part into."""
        return self._running.num_seqs

    @property
    def num_waiting(self) -> int:
        return self._waiting.num_seqs

    @property
    def num_swapped(self) -> int:
        return len(self._running.swapped)

    @property
    def prefilling(self) -> dict[int, Sequence]:
        """Running sequences whose prefill is unfinished, those admitted here included, in order of admission."""
        return self._running.prefilling

    def running(self) -> tuple[Sequence, ...]:
        """The running sequences in order, as they are now, one for each group. `reserve` may preempt later ones.
        Without those of which a step in flight says how they go on."""
        running = self._running.in_order
        return tuple([seq for seq in running if not seq.awaits_outcome]) if self._is_ahead else running

    def swapped(self) -> list[Sequence]:
        """The swapped-out sequences in order, one for each group."""
        return list(self._running.swapped.values())

    @property
    def num_long_waiting(self) -> int:
        """Waiting sequences whose prefill is long, those passed over left out."""
        return self._waiting.num_long

    def is_long(self, seq: Sequence) -> bool:
        """Whether the sequence's prefill is longer than `long_prefill_token_threshold` (0: 4 % of max_model_len)."""
        return self._waiting.is_long(seq)

    def head(self) -> Sequence | None:
        """The waiting sequence to look at next."""
        return self._waiting.head(self.now_ns)

    # --- what runs ---

    def schedule(self, seq: Sequence, num_tokens: i64) -> None:
        """Computes the next `num_tokens` tokens of a sequence in this step. Their slots must be reserved."""
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
        is_twice = seq.last_step == self.number and self.batch.num_tokens_of(seq) > 0  # or it was withdrawn since
        assert not is_twice, f"{seq.request_id} is scheduled twice in step {self.number}"
        self.batch.add(seq, num_tokens)
        if self.blocks.publishes_early:
            self.blocks.prefixes.publish(seq, min(end, seq.num_known_tokens))
        seq.last_step = self.number

    def decode(self, min_budget: int = 1) -> None:
        """A token for each sequence past its prefill, in order, while `min_budget` is left; preempts where it must."""
        for seq in self.running():
            if not seq.is_prefilling:
                if self.token_budget < max(min_budget, seq.num_together):
                    return
                if self.reserve(seq, 1):
                    self.schedule(seq, 1)

    def reserve(self, seq: Sequence, num_tokens: i64) -> bool:
        """Slots for the next `num_tokens` tokens of a running sequence, preempting victims until they fit. False: the
        sequence itself was preempted, now or as an earlier victim of this step."""
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
        """Gives the running sequences another order; `seqs` are all that `running` gives."""
        if self._is_ahead:
            seqs = [seq for seq in self._running.in_order if seq.awaits_outcome] + seqs
        self._running.reorder(seqs)

    # --- preemption and swap ---

    def preempt(self, seq: Sequence) -> None:
        """Takes a running sequence's blocks away, by recompute or by swap as the policy wishes and memory allows."""
        self.leaving.preempt(seq)

    def can_swap_in(self, seq: Sequence) -> Verdict:
        """Whether a swapped-out sequence gets its blocks back. NEVER ends it as ignored, at once."""
        verdict = self.blocks.swapping.can_swap_in(seq.together)
        if verdict is Verdict.NEVER:
            self.leaving.give_up_swapped(seq)
        return verdict

    def bring_in(self, seq: Sequence) -> None:
        """Swaps a sequence in: it runs again from where it was."""
        self._running.stop(seq)
        self.swap_in += self.blocks.swapping.swap_in(seq.together)
        self.swapped_in += (seq.request_id,)
        self._running.start(seq)

    def take_back(self, seq: Sequence, num_tokens: int) -> Verdict:
        """Brings a swapped-out sequence in and computes its next `num_tokens` tokens, if its blocks find room."""
        verdict = self.can_swap_in(seq)
        if verdict is Verdict.OK:
            self.bring_in(seq)
            self.resume(seq, num_tokens)
        return verdict

    def resume(self, seq: Sequence, num_tokens: int) -> None:
        """Computes the next `num_tokens` tokens of a sequence that was just swapped in: a decode's room to grow was
        part of that test. A prefill that finds none goes on in a later step: nothing is preempted for it."""
        end = seq.num_computed_tokens + num_tokens
        assert seq.num_computed_tokens < end <= seq.num_tokens, _miscounted(seq, num_tokens, seq.num_computed_tokens)
        is_new = end > len(seq.block_table) * self.blocks.block_size
        if seq.is_prefilling and is_new and not self.blocks.can_grow(seq, num_tokens):
            return
        for one in seq.together:
            self.blocks.grow(one, num_tokens)
        self.schedule(seq, num_tokens)

    def next_chunk(self, seq: Sequence) -> int:
        """How many tokens a swapped-out sequence computes when it comes back; 0: the budget is too low. What a prefill
        lacks is computed in one piece, unless it is more than any step may compute."""
        if not seq.is_prefilling:
            return 1 if self.token_budget >= seq.num_together else 0
        missing = seq.num_tokens - seq.num_computed_tokens
        if missing > self.limits.max_num_batched_tokens:
            return min(missing, max(0, self.token_budget))
        return missing if missing <= self.token_budget else 0

    # --- admission ---

    def can_admit(self, seq: Sequence, num_tokens: int, hit: PrefixHit) -> Verdict:
        """Whether the waiting sequence's first `num_tokens` tokens get blocks and the admission policy allows it. LATER
        says what the head of the queue is blocked by; NEVER ends it as ignored, at once."""
        running = self._running.units
        length = seq.num_prompt_tokens if self.blocks.rules.length_limit == "prompt" else num_tokens
        if length > self.limits.max_model_len:
            self.ignore(seq, self.limits.too_long_reason(seq.num_prompt_tokens))
            return Verdict.NEVER
        verdict = self.blocks.can_admit(seq, num_tokens, hit, is_idle=not running)
        if verdict is Verdict.NEVER:
            self.ignore(seq, self.blocks.never_fits_reason(seq))
        elif verdict is Verdict.LATER:
            self.blocked(BlockedBy.KV_BLOCKS)
        elif not self._policies.allows(seq, running):
            self.blocked(BlockedBy.ADMISSION)
            return Verdict.LATER
        return verdict

    def admit(self, seq: Sequence, hit: PrefixHit, num_tokens: int) -> None:
        """Takes a waiting sequence into the running ones and computes `num_tokens` tokens after its hit."""
        assert 0 < num_tokens <= seq.num_tokens - hit.num_tokens, _miscounted(seq, num_tokens, hit.num_tokens)
        self._waiting.remove(seq)
        self.blocks.admit(seq, hit.num_tokens + num_tokens, hit)
        self._running.admit(seq)
        seq.restart(hit.num_tokens)
        self.admitted += (Admission(seq.seq_id, seq.request_id, hit.num_tokens, seq.num_preemptions > 0),)
        self.schedule(seq, num_tokens)

    def make_room(self) -> bool:
        """Preempts the running sequence that the queue's order says must yield to its head; False: none must."""
        yields = self._waiting.yields
        if yields is None or self.admitted or self.swap_in:  # those admitted may rely on what a victim computes
            return False
        victim = yields(self.running(), self.now_ns)  # not those that end with what is in flight
        if victim is None:
            return False
        self.made_room = not self.preempted or self.made_room
        self.preempt(victim)
        self.blocked_by = None
        return True

    def is_closed(self) -> bool:
        """Whether nothing waiting may enter: blocks were short, and not for the head, or something is swapped out."""
        if self.made_room or not (self.preempted or self.num_swapped):
            return False
        self.blocked(BlockedBy.PREEMPTION if self.preempted else BlockedBy.SWAPPED_FIRST)
        return True

    def defer(self, seq: Sequence) -> None:
        """Passes a waiting sequence over in this step; it keeps its place in the queue."""
        self._waiting.remove(seq)
        self.deferred += (seq,)

    def ignore(self, seq: Sequence, reason: str) -> None:
        """Ends a waiting sequence that can never run."""
        self._waiting.remove(seq)
        self.leaving.end(seq, reason)

    def blocked(self, reason: BlockedBy) -> None:
        self.blocked_by = reason

    def close(self) -> tuple[Sequence, ...]:
        """The step is decided: held sequences are in the queue again, but the victims returned: tokens may come."""
        for seq in reversed(self.deferred):
            self._waiting.push_back(seq)
        if self._is_ahead:
            return self.leaving.held
        for seq in self.leaving.held:
            self._waiting.push_back(seq)
        return ()


def _miscounted(seq: Sequence, num_tokens: int, start: int) -> str:
    return f"{seq.request_id} is scheduled for {num_tokens} tokens; it may be for 1 to {seq.num_tokens - start}"
