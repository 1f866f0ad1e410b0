"""Random but valid configurations of a core, and random requests. Everything is drawn from one `random.Random`."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from testbed.blocks.config import KVRules
from testbed.blocks.keys import TokenKeys
from testbed.blocks.manager import BlockManager
from testbed.core.limits import Limits
from testbed.core.request import Request, SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.policies.context import PolicyContext, bind
from tests.properties.policies import (
    ADMISSIONS,
    COMPOSITIONS,
    EVICTIONS,
    NAMED_EVICTIONS,
    NEED_AN_ORACLE,
    OPTIONS,
    ORACLES,
    PREEMPTIONS,
    QUEUES,
    VICTIMS,
    Prices,
    WeakKeys,
)

EOS = 1
VOCAB_SIZE = 11
NS_PER_S = 1_000_000_000
SCHEDULER_FILES = Path(__file__).parents[2] / "experiments" / "conf" / "scheduler"


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

    def scheduler(self, *, lists_late: bool = True) -> Scheduler:
        """As `experiments.wiring` does it. lists_late: what nobody asks for may stay without keys and entries."""
        evicts = EVICTIONS[self.eviction]()
        keys = TokenKeys(self.block_size, are_unique=lists_late)
        if self.num_hashes is not None:
            keys = WeakKeys(self.block_size, self.num_hashes)
        blocks = BlockManager(
            block_size=self.block_size, num_gpu_blocks=self.num_blocks, num_cpu_blocks=self.num_cpu_blocks,
            watermark=self.watermark, rules=self.rules, eviction=evicts, key_source=keys if self.caching else None,
            max_model_len=self.limits.max_model_len, lookahead_slots=self.lookahead, sliding_window=self.window,
        )  # fmt: skip
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
            limits=self.limits, blocks=blocks, composition=COMPOSITIONS[self.composition](**self.options), queue=queue,
            victims=victims, admission=allows, preemption=mode, eos_token_id=EOS,
        )  # fmt: skip

    @property
    def ends_alone(self) -> bool:
        """Whether first come, first served and the default victim promise that everything ends."""
        return self.queue == "fcfs" and self.victim == "most_recently_admitted"

    @property
    def has_preemptive_queue(self) -> bool:
        """Whether running sequences may be stopped for the head of the queue."""
        queue = QUEUES[self.queue]()
        return getattr(queue, "is_preemptive", hasattr(queue, "yields"))

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
def presets() -> dict[str, dict[str, Any]]:
    """What each scheduler that the product ships says of a `Setup`, by name; what a preset adds to another one's rules
    (asynchronous scheduling, limits) is tried by itself."""
    classes = {f"{made.__module__}.{made.__name__}": name for name, made in COMPOSITIONS.items()}  # type: ignore[attr-defined]
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(SCHEDULER_FILES.glob("*.yaml")):
        values = yaml.safe_load(file.read_text())
        if "async_scheduling" in values or {"composition", "kv_rules"}.isdisjoint(values):
            continue
        chosen = values.get("composition", "unified")
        setup = found[file.stem] = {"composition": chosen, "rules": KVRules(**values.get("kv_rules", {}))}
        if isinstance(chosen, dict):
            setup["composition"] = classes[chosen["_target_"]]
            setup["options"] = {key: value for key, value in chosen.items() if key != "_target_"}
        if setup["rules"].lru_by == "last_step":
            setup["eviction"] = "lru by last step"
        for key in ("queue_order", "admission", "victim", "oracle", "preemption", "watermark"):
            if key in values:
                value = "no_evict by oracle" if isinstance(values[key], dict) else values[key]
                setup["queue" if key == "queue_order" else key] = value
    return found


def random_rules(rng: random.Random) -> KVRules:
    """Any value of each field, as far as they do not contradict each other (see `KVRules` and `check_policies`)."""
    drawn: dict[str, Any] = {}
    for name, kind in get_type_hints(KVRules).items():
        choices = (False, True) if kind is bool else (0, 1) if kind is int else get_args(kind)
        drawn[name] = rng.choice(choices) if rng.random() < 0.4 else getattr(KVRules(), name)
    if drawn["duplicates"] == "merged":
        drawn["allocate"], drawn["hits_visible"] = "whole", "plan"
    else:
        drawn["hits_frozen"] = False
        drawn["hits_visible"] = rng.choice(("commit", "allocation"))
    if drawn["duplicates"] == "replaced":
        drawn["free_order"] = "one_queue"
    if drawn["free_order"] == "one_queue":
        drawn["lru_by"] = "release"
    return KVRules(**drawn)


def random_setup(rng: random.Random, composition: str | None = None) -> Setup:
    """composition None: any. Half of them start from a preset, with its policies or with others."""
    drawn: dict[str, Any] = {"watermark": rng.choice((0.0, 0.0, 0.01, 0.1, 0.25))}
    shipped = [preset for preset in presets().values() if composition in (None, preset["composition"])]
    if shipped and rng.random() < 0.5:
        drawn |= rng.choice(shipped)
    else:
        drawn["composition"] = composition or rng.choice(tuple(COMPOSITIONS))
        drawn["options"] = {name: rng.random() < 0.5 for name in OPTIONS.get(drawn["composition"], ())}
        drawn["rules"] = random_rules(rng)
    policies = _random_policies(rng, drawn["rules"])
    drawn = policies | drawn if rng.random() < 0.5 and "victim" not in drawn else drawn | policies
    if drawn["oracle"] == "none" and not {drawn[kind] for kind in policies}.isdisjoint(NEED_AN_ORACLE):
        drawn["oracle"] = rng.choice(("perfect", "noisy", "binned"))
    block_size = rng.choice((1, 2, 3, 4, 4, 8, 512))
    num_blocks = -(-rng.choice((10, 24, 40, 60, 100)) // block_size) + rng.randrange(3)
    while int(drawn["watermark"] * (num_blocks + drawn["rules"].watermark_extra_blocks)) >= num_blocks:
        drawn["watermark"] /= 2
    num_cpu_blocks = rng.choice((0, 1, 4, 24, 24, 40))
    knows_lookahead = drawn["rules"].growth_test == "exact" and drawn["rules"].swap_test == "all_blocks"
    return Setup(
        **drawn, limits=_random_limits(rng), block_size=block_size, num_blocks=num_blocks,
        num_cpu_blocks=max(num_cpu_blocks, 1) if drawn["preemption"] == "swap" else num_cpu_blocks,
        caching=rng.random() < 0.75, num_hashes=rng.choice((None, None, None, 1, 2, 5)),
        lookahead=rng.choice((0, 0, 0, 1, 3)) if knows_lookahead else 0,
        window=rng.choice((None, None, None, 1, 5, 12)) if drawn["rules"].duplicates == "listed" else None,
    )  # fmt: skip


def _random_limits(rng: random.Random) -> Limits:
    budget = rng.choice((1, 2, 5, 8, 16, 32, 64))
    return Limits(
        max_num_seqs=rng.choice((1, 2, 4, 5, 8)),
        max_num_batched_tokens=budget,
        max_model_len=rng.choice((10, 30, 60, 60, 100)),
        long_prefill_token_threshold=rng.choice((0, 0, 1, min(budget, 4))),
        max_num_partial_prefills=rng.choice((1, 1, 2, 3)),
        max_long_partial_prefills=rng.choice((1, 2)),
    )


def _random_policies(rng: random.Random, rules: KVRules) -> dict[str, str]:
    chosen = {
        "queue": "fcfs" if rng.random() < 0.4 else rng.choice(tuple(QUEUES)),
        "admission": "watermark" if rng.random() < 0.5 else rng.choice(tuple(ADMISSIONS)),
        "preemption": rng.choice((*PREEMPTIONS, "swap")),
        "victim": "most_recently_admitted" if rng.random() < 0.4 else rng.choice(tuple(VICTIMS)),
        "oracle": rng.choice(tuple(ORACLES)),
        "eviction": rng.choice(NAMED_EVICTIONS),
    }
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
        prompt_logprobs=0 if random.Random(name).random() < 0.1 else None,  # computes its prompt whole
        **_random_group(rng),
    )
    return Request(
        name, array("i", prompt), arrival_ns=now_ns,
        forced_output=array("i", [rng.randrange(2) for _ in range(num_output)]) if is_forced else None,
        sampling=sampling, priority=rng.randrange(3), tenant=rng.choice((None, "a", "b")),
        deadline_ns=rng.choice((None, now_ns + rng.randrange(20) * NS_PER_S)), cache_salt=rng.choice(("", "", "", "a")),
    )  # fmt: skip


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
