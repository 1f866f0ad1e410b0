"""Random but valid configurations of a core, and random requests. Everything is drawn from one `random.Random`."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from xxhash import xxh64_intdigest

from testbed.blocks import eviction
from testbed.blocks.config import KVRules
from testbed.blocks.keys import TokenKeys
from testbed.blocks.manager import BlockManager
from testbed.policies import admission, oracle, orders, preemption, victim
from testbed.policies.compositions.decode_first import DecodeFirst
from testbed.policies.compositions.iteration_level import IterationLevel
from testbed.policies.compositions.prefill_decode_split import PrefillDecodeSplit
from testbed.policies.compositions.prefill_first import PrefillFirst
from testbed.policies.compositions.static import Static
from testbed.policies.compositions.unified import Unified
from testbed.policies.config import Limits
from testbed.policies.context import PolicyContext, bind
from testbed.policies.queue_order import FCFS
from testbed.request import Request, SamplingParams
from testbed.scheduler import Scheduler
from testbed.sequence import Sequence

EOS = 1
VOCAB_SIZE = 11
NS_PER_S = 1_000_000_000
SCHEDULER_FILES = Path(__file__).parents[2] / "experiments" / "conf" / "scheduler"


class OldestFirst:
    """A user's own victim choice: it may take what was scheduled in the same step already, and it spares nobody."""

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        return next(iter(running.values()))


class WeakKeys(TokenKeys):
    """The keys of the product, from a hash of only `num_values` values: collisions everywhere."""

    def __init__(self, block_size: int, num_values: int) -> None:
        super().__init__(block_size)
        self._num_values = num_values

    def extend(self, keys: list[int], contents: list[bytes], tokens: array[int], num_blocks: int, salt: str) -> None:
        while len(keys) < num_blocks:
            previous = keys[-1] if keys else xxh64_intdigest(salt.encode())
            key, content = self.next(previous, tokens, len(keys))
            keys.append(key)
            contents.append(content if contents else salt.encode() + content)

    def next(self, previous_key: int, tokens: array[int], index: int) -> tuple[int, bytes]:
        key, content = super().next(previous_key, tokens, index)
        return key % self._num_values, content


class Prices:
    """An estimator whose answers favour now the one mode of preemption, now the other."""

    name = "prices of a test"

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
    "dfs": lambda: orders.depth_first(max_waiting=5),
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
    "cost_aware": eviction.CostAware,
}
NEED_AN_ORACLE = ("sjf by output", "srpt", "srpt, preemptive", "no_evict by oracle", "longest_remaining")
GROWING_NUM_TOKENS = (1, 2, 5, 16, 64)


@dataclass(frozen=True)
class Setup:
    """One configuration of a core."""

    composition: str = "unified"
    options: Mapping[str, bool] = field(default_factory=dict)
    rules: KVRules = field(default_factory=KVRules)
    limits: Limits = field(default_factory=lambda: Limits(8, 16, 64, 0, 1))
    block_size: int = 4
    num_blocks: int = 16
    num_cpu_blocks: int = 16
    watermark: float = 0.0
    caching: bool = True
    num_hashes: int | None = None  # None: the real hash; else that many values
    lookahead: int = 0
    window: int | None = None
    queue: str = "fcfs"
    admission: str = "watermark"
    preemption: str = "auto"
    victim: str = "most_recently_admitted"
    oracle: str = "none"
    eviction: str = "lru"

    def scheduler(self) -> Scheduler:
        """As experiments/build.py wires it."""
        evicts = EVICTIONS[self.eviction]()
        keys = TokenKeys(self.block_size) if self.num_hashes is None else WeakKeys(self.block_size, self.num_hashes)
        blocks = BlockManager(
            block_size=self.block_size,
            num_gpu_blocks=self.num_blocks,
            num_cpu_blocks=self.num_cpu_blocks,
            watermark=self.watermark,
            rules=self.rules,
            eviction=evicts,
            key_source=keys if self.caching else None,
            lookahead_slots=self.lookahead,
            sliding_window=self.window,
        )
        queue, allows, mode, victims, believes = (
            QUEUES[self.queue](), ADMISSIONS[self.admission](), PREEMPTIONS[self.preemption](), VICTIMS[self.victim](),
            ORACLES[self.oracle](),
        )  # fmt: skip
        context = PolicyContext(blocks, self.limits, believes, Prices(), 7)
        for policy in (believes, evicts, queue, allows, mode, victims):
            bind(policy, context)
        if hasattr(victims, "bind_queue"):
            victims.bind_queue(queue)
        return Scheduler(
            limits=self.limits,
            blocks=blocks,
            composition=COMPOSITIONS[self.composition](**self.options),
            queue=queue,
            victims=victims,
            admission=allows,
            preemption=mode,
            eos_token_id=EOS,
            record_decisions=True,
        )

    @property
    def ends_alone(self) -> bool:
        """Whether first come, first served and the default victim promise that everything ends."""
        return self.queue == "fcfs" and self.victim == "most_recently_admitted"

    @property
    def ids_decide(self) -> bool:
        """Whether a physical block id may decide: what is evicted first among equals, as vLLM 0.8.5 leaves it."""
        return self.eviction == "lru by last step"

    def __repr__(self) -> str:
        """What differs from the defaults."""
        return f"Setup({', '.join(_changes(self))})"


def _changes(config: Any) -> list[str]:
    default = type(config)() if not isinstance(config, Limits) else None
    changes = []
    for item in fields(config):
        value = getattr(config, item.name)
        if default is None or value != getattr(default, item.name):
            shown = f"KVRules({', '.join(_changes(value))})" if isinstance(value, KVRules) else repr(value)
            changes.append(f"{item.name}={shown}")
    return changes


# --- drawing ---


@cache
def presets() -> dict[str, tuple[str, dict[str, bool], KVRules, float | None]]:
    """Composition, its options, KV rules and watermark of each scheduler that the product ships."""
    found = {}
    classes = {f"{made.__module__}.{made.__name__}": name for name, made in COMPOSITIONS.items()}  # type: ignore[attr-defined]
    for file in sorted(SCHEDULER_FILES.glob("*.yaml")):
        values = yaml.safe_load(file.read_text())
        chosen = values.get("composition", "unified")
        options = {}
        if isinstance(chosen, dict):
            options = {key: value for key, value in chosen.items() if key != "_target_"}
            assert import_module(chosen["_target_"].rpartition(".")[0])
            chosen = classes[chosen["_target_"]]
        found[file.stem] = chosen, options, KVRules(**values.get("kv_rules", {})), values.get("watermark")
    return found


def random_rules(rng: random.Random) -> KVRules:
    """Any value of each field, as far as they do not contradict each other (see `check_policies`)."""
    drawn: dict[str, Any] = {}
    for name, kind in get_type_hints(KVRules).items():
        choices = (False, True) if kind is bool else (0, 1) if kind is int else get_args(kind)
        drawn[name] = rng.choice(choices) if rng.random() < 0.4 else getattr(KVRules(), name)
    if drawn["duplicates"] == "merged":
        drawn["allocate"] = "whole"
        drawn["hits_visible"] = "plan"
    else:
        drawn["hits_frozen"] = False
    if drawn["free_order"] == "one_queue":
        drawn["lru_by"] = "release"
    return KVRules(**drawn)


def random_setup(rng: random.Random, composition: str | None = None) -> Setup:
    """composition None: any."""
    watermark = rng.choice((0.0, 0.0, 0.01, 0.1, 0.25))
    shipped = [name for name, (made, *_) in presets().items() if composition in (None, made)]
    if shipped and rng.random() < 0.4:
        composition, options, rules, own = presets()[rng.choice(shipped)]
        watermark = watermark if own is None or rng.random() < 0.3 else own
    else:
        composition = composition or rng.choice(tuple(COMPOSITIONS))
        options = {name: rng.random() < 0.5 for name in OPTIONS.get(composition, ())}
        rules = random_rules(rng)
    budget = rng.choice(GROWING_NUM_TOKENS)
    num_blocks = rng.choice((1, 2, 3, 5, 8, 12, 16, 24))
    while int(watermark * (num_blocks + rules.watermark_extra_blocks)) >= num_blocks:
        watermark /= 2
    policies = _random_policies(rng, rules)
    num_cpu_blocks = rng.choice((0, 1, 4, 24, 24))
    if policies["preemption"] == "swap":
        num_cpu_blocks = max(num_cpu_blocks, 1)
    return Setup(
        composition=composition,
        options=options,
        rules=rules,
        limits=Limits(
            rng.choice((1, 2, 3, 5, 8)), budget, rng.choice((8, 30, 100)), rng.choice((0, 0, 1, min(budget, 4))),
            rng.choice((1, 1, 2, 3)), rng.choice((1, 2)),
        ),
        block_size=rng.choice((1, 2, 3, 4, 4, 8, 512)),
        num_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        watermark=watermark,
        caching=rng.random() < 0.75,
        num_hashes=rng.choice((None, None, None, 1, 2, 5)),
        lookahead=rng.choice((0, 0, 0, 0, 1, 3)),
        window=rng.choice((None, None, None, None, 1, 5, 12)),
        **policies,
    )  # fmt: skip


def _random_policies(rng: random.Random, rules: KVRules) -> dict[str, str]:
    chosen = {
        "queue": "fcfs" if rng.random() < 0.4 else rng.choice(tuple(QUEUES)),
        "admission": "watermark" if rng.random() < 0.5 else rng.choice(tuple(ADMISSIONS)),
        "preemption": rng.choice(tuple(PREEMPTIONS)),
        "victim": "most_recently_admitted" if rng.random() < 0.5 else rng.choice(tuple(VICTIMS)),
        "oracle": rng.choice(tuple(ORACLES)),
        "eviction": rng.choice(("lru", "fifo", "lfu", "cost_aware")),
    }
    if chosen["oracle"] == "none" and not set(chosen.values()).isdisjoint(NEED_AN_ORACLE):
        chosen["oracle"] = rng.choice(("perfect", "noisy", "binned"))
    if rules.free_order == "one_queue":
        chosen["eviction"] = "lru"
    if chosen["eviction"] == "lru" and rules.lru_by == "last_step":
        chosen["eviction"] = "lru by last step"
    return chosen


def random_request(rng: random.Random, name: str, now_ns: int) -> Request:
    """Prompts come from two shared texts, so that prefixes are hit; tails and outputs are often the same too."""
    shared = random.Random(rng.randrange(2))
    num_shared = rng.choice((0, 1, 4, 8, 9, 16, 24))
    prompt = [shared.randrange(VOCAB_SIZE) for _ in range(num_shared)]
    prompt += [rng.randrange(2) for _ in range(rng.randint(0 if num_shared else 1, 6))]
    num_output = rng.choice((1, 2, 5, 12, 20))
    is_forced = rng.random() < 0.5
    sampling = SamplingParams(
        max_tokens=None if is_forced and rng.random() < 0.5 else num_output,
        stop_token_ids=rng.choice(((), (), (3,))),
        ignore_eos=rng.random() < 0.5,
        **_random_group(rng),
    )
    return Request(
        name,
        array("i", prompt),
        arrival_ns=now_ns,
        forced_output=array("i", [rng.randrange(2) for _ in range(num_output)]) if is_forced else None,
        sampling=sampling,
        priority=rng.randrange(3),
        tenant=rng.choice((None, "a", "b")),
        deadline_ns=rng.choice((None, now_ns + rng.randrange(20) * NS_PER_S)),
        cache_salt=rng.choice(("", "", "", "a")),
    )


def _random_group(rng: random.Random) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.65:
        return {}
    num_seqs = rng.choice((1, 2, 2, 3, 4))
    if kind < 0.75:
        return {"n": num_seqs}
    if kind < 0.82:
        return {"n": 1, "best_of": num_seqs}
    return {"beam_width": num_seqs, "n": rng.randint(1, num_seqs)}
