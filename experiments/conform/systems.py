"""The systems whose decisions were logged: the preset that mirrors each, and the meaning of its fields.

Computes another system's fields from our plans and counters; makes no decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from experiments.conform.cases import Decision
from testbed.core.plan import BatchPlan, PreemptionMode
from testbed.core.scheduler import Scheduler

Pairs = tuple[tuple[int, int], ...]  # (source, destination) block ids


class RowKind(IntEnum):
    """The role of a request in a step, in the order in which V0's chunked scheduler lists requests."""

    ADMITTED = 0
    PREFILL = 1
    SWAPPED_IN_PREFILL = 2
    DECODE = 3
    SWAPPED_IN_DECODE = 4


@dataclass(slots=True)
class RequestRow:
    """A request's part of a step, summed over its sequences. start: position of its first token, 0 for decodes."""

    request_id: str
    kind: RowKind
    start: int
    num_tokens: int

    @property
    def is_prefill(self) -> bool:
        return self.kind <= RowKind.SWAPPED_IN_PREFILL


class PrefillTracker:
    """Turns plans into rows of requests, and tracks which requests have not finished their prefill.

    A plan does not contain this information: the last token of a resumed prefill looks like a decode.
    """

    def __init__(self) -> None:
        self.cached: dict[str, int] = {}  # requests with unfinished prefill -> cached tokens found at admission

    def rows(self, plan: BatchPlan) -> tuple[list[RequestRow], dict[str, int]]:
        """Returns the plan's rows by request, in scheduled order, and `cached` before it. Call it once per plan."""
        for victim in plan.preempted:
            if victim.mode is PreemptionMode.RECOMPUTE:
                self.cached.pop(victim.request_id, None)
        admitted = {item.request_id: item.num_cached_tokens for item in plan.admitted}
        self.cached.update(admitted)
        before = dict(self.cached)
        rows: dict[str, RequestRow] = {}
        for (request_id, num_tokens), scheduled in zip(plan.num_scheduled, plan.scheduled, strict=True):
            if request_id in rows:
                rows[request_id].num_tokens += num_tokens
                continue
            row = rows[request_id] = RequestRow(request_id, self._kind(request_id, admitted, plan), 0, num_tokens)
            if row.is_prefill:
                row.start = scheduled.start
                if scheduled.samples:  # its prefill ends with this plan
                    del self.cached[request_id]
        return list(rows.values()), before

    def _kind(self, request_id: str, admitted: dict[str, int], plan: BatchPlan) -> RowKind:
        if request_id in admitted:
            return RowKind.ADMITTED
        is_swapped_in = request_id in plan.swapped_in
        if request_id in self.cached:
            return RowKind.SWAPPED_IN_PREFILL if is_swapped_in else RowKind.PREFILL
        return RowKind.SWAPPED_IN_DECODE if is_swapped_in else RowKind.DECODE


@dataclass(frozen=True, slots=True)
class Batch:
    """A plan in the form that the systems' field definitions need."""

    plan: BatchPlan
    rows: list[RequestRow]
    cached: dict[str, int]  # cached tokens at admission, of requests whose prefill is unfinished, new ones included
    block_size: int
    prefix_caching: bool


# --- scheduled ---


def computed_tokens(batch: Batch) -> dict[str, int]:
    """Returns the computed tokens of each request, in scheduled order. For a group's decode: its number of members."""
    return {row.request_id: row.num_tokens for row in batch.rows}


def with_cached_on_admission(batch: Batch) -> dict[str, int]:
    """V0 0.8.5: an admission also counts its prefix-cache hit as scheduled; later chunks do not."""
    return {
        row.request_id: row.start + row.num_tokens if row.kind is RowKind.ADMITTED else row.num_tokens
        for row in batch.rows
    }


def with_cached_prefills_first(batch: Batch) -> dict[str, int]:
    """V0 0.8.5 chunked: as above, but the rows are listed by kind, not in the order of the decisions."""
    batch.rows.sort(key=lambda row: row.kind)
    return with_cached_on_admission(batch)


# --- cached tokens ---


def hits_of_first_admissions(batch: Batch) -> dict[str, int]:
    """V1: the hit of each request that is admitted for the first time; 0 without prefix caching."""
    return {item.request_id: item.num_cached_tokens for item in batch.plan.admitted if not item.is_resumed}


def hits_of_prefills(batch: Batch) -> dict[str, int]:
    """V0 0.8.5: with caching on, for every chunk of a prefill, the hit of its admission, rounded up to whole blocks.

    A completely cached prompt counts in full, although its last token is computed again.
    """
    if not batch.prefix_caching:
        return {}
    size = batch.block_size
    return {row.request_id: -(-batch.cached[row.request_id] // size) * size for row in batch.rows if row.is_prefill}


def starts_of_prefills(batch: Batch) -> dict[str, int]:
    """nano-vllm: for every sequence of a prefill batch, the number of tokens whose KV exists: hits and own chunks."""
    return {row.request_id: row.start for row in batch.rows if row.is_prefill}


# --- block counts ---


def distinct(pairs: Pairs) -> int:
    """0.2.7 stores the pairs in a mapping: a block that members of a group share is moved and counted once."""
    return len(set(pairs))


@dataclass(frozen=True, slots=True)
class System:
    """A system that has logs. options: changes to the preset's composition, if the system is another version."""

    preset: str
    scheduled: Callable[[Batch], dict[str, int]] = computed_tokens
    cached_tokens: Callable[[Batch], dict[str, int]] = hits_of_first_admissions
    num_blocks: Callable[[Pairs], int] = len
    options: Mapping[str, Any] = field(default_factory=dict)


SYSTEMS: dict[str, System] = {
    "vllm_v1_0.33": System("vllm_v1"),
    "vllm_v1_0.32": System("vllm_v1", options={"own_victim_ends_round": True}),
    "vllm_v1_0.30": System("vllm_v1", options={"own_victim_ends_round": True, "threshold_when_alone": True}),
    "vllm_v1_0.33_async": System("vllm_v1_async", options={"own_victim_ends_round": False}),
    "vllm_v1_0.32_async": System("vllm_v1_async"),
    "vllm_v1_0.30_async": System(
        "vllm_v1_async", options={"own_victim_ends_round": True, "threshold_when_alone": True}
    ),
    "vllm_v1_0.8.5": System("vllm_v1_0_8"),
    "vllm_v0_0.8.5": System("vllm_v0", with_cached_on_admission, hits_of_prefills),
    "vllm_v0_chunked_0.8.5": System("vllm_v0_chunked", with_cached_prefills_first, hits_of_prefills),
    "vllm_v0_classic_0.2.7": System("vllm_v0_classic", num_blocks=distinct),
    "nano_vllm": System("nano_vllm", cached_tokens=starts_of_prefills),
}


class DecisionReader:
    def __init__(self, system: System, scheduler: Scheduler, *, prefix_caching: bool) -> None:
        self._system = system
        self._scheduler = scheduler
        self._prefix_caching = prefix_caching
        self._tracker = PrefillTracker()

    def after_plan(self, step: int, plan: BatchPlan) -> Decision:
        """Returns every field that is known once the step at virtual second `step` is planned."""
        system, scheduler, blocks = self._system, self._scheduler, self._scheduler.blocks
        rows, cached = self._tracker.rows(plan)
        batch = Batch(plan, rows, cached, blocks.block_size, self._prefix_caching)
        recomputed, swapped = (
            [item.request_id for item in plan.preempted if item.mode is mode]
            for mode in (PreemptionMode.RECOMPUTE, PreemptionMode.SWAP)
        )
        return {
            "step": step,
            "scheduled": system.scheduled(batch),
            "preempted": _sorted(recomputed),
            "swapped_out": _sorted(swapped),
            "num_blocks_swapped_out": system.num_blocks(plan.swap_out),
            "num_blocks_swapped_in": system.num_blocks(plan.swap_in),
            "num_blocks_copied": system.num_blocks(plan.copies),
            "ignored": _sorted([item.request_id for item in plan.ignored]),
            "cached_tokens": system.cached_tokens(batch),
            "is_prefill": any(row.is_prefill for row in rows),
            "free_blocks": blocks.num_free_blocks,
            "free_cpu_blocks": blocks.num_free_cpu_blocks,
            "num_waiting": scheduler.num_waiting,
            "num_swapped": scheduler.num_swapped,
        }

    def after_commit(self) -> Decision:
        return {"free_blocks_after_commit": self._scheduler.blocks.num_free_blocks}


def _sorted(request_ids: list[str]) -> list[str]:
    return sorted(set(request_ids), key=int)
