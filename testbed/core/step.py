"""One step while it is being composed: the operations that a batch composition decides with.

Owns the rows and events of the step; changes queues and block tables through their owners. It is the whole mechanism
that a composition sees; how victims are preempted is in `preempting.py`. A sequence stands for its group: what is done
to it is done to `seq.together`.
"""

from __future__ import annotations

from testbed.blocks.manager import PrefixHit, Verdict
from testbed.core.plan import Admission, BlockedBy, Ignored, Preemption
from testbed.core.preempting import give_up, give_up_swapped, preempt
from testbed.core.running import Core
from testbed.core.sequence import Sequence, SequenceState

# (seq, start, num_tokens): num_tokens tokens of seq from position start are computed in this step. A plain tuple: there
# may be one for each running sequence in each step.
Row = tuple[Sequence, int, int]


class Step:
    """A step being decided at `now_ns`."""

    __slots__ = ("_core", "_deferred", "admitted", "asked", "blocked_by", "blocks", "decoded", "ended", "held",
                 "ignored", "is_over", "limits", "made_room", "now_ns", "preempted", "refused", "rows", "swap_in",
                 "swap_out", "swapped_in", "token_budget")  # fmt: skip

    def __init__(self, now_ns: int, core: Core) -> None:
        self.now_ns = now_ns
        self.limits = core.limits
        self.blocks = core.blocks
        self.token_budget = core.limits.max_num_batched_tokens
        self.decoded: list[Sequence] = []  # one token each, in running order, before the rows
        self.rows: list[Row] = []
        self.admitted: list[Admission] = []
        self.preempted: list[Preemption] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.swapped_in: list[str] = []
        self.ignored: list[Ignored] = []
        self.ended: list[tuple[Sequence, str]] = []  # ignored sequences, with the reason
        self.blocked_by: BlockedBy | None = None
        self.is_over = False  # committed
        self.asked = False  # whether a waiting sequence was measured against the free blocks
        self.refused: PrefixHit | None = None  # the hit of the one that found too few of them
        self.made_room = False  # whether sequences were preempted for the head of the queue, none for want of blocks
        self.held: list[Sequence] = []  # victims that are back in the queue when the step is decided
        self._core = core
        self._deferred: list[Sequence] = []  # passed over, and then back in the queue too

    # --- what there is ---

    @property
    def num_running(self) -> int:
        """Running sequences, those included that a group's prompt will part into."""
        core = self._core
        return len(core.running) if not core.num_groups else sum(seq.num_seqs for seq in core.running.values())

    @property
    def num_waiting(self) -> int:
        return len(self._core.queue)

    @property
    def num_swapped(self) -> int:
        return len(self._core.swapped)

    @property
    def prefilling(self) -> dict[int, Sequence]:
        """Running sequences whose prefill is unfinished, those admitted here included, in order of admission."""
        return self._core.prefilling

    def running(self) -> list[Sequence]:
        """The running sequences in order, as they are now, one for each group. `reserve` may preempt later ones."""
        return list(self._core.running.values())

    def last_decode(self) -> Sequence | None:
        """The last running sequence that is done with its prefill; None: there is none, or groups are among them."""
        members = self._core.decodes.members
        if self._core.num_groups:
            return next((seq for seq in reversed(self._core.running.values()) if not seq.is_prefilling), None)
        return members[-1] if members else None

    def swapped(self) -> list[Sequence]:
        """The swapped-out sequences in order, one for each group."""
        return list(self._core.swapped.values())

    @property
    def num_deferred(self) -> int:
        """Waiting sequences that this step has passed over."""
        return len(self._deferred)

    @property
    def num_long_waiting(self) -> int:
        """Waiting sequences whose prefill is long, those passed over left out."""
        return self._core.num_long_waiting

    @property
    def is_eventless(self) -> bool:
        """Whether the step only computes what runs, and admits: nobody left, moved or was passed over."""
        return not (self.preempted or self.swapped_in or self.ended or self._deferred or self.held)

    def is_long(self, seq: Sequence) -> bool:
        """Whether the sequence's prefill is longer than `long_prefill_token_threshold` (0: 4 % of max_model_len)."""
        return self._core.is_long(seq)

    def head(self) -> Sequence | None:
        """The waiting sequence to look at next."""
        return self._core.queue.head(self.now_ns)

    # --- what runs ---

    def schedule(self, seq: Sequence, num_tokens: int) -> None:
        """Computes the next `num_tokens` tokens of a sequence in this step. Their slots must be reserved."""
        for one in seq.together:
            start = one.num_computed_tokens
            self.rows.append((one, start, num_tokens))
            self.token_budget -= num_tokens
            self.blocks.scheduled(one, start + num_tokens)
            one.last_step = self._core.num_steps

    def withdraw(self, seq: Sequence) -> bool:
        """A victim that was scheduled already gives its share of the step back; False: it was not."""
        was_scheduled = False
        for one in seq.together:
            if one.is_in_step and one in self.decoded:
                self.token_budget += 1
                self.blocks.withdraw(one, one.num_computed_tokens)
                was_scheduled = True
                self.decoded = [other for other in self.decoded if other is not one]
            for index, (other, start, num_tokens) in enumerate(self.rows):
                if other is one:
                    self.token_budget += num_tokens
                    self.blocks.withdraw(one, start)
                    del self.rows[index]
                    was_scheduled = True
                    break
        return was_scheduled

    def repeat_rows(self) -> None:
        """The next chunk of each row, as long as the one before; there are enough blocks."""
        rows, self.rows = self.rows, []
        for seq, _, num_tokens in rows:
            self.blocks.grow(seq, num_tokens)
            self.schedule(seq, num_tokens)

    def decode(self, min_budget: int = 1) -> None:
        """One token for each sequence that is done with its prefill, in running order, while the budget is at least
        `min_budget`; preempts where it must. With `reserve` and `schedule` for each it would be the same."""
        decodes, blocks = self._core.decodes, self.blocks
        members = decodes.members
        is_all = len(members) == len(self._core.running) - len(self._core.prefilling)  # groups and some others are not
        if not is_all or not blocks.is_plain or self.token_budget - len(members) + 1 < min_budget:
            return self._decode_one_by_one(min_budget)
        crossing = decodes.crossing()
        spare = 1 if blocks.rules.growth_test == "one_per_sequence" else 0
        if (crossing and blocks.num_free_blocks < len(crossing) + spare) or (spare and not blocks.num_free_blocks):
            return self._decode_one_by_one(min_budget)
        decodes.grow(blocks, crossing)
        decodes.last_step = self._core.num_steps
        self.decoded = members
        self.token_budget -= len(members)
        return None

    def _decode_one_by_one(self, min_budget: int) -> None:
        for seq in self.running():
            if seq.is_prefilling or not self.is_running(seq):
                continue
            if self.token_budget < max(min_budget, 1 if seq.siblings is None else len(seq.siblings)):
                return
            if self.reserve(seq, 1):
                self.schedule(seq, 1)

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Slots for the next `num_tokens` tokens of a running sequence, preempting victims until they fit.

        False: the sequence itself was preempted, now or as an earlier victim of this step.
        """
        if not self.is_running(seq):
            return False
        blocks = self.blocks
        if blocks.sliding_window is not None:
            for one in seq.together:
                blocks.release_outside_window(one)
        while not blocks.can_grow(seq, num_tokens):
            is_alone = len(self._core.running) == 1
            victim = self._core.victims.choose(self._core.running)
            if is_alone:
                progress = seq.num_tokens, seq.num_computed_tokens
                if progress <= seq.stuck_at:
                    give_up(self, self._core, seq)
                    return False
                seq.stuck_at = progress
            self.preempt(victim)
            if victim is seq:
                return False
        for one in seq.together:
            blocks.grow(one, num_tokens)
        return True

    def is_running(self, seq: Sequence) -> bool:
        """Whether the sequence still runs: it may have been a victim of this step."""
        return self._core.running.get(seq.unit_id) is seq

    # --- preemption and swap ---

    def preempt(self, seq: Sequence) -> None:
        """Takes a running sequence's blocks away, by recompute or by swap as the policy wishes and memory allows."""
        preempt(self, self._core, seq)

    def can_swap_in(self, seq: Sequence) -> Verdict:
        """Whether a swapped-out sequence gets its blocks back. NEVER ends it as ignored, at once."""
        verdict = self.blocks.can_swap_in(seq)
        if verdict is Verdict.NEVER:
            give_up_swapped(self, self._core, seq)
        return verdict

    def bring_in(self, seq: Sequence) -> None:
        """Swaps a sequence in: it runs again from where it was."""
        core = self._core
        del core.swapped[seq.unit_id]
        self.swap_in += self.blocks.swap_in(seq)
        self.swapped_in.append(seq.request.request_id)
        for one in seq.together:
            one.enter(SequenceState.RUNNING)
        core.start(seq)

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
        is_new = seq.num_computed_tokens + num_tokens > seq.num_slots
        if seq.is_prefilling and is_new and not self.blocks.can_grow(seq, num_tokens):
            return
        for one in seq.together:
            self.blocks.grow(one, num_tokens)
        self.schedule(seq, num_tokens)

    def next_chunk(self, seq: Sequence) -> int:
        """How many of its missing tokens a swapped-out sequence computes when it comes back; 0: the budget is too low.

        All of them, if so many ever fit in a step.
        """
        if seq.is_prefilling:
            missing = seq.num_tokens - seq.num_computed_tokens
            if missing > self.limits.max_num_batched_tokens:
                return min(missing, self.token_budget)
            return missing if missing <= self.token_budget else 0
        return 1 if self.token_budget >= len(seq.together) else 0

    def reorder(self, seqs: list[Sequence]) -> None:
        """Gives the running sequences another order; `seqs` are all of them."""
        self._core.reorder(seqs)

    # --- admission ---

    def can_admit(self, seq: Sequence, num_tokens: int, hit: PrefixHit) -> Verdict:
        """Whether the waiting sequence's first `num_tokens` tokens get blocks and the admission policy allows it.

        LATER says what the head of the queue is blocked by; NEVER ends it as ignored, at once.
        """
        running = self._core.running
        self.asked = True
        length = seq.num_prompt_tokens if self.blocks.rules.length_limit == "prompt" else num_tokens
        if length > self.limits.max_model_len:
            self.ignore(seq, self.limits.too_long_reason(seq.num_prompt_tokens))
            return Verdict.NEVER
        verdict = self.blocks.can_admit(seq, num_tokens, hit, is_idle=not running)
        if verdict is Verdict.NEVER:
            self.ignore(seq, self.blocks.never_fits_reason(seq))
        elif verdict is Verdict.LATER:
            self.refused = hit
            self.blocked(BlockedBy.KV_BLOCKS)
        elif not _is_true(self._core.admission.allows(seq, running.values())):
            self.blocked(BlockedBy.ADMISSION)
            return Verdict.LATER
        return verdict

    def admit(self, seq: Sequence, hit: PrefixHit, num_tokens: int) -> None:
        """Takes a waiting sequence into the running ones and computes `num_tokens` tokens after its hit."""
        core = self._core
        core.remove(seq)
        self.blocks.admit(seq, hit.num_tokens + num_tokens, hit)
        seq.enter(SequenceState.RUNNING)
        seq.is_prefilling = True
        core.start(seq)
        seq.num_computed_tokens = hit.num_tokens
        self.admitted.append(Admission(seq.seq_id, seq.request.request_id, hit.num_tokens, seq.num_preemptions > 0))
        self.schedule(seq, num_tokens)

    def make_room(self) -> bool:
        """Preempts the running sequence that the queue's order says must yield to its head; False: none must."""
        if (
            self._core.yields is None or self.admitted or self.swap_in
        ):  # those admitted may rely on what a victim computes
            return False
        victim = self._core.yields(self._core.running.values(), self.now_ns)
        if victim is None:
            return False
        self.made_room = not self.preempted or self.made_room
        self.preempt(victim)
        self.blocked_by = None
        return True

    def is_closed(self) -> bool:
        """Whether nothing waiting may enter: blocks were short, or something is swapped out. Not while room is made for
        the head of the queue."""
        if self.made_room or not (self.preempted or self.num_swapped):
            return False
        self.blocked(BlockedBy.PREEMPTION if self.preempted else BlockedBy.SWAPPED_FIRST)
        return True

    def defer(self, seq: Sequence) -> None:
        """Passes a waiting sequence over in this step; it keeps its place in the queue."""
        self._core.remove(seq)
        self._deferred.append(seq)

    def ignore(self, seq: Sequence, reason: str) -> None:
        """Ends a waiting sequence that can never run."""
        self._core.remove(seq)
        self.end(seq, reason)

    def end(self, seq: Sequence, reason: str) -> None:
        """Reports a sequence, and those with it, as ignored. They hold nothing, and are in no queue."""
        self.ignored.append(Ignored(seq.seq_id, seq.request.request_id, reason))
        self.ended += [(one, reason) for one in seq.together]

    def blocked(self, reason: BlockedBy) -> None:
        """Records what keeps the head of the queue out of this step."""
        self.blocked_by = reason

    def close(self) -> None:
        """The step is decided: held sequences are in the queue again."""
        if self._deferred or self.held:
            for seq in (*reversed(self._deferred), *self.held):
                self._core.push_back(seq)
        self.blocks.planned()


def _is_true(answer: object) -> bool:
    """A user's class may forget to answer."""
    if not isinstance(answer, bool):
        raise TypeError(f"allows() returned {answer!r}, not True or False")
    return answer
