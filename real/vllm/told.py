"""Translates our plans to vLLM's scheduler outputs for its workers, and their answers to our outcomes. Knows vLLM's
types.

A worker keeps a block table for each request and appends to it. The whole table is sent for new requests, and for those
that were preempted or whose table changed before its end (a merged block), which are sent as resumed. vLLM's block 0 is
its null block, so our block b is vLLM's b + 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from testbed.core.outcome import FinishReason, Outcome
from testbed.core.plan import Admission, BatchPlan, ScheduledSequence

_FIELDS = {item.name for item in fields(SchedulerOutput)}


@dataclass(slots=True)
class KnownRequest:
    """What a worker knows of a live request. name: our id. table: our blocks that were sent; None: the whole table must
    be sent. step: the last step that had the request. is_away: it is running, but the worker was told to forget it.
    num_in_flight: tokens of it that steps in flight sample."""

    name: str
    request: Any
    has_run: bool = False
    table: list[int] | None = None
    step: int = -1
    is_away: bool = False
    num_in_flight: int = 0


@dataclass(slots=True)
class Launched:
    """A plan in flight. rows: (request, sequence, whether it samples) of each row."""

    plan: BatchPlan
    rows: list[tuple[KnownRequest, int, bool]] = field(default_factory=list)


class Translator:
    """Translates for one engine. live: live requests by our ids. max_held: how many requests the newer model runner
    keeps; it gets resumed requests as new ones. None: the older runner, which keeps the requests of a step. log_stats:
    whether vLLM records events of requests. cached_block_size: block size of the prefix cache; None: no such cache.
    hits: of the prefix cache, since vLLM's last statistics."""

    def __init__(
        self, *, max_model_len: int, max_held: int | None, log_stats: bool, cached_block_size: int | None
    ) -> None:
        self.live: dict[str, KnownRequest] = {}
        self.finished: set[str] = set()  # vLLM's ids of requests that the workers have to forget
        self._max_model_len = max_model_len
        self._max_held = max_held
        self._sends_resumed_as_new = max_held is not None
        self._log_stats = log_stats
        self._cached_block_size = cached_block_size
        self.hits = PrefixCacheStats()
        self._step = 0

    @property
    def num_holders(self) -> int:
        """Live requests that have blocks."""
        return sum(told.table is not None for told in self.live.values())

    # --- to the workers ---

    def empty(self) -> SchedulerOutput:
        """Returns a step without requests. Workers then remove all requests from their batch, as in any step that lacks
        them."""
        self._step += 1
        return self._output([], CachedRequestData.make_empty(), {}, set())

    def scheduled(self, plan: BatchPlan) -> tuple[SchedulerOutput, Launched]:
        """Returns what is sent to the workers for a plan, and the launched plan."""
        self._step += 1
        preempted = set()
        for victim in plan.preempted:
            told = self.live.get(victim.request_id)
            if told is not None:
                told.table, told.is_away, told.num_in_flight = None, False, 0
                told.request.status = RequestStatus.PREEMPTED
                told.request.num_preemptions += 1
                self._note(told.request, EngineCoreEventType.PREEMPTED)
                preempted.add(told.request.request_id)
        for admission in plan.admitted:
            self._note_admission(self.live[admission.request_id].request, admission)
        preempted |= self._put_away({name for name, _ in plan.num_scheduled})
        new: list[NewRequestData] = []
        cached, launched, counts = CachedRequestData.make_empty(), Launched(plan), dict[str, int]()
        for (name, num_tokens), row in zip(plan.num_scheduled, plan.scheduled, strict=True):
            told = self.live[name]
            launched.rows.append((told, row.seq_id, row.samples))
            request, is_changed = told.request, told.table is not None and not _continues(row.block_table, told.table)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = row.start
            counts[request.request_id] = num_tokens
            if told.is_away or (told.table is None and (not told.has_run or self._sends_resumed_as_new)):
                new.append(self._new(told, row))
            elif is_changed and self._sends_resumed_as_new:
                preempted.add(request.request_id)
                new.append(self._new(told, row))
            else:
                self._add(cached, told, row, is_resumed=told.table is None or is_changed)
            told.has_run, told.is_away = True, False
            told.table, told.step = list(row.block_table), self._step
            told.num_in_flight += row.samples
        return self._output(new, cached, counts, preempted), launched

    def _put_away(self, scheduled: set[str]) -> set[str]:
        """Chooses requests that the workers must forget because more run than they keep; returns vLLM's ids. These are
        requests that are not in this step, least recently scheduled first. They are sent as preempted but keep their
        blocks, and are sent as new when they go on."""
        if self._max_held is None or len(self.live) <= self._max_held:
            return set()
        held = [told for told in self.live.values() if told.table is not None and not told.is_away]
        idle = [told for told in held if told.name not in scheduled]
        idle = sorted(idle, key=lambda told: told.step)[: max(0, len(idle) + len(scheduled) - self._max_held)]
        for told in idle:
            told.is_away = True
        return {told.request.request_id for told in idle}

    def added(self, name: str, request: Any) -> None:
        """Adds a waiting request. name: our id."""
        self.live[name] = KnownRequest(name, request)
        self._note(request, EngineCoreEventType.QUEUED)

    def _note(self, request: Any, event: Any) -> None:
        """Records an event for vLLM's own metrics."""
        if self._log_stats:
            request.record_event(event)

    def _note_admission(self, request: Any, admission: Admission) -> None:
        self._note(request, EngineCoreEventType.SCHEDULED)
        if self._cached_block_size is not None and not request.skip_reading_prefix_cache:
            self.hits.record(request.num_tokens, admission.num_cached_tokens, admission.is_resumed)
        if request.prefill_stats is not None and not admission.is_resumed:
            request.prefill_stats.set(
                num_prompt_tokens=request.num_prompt_tokens, num_local_cached_tokens=admission.num_cached_tokens,
                num_external_cached_tokens=0,
            )  # fmt: skip

    def _new(self, told: KnownRequest, row: ScheduledSequence) -> NewRequestData:
        tokens = list(told.request.all_token_ids) if self._sends_resumed_as_new else None
        return NewRequestData.from_request(told.request, (_blocks(row.block_table),), tokens)

    def _add(self, cached: CachedRequestData, told: KnownRequest, row: ScheduledSequence, *, is_resumed: bool) -> None:
        request = told.request
        blocks = _blocks(row.block_table if is_resumed or told.table is None else row.block_table[len(told.table) :])
        cached.req_ids.append(request.request_id)
        if is_resumed:
            cached.resumed_req_ids.add(request.request_id)
        is_gone = is_resumed or told.step != self._step - 1  # from the workers' batch
        if is_gone and not self._sends_resumed_as_new:
            cached.all_token_ids[request.request_id] = list(request.all_token_ids)
        cached.new_block_ids.append((blocks,) if blocks else None)
        cached.num_computed_tokens.append(row.start)
        cached.num_output_tokens.append(request.num_output_tokens + told.num_in_flight)

    def _output(
        self, new: list[NewRequestData], cached: CachedRequestData, counts: dict[str, int], preempted: set[str]
    ) -> SchedulerOutput:
        finished, self.finished = self.finished, set()
        given: dict[str, Any] = {
            "scheduled_new_reqs": new,
            "scheduled_cached_reqs": cached,
            "num_scheduled_tokens": counts,
            "total_num_scheduled_tokens": sum(counts.values()),
            "scheduled_spec_decode_tokens": {},
            "scheduled_encoder_inputs": {},
            "num_common_prefix_blocks": [0],
            "finished_req_ids": finished,
            "free_encoder_mm_hashes": [],
            "preempted_req_ids": preempted,
        }
        return SchedulerOutput(**{name: value for name, value in given.items() if name in _FIELDS})

    # --- from the workers ---

    def outcomes(
        self, launched: Launched, answer: Any
    ) -> tuple[tuple[Outcome, ...], dict[int, list[EngineCoreOutput]]]:
        """Returns the outcomes of a plan, and the outputs for vLLM's clients. vLLM's own check decides which requests
        stop."""
        outcomes: list[Outcome] = []
        outputs: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        for told, seq_id, samples in launched.rows:
            if not samples:
                continue
            if told.request.is_finished():  # aborted since: its token is dropped
                outcomes.append(Outcome(seq_id, (0,), FinishReason.ABORT, dropped=True))
                continue
            request = told.request
            index = answer.req_id_to_index[request.request_id]
            token = int(answer.sampled_token_ids[index][0])
            told.num_in_flight = max(0, told.num_in_flight - 1)
            request.append_output_token_ids(token)
            stopped = check_stop(request, self._max_model_len)
            outcomes.append(Outcome(seq_id, (token,), _reason(request) if stopped else None))
            output = _output_of(request, index, token, answer)
            if output.prefill_stats is not None:
                size = self._cached_block_size
                output.prefill_stats.finalize(0 if size is None else request.num_prompt_tokens // size * size)
            outputs[request.client_index].append(output)
            if stopped:
                self.forget(told.name)
        return tuple(outcomes), outputs

    def forget(self, name: str) -> None:
        """Removes a request that has ended; the workers are told with the next step."""
        told = self.live.pop(name, None)
        if told is not None:
            self.finished.add(told.request.request_id)


def _continues(table: Sequence[int], told: list[int]) -> bool:
    return list(table[: len(told)]) == told


def _blocks(table: Sequence[int]) -> list[int]:
    return [block + 1 for block in table]


def _reason(request: Any) -> FinishReason:
    return FinishReason.LENGTH if request.status == RequestStatus.FINISHED_LENGTH_CAPPED else FinishReason.STOP


def _output_of(request: Any, index: int, token: int, answer: Any) -> EngineCoreOutput:
    logprobs = None
    if request.sampling_params.num_logprobs is not None and answer.logprobs:
        logprobs = answer.logprobs.slice_request(index, 1)
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[token],
        new_logprobs=logprobs,
        new_prompt_logprobs_tensors=answer.prompt_logprobs_dict.get(request.request_id),
        finish_reason=request.get_finished_reason(),
        stop_reason=request.stop_reason,
        events=request.take_events(),
        prefill_stats=request.take_prefill_stats(),
        trace_headers=request.trace_headers,
        num_nans_in_logits=(answer.num_nans_in_logits or {}).get(request.request_id, 0),
    )
