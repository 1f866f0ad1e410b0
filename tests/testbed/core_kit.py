"""Builds a core by hand, without backend, clock or configuration files. It is stepped by `stepping`."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from testbed.blocks.config import KVRules
from testbed.blocks.eviction import LRU, LRUByLastStep
from testbed.blocks.interfaces import EvictionPolicy
from testbed.blocks.keys import KeySource, TokenKeys
from testbed.blocks.manager import BlockManager
from testbed.core.composition import Composition
from testbed.core.interfaces import AdmissionPolicy, PreemptionChoice, VictimChoice, WaitingQueue
from testbed.core.limits import Limits
from testbed.core.request import GREEDY, Request, SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.core.sequence import Sequence
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


class TakesTheFirst:
    """A user's victim choice: whoever was admitted first, whom the step has scheduled already."""

    def choose(self, running: dict[int, Sequence]) -> Sequence:
        return next(iter(running.values()))


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
    prompt: int | Seq[int],
    output: int | Seq[int] | None = 1,
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


def _tokens(given: int | Seq[int], request_id: str, first: int) -> Seq[int]:
    if not isinstance(given, int):
        return given
    base = int.from_bytes(request_id.encode(), "big") % 1_000_000 * 1000 + first
    return range(base, base + given)
