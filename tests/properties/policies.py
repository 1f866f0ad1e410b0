"""Every policy that a random configuration draws from: those that have names, some with smaller bounds; others of their
parameters; and a few that only a test would write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from experiments.configuration.policies import POLICIES
from testbed.blocks import eviction
from testbed.blocks.keys import TokenKeys
from testbed.core.plan import BatchShape
from testbed.core.sequence import Sequence
from testbed.policies import admission, oracle, orders


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

    def step_ns(self, shape: BatchShape) -> int:
        raise AssertionError("no policy of ours asks")

    def recompute_ns(self, start: int, num_tokens: int) -> int:
        return num_tokens * (10 + start)

    def swap_ns(self, num_blocks: int) -> int:
        return 40 + 25 * num_blocks


Factory = Callable[[], Any]


def drawn_from(key: str, others: Mapping[str, Factory]) -> Mapping[str, Factory]:
    """The policies that have names, each followed by those of other parameters, which begin with its name; then the
    rest of the others. Kept in this order, as tests have seeds of worlds that are drawn from it."""
    every = {**POLICIES[key], **others}
    ordered = [
        one for name in POLICIES[key] for one in every if one == name or one.startswith((f"{name},", f"{name} "))
    ]
    return {name: every[name] for name in dict.fromkeys([*ordered, *every])}


COMPOSITIONS: Mapping[str, Callable[..., Any]] = POLICIES["scheduler.composition"]
OPTIONS: Mapping[str, tuple[str, ...]] = {  # switches of a composition, each drawn
    "unified": ("threshold_when_alone",),
    "prefill_first": ("ignores_oversize_resumed", "ignored_end_the_step", "sorts_by_arrival"),
    "decode_first": ("admits_after_preemption", "in_running_order"),
    "prefill_decode_split": ("caps_running",),
}
QUEUES = drawn_from(
    "scheduler.queue_order",
    {
        "priority, ageing": lambda: orders.priority(ageing_per_s=0.5),
        "priority, preemptive": lambda: orders.priority(preemptive=True),
        "sjf by output": lambda: orders.shortest_job("output"),
        "srpt, preemptive": lambda: orders.shortest_remaining(preemptive=True),
        "lpm": lambda: orders.longest_prefix(max_waiting=5, max_cached_tokens=4, duplicate_tokens=4),
        "dfs": lambda: orders.depth_first(max_waiting=5, tree="waiting"),
        "dfs, cached": lambda: orders.depth_first(tree="cached"),
        "edf, preemptive": lambda: orders.earliest_deadline(preemptive=True),
        "mlfq": lambda: orders.MultiLevelFeedbackQueue(num_levels=3, quantum=8, promote_after_s=20.0),
        "mlfq, no promotion": lambda: orders.MultiLevelFeedbackQueue(quantum=4, promote_after_s=None),
    },
)
ADMISSIONS = drawn_from(
    "scheduler.admission",
    {
        "no_evict by oracle": lambda: admission.NoEvict("oracle"),
        "future_peak": lambda: admission.FuturePeak(0.1),
        "tokens": lambda: admission.MaxRunningTokens(25),
        "requests": lambda: admission.MaxRunningRequests(2),
        "all": lambda: admission.All([admission.MaxUtilization(), admission.MaxRunningRequests(3)]),
    },
)
PREEMPTIONS = POLICIES["scheduler.preemption"]
VICTIMS = drawn_from("scheduler.victim", {"oldest first": OldestFirst})
ORACLES = drawn_from("scheduler.oracle", {"binned": lambda: oracle.Binned(first=4)})
NAMED_EVICTIONS = tuple(POLICIES["cache.eviction"])
EVICTIONS = drawn_from("cache.eviction", {"lru by last step": eviction.LRUByLastStep})
NEED_AN_ORACLE = ("sjf by output", "srpt", "srpt, preemptive", "no_evict by oracle", "longest_remaining")
