"""The policies that a configuration can name, and their construction.

A user's own class is given as {_target_: module.Class}; this file needs no change for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

from experiments.configuration.foresight import foresight_of
from testbed.blocks import eviction
from testbed.errors import ConfigError, TestbedError
from testbed.foreign_text import nearest, unknown
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

GROUPS: Mapping[str, Mapping[str, Callable[[], Any]]] = {  # key of a policy -> its names, and what makes each
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
GOES_BY: Mapping[str, Mapping[str, str]] = {  # policies that go by one of testbed.traces.classes.ClassFields
    "scheduler.queue_order": {"priority": "priority", "edf": "deadline", "vtc": "tenant"},
    "scheduler.victim": {"lowest_priority": "priority"},
}


def make_policy(key: str, choice: Any) -> Any:
    """Makes a policy from its name, or a user's class from `{_target_: …, …}`. Raises ConfigError with the valid names.

    A user's object must have the public methods that all named policies of the group share.
    """
    named = GROUPS[key]
    if isinstance(choice, dict):
        if "_target_" not in choice:
            found = ", ".join(map(str, choice)) or "nothing"
            raise ConfigError(f"{key} has {found} where a class is named by _target_: {{_target_: your.Class}}")
        policy = instantiate(key, choice)
        wanted = set.intersection(*(set(_methods(example())) for example in named.values()))
        missing = sorted(name for name in wanted if not hasattr(policy, name))
        if missing:
            raise ConfigError(f"{key}: {choice['_target_']} lacks {', '.join(missing)}; see docs/extending.md")
        if key != "scheduler.oracle":
            _refuse_foresight(key, str(choice["_target_"]), policy)
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
    return next((name for name, named in GROUPS[key].items() if named is made_by), None)


def _refuse_foresight(key: str, target: str, policy: Any) -> None:
    """Raises ConfigError if a user's class reads the future length of an output."""
    read = foresight_of(resolve_name(target), type(policy))
    if read:
        instead = "ask context.oracle.predict(seq) instead, and choose what it may know with scheduler.oracle"
        if key == "backend.router":
            instead = "go by the prompt, and by what the replicas show"
        raise ConfigError(
            f"{key}: {target} reads {read}, which says how long an output will be, as no scheduler knows; {instead}"
        )


def _methods(example: Any) -> list[str]:
    """Returns the names of a policy's public methods, and __len__ and __iter__ if it has them."""
    special = ("__len__", "__iter__")
    cls = type(example)
    names = [name for name in dir(cls) if name in special or name[0] != "_"]
    return [name for name in names if callable(getattr(cls, name))]


def missing_name(target: str) -> str:
    """Returns the error text if a class's module does not exist or lacks the name; empty for any other problem."""
    module, _, name = target.rpartition(".")
    top = module.partition(".")[0]
    if top and top not in sys.modules and find_spec(top) is None:
        return f"there is no module {top!r} in {os.getcwd()}, or where PYTHONPATH says; run testbed where {top}.py lies"
    there = sys.modules.get(module)
    if there is None or hasattr(there, name):
        return ""
    file = str(getattr(there, "__file__", None) or "Python's own")
    if os.path.exists(f"{top}.py") and os.path.abspath(f"{top}.py") != file:
        return f"{module!r} is a module that is there already ({file}); give your {top}.py another name"
    return f"{module} has no {name!r}; {nearest(name, [*vars(there)])}".rstrip("; ")


def _import_failure(error: BaseException | None) -> str:
    """Returns why a user's module cannot be imported: a syntax error or a missing module. Empty for other failures."""
    while error is not None:
        if isinstance(error, SyntaxError):
            return f"{error.filename}:{error.lineno}: {error.msg}; mend it there"
        if isinstance(error, ModuleNotFoundError):
            return f"there is no module {error.name!r}; install it, or correct the import"
        error = error.__cause__ or error.__context__
    return ""


def instantiate(key: str, node: dict[str, Any], **arguments: Any) -> Any:
    """Makes the object named by `_target_`. Raises ConfigError with a one-line message."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as hydra_instantiate

    try:
        return hydra_instantiate({key: value for key, value in node.items() if key != "name"}, **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, TestbedError):
            raise error.__cause__ from None
        reason = " ".join(str(error.__cause__ or error).split()).partition(" Are you sure that module")[0]
        reason = missing_name(str(node.get("_target_"))) or _import_failure(error) or reason
        raise ConfigError(f"{key}: cannot make {node.get('_target_')!r}: {reason}") from None
    except SystemExit as error:
        raise ConfigError(f"{key}: {node.get('_target_')!r} ends Python (SystemExit {error}); mend it") from None
