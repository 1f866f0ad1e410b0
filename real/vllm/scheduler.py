"""This testbed's core as vLLM's scheduler: implements vllm.v1.core.sched.interface.SchedulerInterface.

It decides nothing: plans come from a `Steering` in this process. Features of vLLM that this testbed lacks are rejected
by name: at the start if the engine is configured with them, otherwise with the request that uses them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Protocol

import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine import FinishReason as Reason
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.request import RequestStatus

from real.vllm import check_version
from real.vllm.observer import unknown_to_us
from real.vllm.told import Launched, Translator
from testbed.core.outcome import Outcome
from testbed.core.plan import BatchPlan
from testbed.errors import ConfigError, RequestError

_logger = init_logger("vllm.testbed")


class Steering(Protocol):
    """Makes the plans and gets the outcomes. cached_block_size: block size of the prefix cache; None: no such cache."""

    cached_block_size: int | None

    def added(self, name: str, request: Any) -> None:
        """Is called when vLLM gets a request, from us or from its own clients. name: our id."""
        ...

    def aborted(self, name: str) -> None: ...

    def reset_prefixes(self) -> None:
        """Makes the next plan preempt all running requests; no request finds earlier KV in the cache any more."""
        ...

    def next_plan(self) -> BatchPlan | None:
        """Returns the plan to launch now; None: nothing to do."""
        ...

    def took(self, outcomes: tuple[Outcome, ...]) -> list[tuple[str, str]]:
        """Takes the outcomes of the oldest plan in flight; returns (id, message) of requests that can never fit."""
        ...

    def num_requests(self) -> tuple[int, int]:
        """Returns the numbers of running and of waiting requests."""
        ...

    def kv_usage(self) -> float:
        """Returns the share of the KV blocks in use."""
        ...

    def close(self) -> None: ...


class CoreInVllm(SchedulerInterface):
    """See the module's docstring. A subclass creates the steering (`make_steering`).

    num_gpu_blocks: without vLLM's null block. Raises ConfigError at the start for features that this testbed lacks.
    """

    connector = None  # EngineCore reads both
    ec_connector = None

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        structured_output_manager: Any,
        block_size: int,
        *more: Any,
        include_finished_set: bool = False,
        log_stats: bool = False,
        **options: Any,
    ) -> None:
        check_version(vllm.__version__)
        check_engine(vllm_config, kv_cache_config)
        self.vllm_config, self.kv_cache_config = vllm_config, kv_cache_config
        self.scheduler_config = vllm_config.scheduler_config
        self.block_size = block_size
        self.num_gpu_blocks = int(kv_cache_config.num_blocks) - 1
        self.max_model_len = int(vllm_config.model_config.max_model_len)
        self._log_stats = log_stats
        self._is_newer = bool(getattr(vllm_config, "use_v2_model_runner", False))  # its newer model runner
        self._pause_state = PauseState.UNPAUSED
        self._names: dict[str, str] = {}  # our ids by vLLM's, which have a suffix
        self._launched: dict[int, Launched] = {}  # by the identity of the scheduler output that was sent
        self._refused: list[Any] = []  # rejected requests, which are reported with the next step
        self._held: dict[str, Any] = {}  # by our ids, requests that came while vLLM was paused
        self._finished_sets: dict[int, set[str]] | None = defaultdict(set) if include_finished_set else None
        self.steering = self.make_steering()
        self._translator = Translator(
            max_model_len=self.max_model_len,
            max_held=self.scheduler_config.max_num_seqs if self._is_newer else None,
            log_stats=log_stats,
            cached_block_size=self.steering.cached_block_size,
        )

    def make_steering(self) -> Steering:
        raise NotImplementedError

    # --- requests ---

    def name_of(self, request: Any) -> str:
        """Returns our id of a request that vLLM adds."""
        return str(request.request_id)

    def add_request(self, request: Any) -> None:
        before = self._names.get(request.request_id, "")
        if before in self._translator.live or before in self._held:
            raise RequestError(f"request id {request.request_id!r} is in use; ids of live requests must differ")
        name = self.name_of(request)
        why = unknown_to_us(request) or self._not_returned(request)
        self._names[request.request_id] = name
        if why:
            self._refuse(request, f"this testbed's scheduler has no {why}")
            return
        if self._pause_state == PauseState.UNPAUSED:
            self._take(name, request)
        else:
            self._held[name] = request

    def _take(self, name: str, request: Any) -> None:
        try:
            self.steering.added(name, request)
        except RequestError as error:
            self._refuse(request, str(error))
        else:
            self._translator.added(name, request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> list[Any]:
        """Aborts requests, also while a plan is in flight; its tokens for them are dropped."""
        if request_ids is None:
            request_ids = list(self._names)
        ended = []
        for vllm_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            name = self._names.pop(vllm_id, "")
            told = self._translator.live.get(name)
            request = self._held.pop(name, None) if told is None else told.request
            if request is None:
                continue
            request.status = finished_status
            ended.append(request)
            if self._finished_sets is not None:
                self._finished_sets[request.client_index].add(request.request_id)
            if told is not None:
                self._translator.forget(name)
                self.steering.aborted(name)
        return ended

    def _not_returned(self, request: Any) -> str:
        """Returns an output that a request asks for and that workers do not send back; empty: none."""
        params = request.sampling_params
        if getattr(params, "prompt_logprob_token_ids", None) is not None:
            return "prompt_logprob_token_ids"
        if self._is_newer and getattr(params, "prompt_logprobs", None) is not None:
            return "prompt_logprobs with vLLM's newer model runner, which forgets those of a preempted prefill"
        return ""

    def _refuse(self, request: Any, message: str) -> None:
        _logger.error("request %s ends with an error: %s", request.request_id, message)
        self._refused.append(request)

    # --- steps ---

    def schedule(self, throttle_prefills: bool = False) -> Any:
        plan = None if self._is_still else self.steering.next_plan()
        if plan is None:
            return self._translator.empty()
        output, launched = self._translator.scheduled(plan)
        self._launched[id(output)] = launched
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        launched = self._launched.pop(id(scheduler_output), None)
        outputs: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        if launched is not None:
            outcomes, outputs = self._translator.outcomes(launched, model_runner_output)
            for name, message in self.steering.took(outcomes):
                told = self._translator.live.get(name)
                if told is not None:
                    self._translator.forget(name)
                    self._refuse(told.request, message)
        for request in self._refused:
            request.status = RequestStatus.FINISHED_ABORTED
            outputs[request.client_index].append(
                EngineCoreOutput(request_id=request.request_id, new_token_ids=[], finish_reason=Reason.ERROR)
            )
        self._refused = []
        for made in outputs.values():
            for one in made:
                if one.finish_reason is not None:
                    self._names.pop(one.request_id, None)
        return self._grouped(outputs)

    def _grouped(self, outputs: dict[int, list[EngineCoreOutput]]) -> dict[int, EngineCoreOutputs]:
        """Groups outputs by client; the first group gets the statistics."""
        grouped = {client: EngineCoreOutputs(outputs=made) for client, made in outputs.items()}
        if self._finished_sets is not None:
            for client, made in outputs.items():
                self._finished_sets[client].update(one.request_id for one in made if one.finish_reason is not None)
            for client, names in self._finished_sets.items():
                grouped.setdefault(client, EngineCoreOutputs()).finished_requests = names
            self._finished_sets = defaultdict(set)
        stats = self.make_stats()
        if stats is not None:
            if not grouped:
                grouped[0] = EngineCoreOutputs()
            next(iter(grouped.values())).scheduler_stats = stats
        return grouped

    # --- state ---

    def get_num_unfinished_requests(self) -> int:
        """Returns how many requests need steps. 0 while everything is paused, which vLLM waits for."""
        return 0 if self._is_still else len(self._translator.live) + len(self._refused)

    def has_request(self, request_id: str) -> bool:
        """Whether a request, by vLLM's id, has not ended. Called by vLLM from 0.33 on."""
        return request_id in self._names

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0 or (bool(self._launched) and not self._is_still)

    def has_finished_requests(self) -> bool:
        """Whether the workers have to forget a request. False while everything is paused: the step after the pause
        tells them, and asks the steering, which must see the aborts too."""
        return bool(self._translator.finished) and not self._is_still

    @property
    def _is_still(self) -> bool:
        return bool(self._pause_state == PauseState.PAUSED_ALL)

    def get_request_counts(self) -> tuple[int, int]:
        return self.steering.num_requests()

    def get_kv_cache_usage(self) -> float:
        return self.steering.kv_usage()

    def make_stats(self, *given: Any, **more: Any) -> SchedulerStats | None:
        if not self._log_stats:
            return None
        num_running, num_waiting = self.steering.num_requests()
        hits, self._translator.hits = self._translator.hits, PrefixCacheStats()
        return SchedulerStats(
            num_running_reqs=num_running, num_waiting_reqs=num_waiting, kv_cache_usage=self.steering.kv_usage(),
            prefix_cache_stats=hits,
        )  # fmt: skip

    @property
    def pause_state(self) -> Any:
        return self._pause_state

    def set_pause_state(self, pause_state: Any) -> None:
        """Sets the pause. New requests are held back until its end; earlier ones go on, unless everything is paused."""
        self._pause_state = pause_state
        if pause_state == PauseState.UNPAUSED:
            held, self._held = self._held, {}
            for name, request in held.items():
                self._take(name, request)

    def reset_prefix_cache(self, reset_running_requests: bool = False, *given: Any, **more: Any) -> bool:
        """Resets the prefix cache, so that no request finds earlier KV; returns whether it was done. With
        reset_running_requests, the next plan preempts running requests, whose tokens in flight still come. Without it,
        the reset is rejected while any request holds blocks, as in vLLM."""
        if not reset_running_requests and self._translator.num_holders:
            _logger.warning("the prefix cache is not reset: %d requests hold blocks", self._translator.num_holders)
            return False
        self.steering.reset_prefixes()
        self._translator.hits.reset = True
        return True

    def shutdown(self) -> None:
        self.steering.close()

    # --- features that this testbed lacks ---

    def _nothing(self, *given: Any, **more: Any) -> None:
        """Answers what vLLM asks of these features."""

    get_grammar_bitmask = get_kv_connector = get_ec_connector = get_kv_event_publisher_config = _nothing
    update_draft_token_ids = update_draft_token_ids_in_output = reset_encoder_cache = _nothing


def check_engine(config: Any, kv_cache_config: Any) -> None:
    """Raises ConfigError naming the features of vLLM's configuration that this scheduler lacks."""
    groups = kv_cache_config.kv_cache_groups
    model = config.model_config
    wanted = {
        "speculative decoding": config.speculative_config is not None,
        "LoRA": config.lora_config is not None,
        "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
        "data parallelism": getattr(config.parallel_config, "data_parallel_size", 1) > 1,
        "KV connectors": config.kv_transfer_config is not None,
        "encoder-cache connectors": getattr(config, "ec_transfer_config", None) is not None,
        "KV events": getattr(config.kv_events_config, "enable_kv_cache_events", False),
        "multimodal models": bool(getattr(model, "is_multimodal_model", False)),
        "returning routed experts": getattr(model, "enable_return_routed_experts", False)
        or getattr(getattr(config, "aux_output_config", None), "enable_return_routed_experts", False),
        "returning sampling masks": bool(getattr(model, "return_sampling_mask", False)),
        "encoder-decoder models": bool(getattr(model, "is_encoder_decoder", False)),
        "pooling models": getattr(model, "runner_type", "generate") != "generate",
        f"{len(groups)} groups of KV caches": len(groups) != 1,
        "KV caches other than of full attention": any(
            type(group.kv_cache_spec) is not FullAttentionSpec for group in groups
        ),
    }
    found = [name for name, is_wanted in wanted.items() if is_wanted]
    if found:
        raise ConfigError(
            f"this testbed's scheduler has no {', no '.join(found)}: run vLLM without, or with its own scheduler "
            "(real.vllm.ObservedScheduler logs what that does)"
        )
