"""vLLM's types, as far as the plug-ins use them: names, fields and meanings of vLLM 0.32; no code of vLLM's is here."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

# --- vllm.v1.engine ---


class FinishReason(enum.IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreEventType(enum.IntEnum):
    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


@dataclass
class PrefillStats:
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0

    def finalize(self, num_cached_tokens: int) -> None:
        self.num_cache_creation_tokens = max(0, min(num_cached_tokens, self.num_prompt_tokens) - self.num_cached_tokens)

    def set(self, num_prompt_tokens: int, num_local_cached_tokens: int, num_external_cached_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = num_local_cached_tokens + num_external_cached_tokens


@dataclass
class EngineCoreOutput:
    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[Any] | None = None
    trace_headers: Any = None
    num_nans_in_logits: int = 0
    prefill_stats: PrefillStats | None = None


@dataclass
class EngineCoreOutputs:
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    scheduler_stats: Any = None
    finished_requests: set[str] | None = None


# --- vllm.v1.request ---


class RequestStatus(enum.IntEnum):
    WAITING = 1
    RUNNING = 5
    PREEMPTED = 6
    FINISHED_STOPPED = 7
    FINISHED_LENGTH_CAPPED = 8
    FINISHED_ABORTED = 9
    FINISHED_IGNORED = 10
    FINISHED_ERROR = 11


_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


@dataclass
class SamplingParams:
    """eos_token_id: None where the end of a text is ignored, as vLLM's front end sets it."""

    max_tokens: int
    eos_token_id: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    min_tokens: int = 0
    temperature: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class Request:
    """What the engine makes of what a client sends."""

    def __init__(
        self, request_id: str, prompt_token_ids: list[int] | None, sampling_params: SamplingParams | None,
        client_index: int = 0, arrival_time: float = 0.0, cache_salt: str | None = None, priority: int = 0,
        lora_request: Any = None, mm_features: list[Any] | None = None,
    ) -> None:  # fmt: skip
        self.request_id, self.prompt_token_ids, self.sampling_params = request_id, prompt_token_ids, sampling_params
        self.client_index, self.arrival_time, self.cache_salt = client_index, arrival_time, cache_salt
        self.priority, self.lora_request, self.mm_features = priority, lora_request, mm_features or []
        self.max_tokens = 1 if sampling_params is None else sampling_params.max_tokens
        self.pooling_params = self.structured_output_request = self.prompt_embeds = self.trace_headers = None
        self.resumable = self.skip_reading_prefix_cache = False
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.num_computed_tokens = self.num_preemptions = 0
        self.events: list[Any] = []
        self.prefill_stats: PrefillStats | None = PrefillStats()
        self.output_token_ids: list[int] = []
        self.all_token_ids = list(prompt_token_ids or ())

    def append_output_token_ids(self, token_ids: int | list[int]) -> None:
        made = [token_ids] if isinstance(token_ids, int) else token_ids
        self.output_token_ids += made
        self.all_token_ids += made

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    def is_finished(self) -> bool:
        return self.status > RequestStatus.PREEMPTED

    def get_finished_reason(self) -> FinishReason | None:
        return _REASONS.get(self.status)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or ())

    def record_event(self, event: EngineCoreEventType) -> None:
        self.events.append(event)

    def take_prefill_stats(self) -> PrefillStats | None:
        stats, self.prefill_stats = self.prefill_stats, None
        return stats

    def take_events(self) -> list[Any] | None:
        events, self.events = self.events, []
        return events or None


# --- vllm.v1.core.sched ---


def check_stop(request: Request, max_model_len: int) -> bool:
    params, last = request.sampling_params, request.output_token_ids[-1]
    assert params is not None
    if last == params.eos_token_id or last in params.stop_token_ids:
        request.status = RequestStatus.FINISHED_STOPPED
        request.stop_reason = None if last == params.eos_token_id else last
    elif request.num_tokens >= max_model_len or request.num_output_tokens >= request.max_tokens:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    return request.is_finished()


@dataclass
class NewRequestData:
    req_id: str
    prompt_token_ids: list[int] | None
    sampling_params: SamplingParams | None
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    prefill_token_ids: list[int] | None = None  # for the newer runner only

    @classmethod
    def from_request(
        cls, request: Request, block_ids: tuple[list[int], ...], prefill_token_ids: list[int] | None = None
    ) -> NewRequestData:
        return cls(
            request.request_id, request.prompt_token_ids, request.sampling_params, block_ids,
            request.num_computed_tokens, prefill_token_ids,
        )  # fmt: skip


@dataclass
class CachedRequestData:
    req_ids: list[str]
    resumed_req_ids: set[str]
    new_token_ids: list[list[int]]
    all_token_ids: dict[str, list[int]]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]

    @classmethod
    def make_empty(cls) -> CachedRequestData:
        return cls([], set(), [], {}, [], [], [])


@dataclass
class SchedulerOutput:
    """Without num_common_prefix_blocks, which comes and goes between versions."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    scheduled_encoder_inputs: dict[str, list[int]]
    finished_req_ids: set[str]
    free_encoder_mm_hashes: list[str]
    preempted_req_ids: set[str] | None = None


class PauseState(enum.IntEnum):
    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


class SchedulerInterface(ABC):
    """What EngineCore calls."""

    @abstractmethod
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput: ...
    @abstractmethod
    def get_grammar_bitmask(self, scheduler_output: Any) -> Any: ...
    @abstractmethod
    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]: ...
    @abstractmethod
    def update_draft_token_ids(self, draft_token_ids: Any) -> None: ...
    @abstractmethod
    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None: ...
    @abstractmethod
    def add_request(self, request: Any) -> None: ...
    @abstractmethod
    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]: ...
    @abstractmethod
    def has_request(self, request_id: str) -> bool: ...  # since 0.33
    @abstractmethod
    def get_num_unfinished_requests(self) -> int: ...
    @abstractmethod
    def has_finished_requests(self) -> bool: ...
    @property
    @abstractmethod
    def pause_state(self) -> PauseState: ...
    @abstractmethod
    def set_pause_state(self, pause_state: PauseState) -> None: ...
    @abstractmethod
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool: ...
    @abstractmethod
    def reset_encoder_cache(self) -> None: ...
    @abstractmethod
    def get_request_counts(self) -> tuple[int, int]: ...
    @abstractmethod
    def make_stats(self) -> Any: ...
    @abstractmethod
    def shutdown(self) -> None: ...

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    def has_requests(self) -> bool:
        return self.has_unfinished_requests() or self.has_finished_requests()


# --- the rest ---


class FullAttentionSpec: ...


class SlidingWindowSpec(FullAttentionSpec): ...


@dataclass
class PrefixCacheStats:
    queries: int = 0
    hits: int = 0

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        if not preempted:
            self.queries += num_tokens
            self.hits += num_hits


@dataclass
class SchedulerStats:
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
