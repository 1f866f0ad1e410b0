"""Every policy that a random configuration draws from, by name, and a few that only a test would write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from testbed.blocks import eviction
from testbed.blocks.keys import TokenKeys
from testbed.core.plan import BatchShape
from testbed.core.sequence import Sequence
from testbed.policies import admission, oracle, orders, preemption, victim
from testbed.policies.compositions.decode_first import DecodeFirst
from testbed.policies.compositions.iteration_level import IterationLevel
from testbed.policies.compositions.prefill_decode_split import PrefillDecodeSplit
from testbed.policies.compositions.prefill_first import PrefillFirst
from testbed.policies.compositions.static import Static
from testbed.policies.compositions.unified import Unified
from testbed.policies.cost_aware import CostAware
from testbed.policies.queue_order import FCFS


class OldestFirst:
    """A user's own victim choice: it may take what was scheduled in the same step already, and it spares nobody."""

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        return next(iter(running.values()))


class WeakKeys(TokenKeys):
    """The keys of the product, from a hash of only `num_values` values: collisions everywhere."""

    def __init__(self, block_size: int, num_values: int) -> None:
        super().__init__(block_size, are_unique=False)
        self._num_values = num_values

    def key_of(self, content: bytes, previous_key: int) -> int:
        return super().key_of(content, previous_key) % self._num_values


class Prices:
    """An estimator whose answers favour now the one mode of preemption, now the other."""

    name = "prices of a test"

    def step_ns(self, shape: BatchShape) -> int:
        raise AssertionError("no policy of ours asks")

    def recompute_ns(self, start: int, num_tokens: int) -> int:
        return num_tokens * (10 + start)

    def swap_ns(self, num_blocks: int) -> int:
        return 40 + 25 * num_blocks


Factory = Callable[[], Any]
COMPOSITIONS: Mapping[str, Callable[..., Any]] = {
    "unified": Unified,
    "prefill_first": PrefillFirst,
    "decode_first": DecodeFirst,
    "prefill_decode_split": PrefillDecodeSplit,
    "iteration_level": IterationLevel,
    "static": Static,
}
OPTIONS: Mapping[str, tuple[str, ...]] = {  # switches of a composition, each drawn
    "unified": ("threshold_when_alone",),
    "prefill_first": ("ignores_oversize_resumed", "ignored_end_the_step", "sorts_by_arrival"),
    "decode_first": ("admits_after_preemption", "in_running_order"),
    "prefill_decode_split": ("caps_running",),
}
QUEUES: Mapping[str, Factory] = {
    "fcfs": FCFS,
    "lcfs": orders.lcfs,
    "random": orders.random_order,
    "priority": orders.priority,
    "priority, ageing": lambda: orders.priority(ageing_per_s=0.5),
    "priority, preemptive": lambda: orders.priority(preemptive=True),
    "sjf": orders.shortest_job,
    "sjf by output": lambda: orders.shortest_job("output"),
    "ljf": orders.longest_job,
    "srpt": orders.shortest_remaining,
    "srpt, preemptive": lambda: orders.shortest_remaining(preemptive=True),
    "hrrn": orders.HighestResponseRatioNext,
    "lpm": lambda: orders.longest_prefix(max_waiting=5, max_cached_tokens=4, duplicate_tokens=4),
    "dfs": lambda: orders.depth_first(max_waiting=5, tree="waiting"),
    "dfs, cached": lambda: orders.depth_first(tree="cached"),
    "edf": orders.earliest_deadline,
    "edf, preemptive": lambda: orders.earliest_deadline(preemptive=True),
    "vtc": orders.VirtualTokenCounter,
    "mlfq": lambda: orders.MultiLevelFeedbackQueue(num_levels=3, quantum=8, promote_after_s=20.0),
    "mlfq, no promotion": lambda: orders.MultiLevelFeedbackQueue(quantum=4, promote_after_s=None),
}
ADMISSIONS: Mapping[str, Factory] = {
    "watermark": admission.Watermark,
    "no_evict": admission.NoEvict,
    "no_evict by oracle": lambda: admission.NoEvict("oracle"),
    "max_utilization": admission.MaxUtilization,
    "future_peak": lambda: admission.FuturePeak(0.1),
    "tokens": lambda: admission.MaxRunningTokens(25),
    "requests": lambda: admission.MaxRunningRequests(2),
    "all": lambda: admission.All([admission.MaxUtilization(), admission.MaxRunningRequests(3)]),
}
PREEMPTIONS: Mapping[str, Factory] = {
    "auto": preemption.Auto,
    "recompute": preemption.Recompute,
    "swap": preemption.Swap,
    "cheaper": preemption.Cheaper,
}
VICTIMS: Mapping[str, Factory] = {
    "most_recently_admitted": victim.MostRecentlyAdmitted,
    "last_in_queue_order": victim.LastInQueueOrder,
    "least_progress": victim.LeastProgress,
    "most_blocks": victim.MostBlocks,
    "longest_remaining": victim.LongestRemaining,
    "lowest_priority": victim.LowestPriority,
    "oldest first": OldestFirst,
}
ORACLES: Mapping[str, Factory] = {
    "none": oracle.NoOracle,
    "perfect": oracle.Perfect,
    "noisy": oracle.Noisy,
    "binned": lambda: oracle.Binned(first=4),
}
EVICTIONS: Mapping[str, Factory] = {
    "lru": eviction.LRU,
    "lru by last step": eviction.LRUByLastStep,
    "fifo": eviction.FIFO,
    "lfu": eviction.LFU,
    "cost_aware": CostAware,
}
NEED_AN_ORACLE = ("sjf by output", "srpt", "srpt, preemptive", "no_evict by oracle", "longest_remaining")
