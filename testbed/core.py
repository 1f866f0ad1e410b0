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
        "limits",
        "num_admissions",
        "num_groups",
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
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.queue = queue
        self.victims = victims
        self.admission = admission
        self.preemption = preemption
        self.yields = getattr(queue, "yields", None)
        self.running: dict[int, Sequence] = {}  # by unit id, in running order
        self.swapped: dict[int, Sequence] = {}  # by unit id, in the order swapped out
        self.prefilling: dict[int, Sequence] = {}  # running sequences whose prefill is unfinished, by seq_id
        self.decodes = DecodeBatch(blocks.block_size, self.running)
        self.num_groups = 0  # running units that are, or will be, several sequences
        self.num_admissions = 0
        self.num_steps = 0
