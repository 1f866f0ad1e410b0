"""The policies that a configuration can name, and their construction.

A user's own class is given as {_target_: module.Class}; this file needs no change for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from pkgutil import resolve_name
from typing import Any

from experiments.configuration.own_class import has_method, instantiate
from experiments.configuration.own_source import foresight_of
from testbed.blocks import eviction
from testbed.composites import with_parts
from testbed.errors import ConfigError
from testbed.foreign_text import unknown
from testbed.policies import admission, oracle, orders, preemption, victim
from testbed.policies.compositions.decode_first import DecodeFirst
from testbed.policies.compositions.iteration_level import IterationLevel
from testbed.policies.compositions.prefill_decode_split import PrefillDecodeSplit
from testbed.policies.compositions.prefill_first import PrefillFirst
from testbed.policies.compositions.static import Static
from testbed.policies.compositions.unified import Unified
from testbed.policies.cost_aware import CostAware
from testbed.policies.queue_order import FCFS
from testbed.routing.routers import ROUTERS

POLICIES: Mapping[str, Mapping[str, Callable[[], Any]]] = {  # key of a policy -> its names, and what makes each
    "scheduler.composition": {
        "unified": Unified,
        "prefill_first": PrefillFirst,
        "decode_first": DecodeFirst,
        "prefill_decode_split": PrefillDecodeSplit,
        "iteration_level": IterationLevel,
        "static": Static,
    },
    "scheduler.queue_order": {
        "fcfs": FCFS,
        "lcfs": orders.lcfs,
        "random": orders.random_order,
        "priority": orders.priority,
        "sjf": orders.shortest_job,
        "ljf": orders.longest_job,
        "srpt": orders.shortest_remaining,
        "hrrn": orders.HighestResponseRatioNext,
        "lpm": orders.longest_prefix,
        "dfs": orders.depth_first,
        "edf": orders.earliest_deadline,
        "vtc": orders.VirtualTokenCounter,
        "mlfq": orders.MultiLevelFeedbackQueue,
    },
    "scheduler.admission": {
        "watermark": admission.Watermark,
        "no_evict": admission.NoEvict,
        "max_utilization": admission.MaxUtilization,
        "future_peak": admission.FuturePeak,
    },
    "scheduler.preemption": {
        "auto": preemption.Auto,
        "recompute": preemption.Recompute,
        "swap": preemption.Swap,
        "cheaper": preemption.Cheaper,
    },
    "scheduler.victim": {
        "most_recently_admitted": victim.MostRecentlyAdmitted,
        "last_in_queue_order": victim.LastInQueueOrder,
        "least_progress": victim.LeastProgress,
        "most_blocks": victim.MostBlocks,
        "longest_remaining": victim.LongestRemaining,
        "lowest_priority": victim.LowestPriority,
    },
    "scheduler.oracle": {
        "none": oracle.NoOracle,
        "perfect": oracle.Perfect,
        "noisy": oracle.Noisy,
        "binned": oracle.Binned,
    },
    "cache.eviction": {"lru": eviction.LRU, "fifo": eviction.FIFO, "lfu": eviction.LFU, "cost_aware": CostAware},
    "backend.router": ROUTERS,
}


def make_policy(key: str, choice: Any) -> Any:
    """Makes a policy from its name, or a user's class from `{_target_: …, …}`. Raises ConfigError with the valid names.

    A user's object must have the public methods that all named policies of the group share.
    """
    named = POLICIES[key]
    if isinstance(choice, dict):
        if "_target_" not in choice:
            found = ", ".join(map(str, choice)) or "nothing"
            raise ConfigError(f"{key} has {found} where a class is named by _target_: {{_target_: your.Class}}")
        policy = instantiate(key, choice)
        wanted = set.intersection(*(set(_methods(example())) for example in named.values()))
        target = str(choice["_target_"])
        if policy is None:
            raise ConfigError(f"{key}: {target} returned None; expected a policy")
        lacking = (
            name for name in sorted(wanted) if _is_abstract(policy, name) or not has_method(policy, name, key, target)
        )
        if missing := list(lacking):
            raise ConfigError(f"{key}: {target} lacks {', '.join(missing)}; see docs/extending.md")
        shipped = next(iter(named.values()))()
        for name in sorted(wanted):
            _check_parameters(key, f"{target}.{name}", getattr(policy, name), getattr(shipped, name))
        if key != "scheduler.oracle":
            _refuse_foresight(key, target, policy)
        return policy
    if not isinstance(choice, str) or choice not in named:
        names = [*(["auto"] if key == "scheduler.victim" else []), *named]
        raise ConfigError(unknown(f"{key} is {choice!r}", str(choice), names) + ", or {_target_: your.Class}")
    return named[choice]()


def shipped_name(key: str, choice: Any) -> str | None:
    """Returns the name of a valid choice, which may be given as the class of that name; None for a user's own class."""
    if not isinstance(choice, dict):
        return str(choice)
    made_by = resolve_name(str(choice["_target_"]))
    return next((name for name, named in POLICIES[key].items() if named is made_by), None)


def _refuse_foresight(key: str, target: str, policy: Any) -> None:
    """Raises ConfigError if a user's class, or that of one of its parts, reads the future length of an output."""
    named: dict[str, tuple[Any, ...]] = {target: (resolve_name(target), type(policy))}
    named |= {f"{type(one).__module__}.{type(one).__qualname__}": (type(one),) for one in with_parts([policy])[1:]}
    for name, made in named.items():
        if read := foresight_of(*made):
            instead = "ask context.oracle.predict(seq) instead, and choose what it may know with scheduler.oracle"
            if key == "backend.router":
                instead = "go by the prompt, and by what the replicas show"
            raise ConfigError(
                f"{key}: {name} reads {read}, which says how long an output will be, as no scheduler knows; {instead}"
            )


def _check_parameters(key: str, name: str, method: Any, shipped: Any) -> None:
    """Raises ConfigError if a user's method cannot be called as the shipped one."""
    wanted = [*signature(shipped).parameters]
    try:
        signature(method, follow_wrapped=False).bind(*wanted)  # a decorator may add arguments
    except ValueError:
        return  # C code that does not say
    except TypeError as error:
        parameters = ", ".join(("self", *wanted))
        raise ConfigError(f"{key}: {name} must take ({parameters}): {error}; see docs/extending.md") from None


def _is_abstract(policy: Any, name: str) -> bool:
    """Whether an eviction has a method from our base class only; compiled, that class is no obstacle to making one."""
    return getattr(type(policy), name, policy) is getattr(eviction.Evictor, name, None)


def _methods(example: Any) -> list[str]:
    """Returns the names of a policy's public methods, and __len__ and __iter__ if it has them."""
    special = ("__len__", "__iter__")
    cls = type(example)
    names = [name for name in dir(cls) if name in special or name[0] != "_"]
    return [name for name in names if callable(getattr(cls, name))]
