"""Queue orders other than FCFS. Each is a `testbed.core.interfaces.WaitingQueue`.

An order whose key does not change while a sequence waits is a function that returns a `KeyedQueue`. One that is
arranged as a whole is a function that returns a `WindowedQueue`. The others are classes. Ties are always broken by
`seq_id`. No order reads a sequence's true output length: predictions come from the context's oracle.
"""

from testbed.policies.orders.fair_share import VirtualTokenCounter
from testbed.policies.orders.feedback import MultiLevelFeedbackQueue
from testbed.policies.orders.job_size import longest_job, shortest_job, shortest_remaining
from testbed.policies.orders.keyed import KeyedQueue, earliest_deadline, lcfs, priority, random_order
from testbed.policies.orders.prefix import depth_first, longest_prefix
from testbed.policies.orders.response_ratio import HighestResponseRatioNext
from testbed.policies.orders.window import WindowedQueue

__all__ = [
    "HighestResponseRatioNext",
    "KeyedQueue",
    "MultiLevelFeedbackQueue",
    "VirtualTokenCounter",
    "WindowedQueue",
    "depth_first",
    "earliest_deadline",
    "lcfs",
    "longest_job",
    "longest_prefix",
    "priority",
    "random_order",
    "shortest_job",
    "shortest_remaining",
]
