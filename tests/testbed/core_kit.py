"""Builds a core by hand and steps it, without backend, clock or configuration files."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from testbed.blocks.config import KVRules
from testbed.blocks.eviction import LRU, LRUByLastStep
from testbed.blocks.interfaces import EvictionPolicy
from testbed.blocks.keys import KeySource, TokenKeys
from testbed.blocks.manager import BlockManager
from testbed.core.composition import Composition
from testbed.core.interfaces import AdmissionPolicy, PreemptionChoice, VictimChoice, WaitingQueue
from testbed.core.limits import Limits
from testbed.core.outcome import Finished, Outcome, StepResult
from testbed.core.plan import BatchPlan
from testbed.core.request import GREEDY, Request, SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.policies.admission import Watermark
from testbed.policies.compositions.decode_first import DecodeFirst
from testbed.policies.compositions.iteration_level import IterationLevel
from testbed.policies.compositions.prefill_decode_split import PrefillDecodeSplit
from testbed.policies.compositions.prefill_first import PrefillFirst
from testbed.policies.compositions.static import Static
from testbed.policies.compositions.unified import Unified
from testbed.policies.preemption import Auto
from testbed.policies.queue_order import FCFS
from testbed.policies.victim import MostRecentlyAdmitted

COMPOSITIONS: dict[str, Callable[[], Composition]] = {
    "prefill_first": PrefillFirst,
    "decode_first": DecodeFirst,
    "unified": Unified,
}
ALL_COMPOSITIONS = COMPOSITIONS | {
    "prefill_decode_split": PrefillDecodeSplit,
    "iteration_level": IterationLevel,
    "static": Static,
}


class WeakKeys(TokenKeys):
    """The keys of the product, with a hash that has only `num_values` values: collisions everywhere."""

    def __init__(self, block_size: int, num_values: int) -> None:
        super().__init__(block_size, are_unique=False)
        self._num_values = num_values

    def key_of(self, content: bytes, previous_key: int) -> int:
        return super().key_of(content, previous_key) % self._num_values


def make_blocks(
    *,
    num_blocks: int = 64,
    num_cpu_blocks: int = 0,
    block_size: int = 4,
    watermark: float = 0.0,
    rules: KVRules | None = None,
    caching: bool = True,
    key_source: KeySource | None = None,
    eviction: EvictionPolicy | None = None,
    lookahead_slots: int = 0,
    sliding_window: int | None = None,
    isolate_tenants: bool = False,
    max_model_len: int = 1 << 20,
) -> BlockManager:
    """Without `eviction` it is LRU, by what `rules.lru_by` says."""
    rules = rules or KVRules()
    if eviction is None:
        eviction = LRUByLastStep() if rules.lru_by == "last_step" else LRU()
    return BlockManager(
        block_size=block_size,
        num_gpu_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        watermark=watermark,
        rules=rules,
        eviction=eviction,
        key_source=(key_source or TokenKeys(block_size)) if caching else None,
        lookahead_slots=lookahead_slots,
        sliding_window=sliding_window,
        isolate_tenants=isolate_tenants,
        max_model_len=max_model_len,
    )


def make_limits(
    *, seqs: int = 8, budget: int = 64, model_len: int = 512, threshold: int = 0, partial: int = 1, plans: int = 1
) -> Limits:
    return Limits(seqs, budget, model_len, threshold, partial, max_num_plans=plans)


def make_scheduler(
    composition: str | Composition = "unified",
    *,
    blocks: BlockManager | None = None,
    limits: Limits | None = None,
    eos_token_id: int | None = None,
    victims: VictimChoice | None = None,
    queue: WaitingQueue | None = None,
    admission: AdmissionPolicy | None = None,
    preemption: PreemptionChoice | None = None,
    **block_options: Any,
) -> Scheduler:
    """A composition by name, or one of its own settings. Options that are not named go to `make_blocks`."""
    return Scheduler(
        limits=limits or make_limits(),
        blocks=blocks or make_blocks(**block_options),
        composition=ALL_COMPOSITIONS[composition]() if isinstance(composition, str) else composition,
        queue=FCFS() if queue is None else queue,  # an empty one is false
        victims=victims or MostRecentlyAdmitted(),
        admission=admission or Watermark(),
        preemption=preemption or Auto(),
        eos_token_id=eos_token_id,
    )


def make_request(
    request_id: str,
    prompt: int | Sequence[int],
    output: int | Sequence[int] | None = 1,
    *,
    sampling: SamplingParams = GREEDY,
    salt: str = "",
    arrival_ns: int = 0,
    **fields: Any,
) -> Request:
    """A prompt or an output given as a count gets tokens that no other request id has. output None: not forced."""
    return Request(
        request_id,
        array("i", _tokens(prompt, request_id, 0)),
        arrival_ns=arrival_ns,
        forced_output=None if output is None else array("i", _tokens(output, request_id, 500)),
        sampling=sampling,
        cache_salt=salt,
        **fields,
    )


def _tokens(given: int | Sequence[int], request_id: str, first: int) -> Sequence[int]:
    if not isinstance(given, int):
        return given
    base = int.from_bytes(request_id.encode(), "big") % 1_000_000 * 1000 + first
    return range(base, base + given)


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)


def scheduled(plan: BatchPlan) -> dict[str, int]:
    """Tokens by request id, in the order scheduled."""
    return dict(plan.num_scheduled)


def rows(plan: BatchPlan) -> list[tuple[str, int]]:
    """(request id, tokens) of each row, in the order scheduled: a group's sequences have a row each."""
    return plan.num_scheduled


def preempted(plan: BatchPlan) -> list[str]:
    return [item.request_id for item in plan.preempted]


def ignored(plan: BatchPlan) -> list[str]:
    return [item.request_id for item in plan.ignored]


def cached(plan: BatchPlan) -> dict[str, int]:
    """Prefix tokens found, of those admitted."""
    return {item.request_id: item.num_cached_tokens for item in plan.admitted}


def commit(scheduler: Scheduler, tokens: dict[int, int] | None = None) -> list[Finished]:
    """Commits the plan in flight; `tokens` are those sampled, by seq_id, for rows that are not forced."""
    outcomes = None if tokens is None else tuple(Outcome(seq_id, (token,)) for seq_id, token in tokens.items())
    scheduler.check_invariants()
    finished = scheduler.commit(StepResult(1, outcomes), 1)
    scheduler.check_invariants()
    return finished


def step_with(scheduler: Scheduler, *outcomes: Outcome) -> tuple[BatchPlan, list[Finished]]:
    """A step of which these outcomes come, one for each row that is not forced, in the order scheduled."""
    plan = scheduler.plan(0)
    scheduler.check_invariants()
    finished = scheduler.commit(StepResult(1, outcomes), 1)
    scheduler.check_invariants()
    return plan, finished


def step(scheduler: Scheduler, tokens: dict[int, int] | None = None) -> tuple[BatchPlan, list[Finished]]:
    plan = scheduler.plan(0)
    return plan, commit(scheduler, tokens)


def drain(scheduler: Scheduler, max_steps: int = 10_000) -> list[Finished]:
    """Steps until nothing is left; every request must be forced."""
    finished: list[Finished] = []
    for _ in range(max_steps):
        if not scheduler.has_work:
            return finished
        plan = scheduler.plan(0)
        assert not plan.is_empty, "nothing can be scheduled"
        finished += commit(scheduler)
    raise AssertionError(f"work is left after {max_steps} steps")


@contextmanager
def in_flight(scheduler: Scheduler) -> Iterator[BatchPlan]:
    """A plan whose rows may be looked at; committed on leaving."""
    yield scheduler.plan(0)
    commit(scheduler)
