"""One step while it is being composed: the operations that a batch composition decides with.

Owns the rows and events of the step; changes queues and block tables through their owners. It is the whole mechanism
that a composition sees.
"""

from __future__ import annotations

from testbed.blocks.manager import BlockManager, PrefixHit, Verdict
from testbed.plan import Admission, BlockedBy, Ignored, Preemption, PreemptionMode
from testbed.policies.config import Limits
from testbed.policies.queue_order import WaitingQueue
from testbed.policies.victim import VictimChoice
from testbed.sequence import Sequence, SequenceState

# (seq, start, num_tokens): num_tokens tokens of seq from position start are computed in this step. A plain tuple: there
# is one for each running sequence in each step.
Row = tuple[Sequence, int, int]


class Step:
    """A step being decided at `now_ns`."""

    __slots__ = (
        "_queue",
        "_running",
        "_victims",
        "admitted",
        "blocked_by",
        "blocks",
        "ended",
        "ignored",
        "limits",
        "now_ns",
        "preempted",
        "prefilling",
        "rows",
        "token_budget",
    )

    def __init__(
        self,
        now_ns: int,
        limits: Limits,
        blocks: BlockManager,
        queue: WaitingQueue,
        running: dict[int, Sequence],
        prefilling: dict[int, Sequence],
        victims: VictimChoice,
    ) -> None:
        self.now_ns = now_ns
        self.limits = limits
        self.blocks = blocks
        self.token_budget = limits.max_num_batched_tokens
        self.rows: list[Row] = []
        self.admitted: list[Admission] = []
        self.preempted: list[Preemption] = []
        self.ignored: list[Ignored] = []
        self.ended: list[tuple[Sequence, str]] = []  # ignored sequences, with the reason
        self.blocked_by: BlockedBy | None = None
        self.prefilling = prefilling  # running sequences whose prefill is unfinished, those admitted here included
        self._queue = queue
        self._running = running
        self._victims = victims

    # --- what there is ---

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def running(self) -> list[Sequence]:
        """The running sequences in order of admission, as they are now. `reserve` may preempt later ones."""
        return list(self._running.values())

    def head(self) -> Sequence | None:
        """The waiting sequence to look at next."""
        return self._queue.head(self.now_ns)

    def num_partial_prefills(self) -> int:
        """Running sequences whose prefill this step leaves unfinished."""
        finishing = sum(
            1
            for seq, start, num_tokens in self.rows
            if seq.seq_id in self.prefilling and start + num_tokens == len(seq.tokens)
        )
        return len(self.prefilling) - finishing

    # --- what can be done ---

    def schedule(self, seq: Sequence, num_tokens: int) -> None:
        """Computes the sequence's next `num_tokens` tokens in this step. Their blocks must be reserved."""
        start = seq.num_computed_tokens
        self.rows.append((seq, start, num_tokens))
        self.token_budget -= num_tokens
        self.blocks.scheduled(seq, start + num_tokens)

    def decode(self, seqs: list[Sequence]) -> None:
        """One token for each of these decoding sequences, in order, while the budget lasts; preempts where it must.

        The same as `reserve(seq, 1)` and `schedule(seq, 1)` for each, in one pass: a step's cost lies here.
        """
        append, publishes, block_size = self.rows.append, self.blocks.publishes_at_allocation, self.blocks.block_size
        for seq in seqs:
            if not self.token_budget:
                return
            start = seq.num_computed_tokens
            if start >= seq.num_slots and not self.reserve(seq, 1):
                continue
            self.token_budget -= 1
            append((seq, start, 1))
            if publishes and not (start + 1) % block_size:
                self.blocks.scheduled(seq, start + 1)

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Blocks for the next `num_tokens` tokens of a running sequence, preempting victims until they fit.

        False: the sequence itself was preempted, now or as an earlier victim of this step.
        """
        if seq.state is not SequenceState.RUNNING:
            return False
        wanted = seq.num_computed_tokens + num_tokens
        while wanted > seq.num_slots and not self.blocks.grow(seq, wanted):
            victim = self._victims.choose(self._running)
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def preempt(self, seq: Sequence) -> None:
        """Takes a running sequence's blocks away; it will be computed again from its first token."""
        for index, (other, start, num_tokens) in enumerate(self.rows):
            if other is seq:  # a victim that was scheduled already gives its share back
                self.token_budget += num_tokens
                self.blocks.withdraw(seq, start)
                del self.rows[index]
                break
        self.preempted.append(
            Preemption(seq.seq_id, seq.request.request_id, PreemptionMode.RECOMPUTE, seq.num_computed_tokens)
        )
        seq.num_preemptions += 1
        seq.num_computed_tokens = 0
        self.blocks.free(seq)
        del self._running[seq.seq_id]
        self.prefilling.pop(seq.seq_id, None)
        seq.enter(SequenceState.WAITING)
        self._queue.push_preempted(seq)

    def can_admit(self, seq: Sequence, num_tokens: int, hit: PrefixHit) -> Verdict:
        """Whether the waiting sequence's first `num_tokens` tokens get blocks. NEVER ends it as ignored, at once."""
        verdict = self.blocks.can_admit(seq, num_tokens, hit, is_idle=not self._running)
        if verdict is Verdict.NEVER:
            self.ignore(
                seq,
                f"{len(seq.tokens)} tokens need {self.blocks.num_blocks_for(len(seq.tokens))} KV blocks beside a "
                f"watermark of {self.blocks.watermark_blocks}, and the pool has {self.blocks.num_gpu_blocks}",
            )
        return verdict

    def admit(self, seq: Sequence, hit: PrefixHit, num_tokens: int) -> None:
        """Takes a waiting sequence into the running ones and computes `num_tokens` tokens after its hit."""
        self._queue.remove(seq)
        is_resumed = seq.num_preemptions > 0
        self.blocks.admit(seq, hit.num_tokens + num_tokens, hit)
        seq.enter(SequenceState.RUNNING)
        self._running[seq.seq_id] = self.prefilling[seq.seq_id] = seq
        seq.num_computed_tokens = hit.num_tokens
        self.admitted.append(Admission(seq.seq_id, seq.request.request_id, hit.num_tokens, is_resumed))
        self.schedule(seq, num_tokens)

    def ignore(self, seq: Sequence, reason: str) -> None:
        """Ends a waiting sequence that can never run."""
        self._queue.remove(seq)
        self.ignored.append(Ignored(seq.seq_id, seq.request.request_id, reason))
        self.ended.append((seq, reason))

    def end_rejected(self, seq: Sequence, reason: str) -> None:
        """Reports a sequence that was refused before it was queued."""
        self.ignored.append(Ignored(seq.seq_id, seq.request.request_id, reason))
        self.ended.append((seq, reason))

    def blocked(self, reason: BlockedBy) -> None:
        """Records what keeps the head of the queue out of this step."""
        self.blocked_by = reason
