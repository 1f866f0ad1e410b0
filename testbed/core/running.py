"""What every step works on: queues, policies, and the decodes kept from step to step. Owned by the scheduler."""

from __future__ import annotations

from testbed.blocks.manager import BlockManager
from testbed.core.decode_batch import DecodeBatch
from testbed.core.sequence import Sequence
from testbed.policies.admission import Admission
from testbed.policies.config import Limits
from testbed.policies.preemption import PreemptionChoice
from testbed.policies.queue_order import WaitingQueue
from testbed.policies.victim import VictimChoice


class Core:
    """What a step works on: queues and policies. Owned by the scheduler; a step changes it through its operations."""

    __slots__ = (
        "admission",
        "blocks",
        "decodes",
        "is_composition_steady",
        "is_steady",
        "limits",
        "next_seq_id",
        "num_admissions",
        "num_groups",
        "num_long_waiting",
        "num_steps",
        "preemption",
        "prefilling",
        "queue",
        "running",
        "swapped",
        "victims",
        "yields",
    )  # fmt: skip

    def __init__(
        self,
        limits: Limits,
        blocks: BlockManager,
        queue: WaitingQueue,
        victims: VictimChoice,
        admission: Admission,
        preemption: PreemptionChoice,
        *,
        is_composition_steady: bool = False,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.queue = queue
        self.victims = victims
        self.admission = admission
        self.preemption = preemption
        self.is_composition_steady = is_composition_steady  # decides by the state alone, and by the time not at all
        self.yields = getattr(queue, "yields", None)
        # whether only arrivals and ends change who is first in the queue
        self.is_steady = not (
            getattr(queue, "is_time_dependent", True)
            or hasattr(queue, "served")
            or (self.yields is not None and getattr(queue, "is_preemptive", True))
        )
        self.running: dict[int, Sequence] = {}  # by unit id, in running order
        self.swapped: dict[int, Sequence] = {}  # by unit id, in the order swapped out
        self.prefilling: dict[int, Sequence] = {}  # running sequences whose prefill is unfinished, by seq_id
        self.decodes = DecodeBatch(blocks.block_size, self.running)
        self.next_seq_id = 0
        self.num_groups = 0  # running units that are, or will be, several sequences
        self.num_long_waiting = 0  # waiting sequences with a long prefill before them
        self.num_admissions = 0
        self.num_steps = 0

    # --- the running ---

    def start(self, seq: Sequence) -> None:
        """A sequence runs, and those with it, behind all others."""
        self.num_admissions += 1
        self.running[seq.unit_id] = seq
        self.num_groups += seq.group is not None
        for one in seq.together:
            one.admission = self.num_admissions
            if one.is_prefilling:
                self.prefilling[one.seq_id] = one

    def stop(self, seq: Sequence) -> None:
        """The sequence runs no more, nor do those with it."""
        del self.running[seq.unit_id]
        self.prefilling.pop(seq.seq_id, None)
        self.num_groups -= seq.group is not None
        for one in seq.together:
            if one.is_in_step:
                self.decodes.leave(one)

    def stop_one(self, seq: Sequence) -> None:
        """One sequence runs no more: its siblings go on."""
        self.prefilling.pop(seq.seq_id, None)
        if seq.is_in_step:
            self.decodes.leave(seq)
        if seq.siblings is None or len(seq.siblings) == 1:
            del self.running[seq.unit_id]
            self.num_groups -= seq.group is not None
        else:
            left = [one for one in seq.siblings if one is not seq]
            for one in left:
                one.siblings = left if len(left) > 1 else None
            self.running[seq.unit_id] = left[0]

    def reorder(self, seqs: list[Sequence]) -> None:
        """Gives the running sequences another order; `seqs` are all of them."""
        assert len(seqs) == len(self.running)
        if seqs == list(self.running.values()):
            return
        self.running.clear()
        for seq in seqs:
            self.running[seq.unit_id] = seq
            self.num_admissions += 1
            for one in seq.together:
                one.admission = self.num_admissions
        self.decodes.reordered()

    # --- the waiting ---

    def push(self, seq: Sequence) -> None:
        """A new sequence waits."""
        self.num_long_waiting += self.is_long(seq)
        self.queue.push(seq)

    def push_back(self, seq: Sequence) -> None:
        """A sequence that was running, or was passed over, waits again."""
        self.num_long_waiting += self.is_long(seq)
        self.queue.push_preempted(seq)

    def remove(self, seq: Sequence) -> None:
        """The sequence waits no more."""
        self.num_long_waiting -= self.is_long(seq)
        self.queue.remove(seq)

    def is_long(self, seq: Sequence) -> bool:
        """Whether more tokens are to be prefilled than the limit for long ones says (0: 4 % of max_model_len)."""
        limits = self.limits
        threshold = limits.long_prefill_token_threshold or limits.max_model_len * 4 // 100
        return seq.num_tokens - seq.num_computed_tokens > threshold

    def check_invariants(self, *, is_between_steps: bool) -> None:
        """What is kept beside the running sequences agrees with them."""
        self.decodes.check_invariants()
        assert self.num_groups == sum(1 for seq in self.running.values() if seq.group is not None)
        if is_between_steps:
            prefilling = [seq.seq_id for seq in self.running.values() if seq.is_prefilling]
            assert sorted(self.prefilling) == sorted(prefilling), "unfinished prefills are kept apart"
