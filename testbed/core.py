"""What every step works on: queues, policies, and the decodes kept from step to step. Owned by the scheduler."""

from __future__ import annotations

from testbed.blocks.manager import BlockManager
from testbed.decode_batch import DecodeBatch
from testbed.policies.admission import Admission
from testbed.policies.config import Limits
from testbed.policies.preemption import PreemptionChoice
from testbed.policies.queue_order import WaitingQueue
from testbed.policies.victim import VictimChoice
from testbed.sequence import Sequence


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
