"""vLLM's own schedulers, with a log of their requests and of their decisions at each step.

They are set as `scheduler_cls`, in process or served. The log's file is given by
`additional_config={"testbed": {"observe": "log.jsonl"}}` or by TESTBED_OBSERVE in the environment; if it exists, the
log is log-1.jsonl and so on. It has one JSON object per line and is flushed at each step, so it is complete up to the
last step even if the engine is killed. `testbed observe import <log>` makes a run folder of it; docs/vllm.md describes
the lines.

Depends only on vLLM (with its torch) and the standard library. If the log cannot be written any more, it is closed with
a warning, and serving goes on.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, Final

import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

VERSION: Final = 1
VARIABLE: Final = "TESTBED_OBSERVE"
SCHEDULER_FIELDS: Final = (
    "max_num_seqs", "max_num_batched_tokens", "policy", "long_prefill_token_threshold", "async_scheduling", "watermark",
    "scheduler_reserve_full_isl", "max_num_active_seqs", "max_num_scheduled_tokens",
    "long_prefill_token_threshold_adaptive", "enable_chunked_prefill", "prefill_schedule_interval",
)  # fmt: skip
UNKNOWN_TO_US: Final = ("speculative_config", "lora_config", "kv_transfer_config", "ec_transfer_config")
_logger = init_logger("vllm.testbed")
_encode: Final = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode  # built once: half of the cost


class Log:
    """The log of one scheduler. now_ns: reads the log's clock."""

    def __init__(self, scheduler: Any) -> None:
        settings = (scheduler.vllm_config.additional_config or {}).get("testbed") or {}
        _check(settings)
        path = settings.get("observe") or os.environ.get(VARIABLE)
        if not path:
            raise ValueError(
                'tell the observer where to write: additional_config={"testbed": {"observe": "log.jsonl"}}, or '
                f"{VARIABLE}=log.jsonl"
            )
        self._ids = settings.get("tokens", "ids") == "ids"  # whether to write token ids instead of their number
        self.now_ns = time.monotonic_ns
        self._file: Any = _new_file(path)
        self._scheduler = scheduler
        self._num_plans = self._num_commits = 0  # vLLM commits in the order of its plans
        self._is_in: set[str] = set()  # running requests, according to plans
        self._write({"kind": "observed", "version": VERSION, **describe(scheduler), "ns": self.now_ns()})

    def added(self, request: Any) -> None:
        prompt = request.prompt_token_ids or []
        self.event(
            "add", id=request.request_id, arrival_unix_ns=round(request.arrival_time * 1e9),
            prompt=list(prompt) if self._ids else len(prompt), max_tokens=request.max_tokens,
            priority=request.priority, salt=request.cache_salt or "",
            skips_cache=bool(getattr(request, "skip_reading_prefix_cache", False)), unknown=unknown_to_us(request),
        )  # fmt: skip

    def planned(self, began_ns: int, output: Any) -> None:
        if _is_empty(output):
            return
        scheduler, tokens = self._scheduler, output.num_scheduled_tokens
        preempted = sorted(output.preempted_req_ids or ())
        self._is_in.difference_update(preempted)
        admitted = [name for name in tokens if name not in self._is_in]
        self._is_in.update(admitted)
        starts = {name: scheduler.requests[name].num_computed_tokens - tokens[name] for name in admitted}
        num_running, num_waiting = scheduler.get_request_counts()
        self._write(
            {
                "kind": "plan", "step": self._num_plans, "began_ns": began_ns, "ns": self.now_ns(),
                "committed": self._num_commits, "scheduled": tokens, "admitted": starts, "preempted": preempted,
                "free_blocks": free_blocks(scheduler), "num_running": num_running, "num_waiting": num_waiting,
            },
            is_last=True,
        )  # fmt: skip
        self._num_plans += 1

    def committed(self, began_ns: int, output: Any, results: Any) -> None:
        if _is_empty(output):
            return
        emitted, ended = {}, {}
        for result in results.values():
            for one in result.outputs:
                if one.new_token_ids:
                    emitted[one.request_id] = list(one.new_token_ids) if self._ids else len(one.new_token_ids)
                if one.finish_reason is not None:
                    ended[one.request_id] = str(one.finish_reason)
        self._is_in.difference_update(ended)
        self._write(
            {
                "kind": "commit", "step": self._num_commits, "began_ns": began_ns, "ns": self.now_ns(),
                "emitted": emitted, "ended": ended, "free_blocks": free_blocks(self._scheduler),
            },
            is_last=True,
        )  # fmt: skip
        self._num_commits += 1

    def event(self, kind: str, **fields: Any) -> None:
        """Writes a line about an event between plans and commits."""
        place = {"plans": self._num_plans, "commits": self._num_commits}
        self._write({"kind": kind, "ns": self.now_ns(), **place, **fields})

    def aborted(self, request_id: str) -> None:
        self._is_in.discard(request_id)
        self.event("abort", id=request_id)

    def close(self) -> None:
        try:
            if self._file is not None:
                self._file.close()  # writes what is left, which can fail too
        except OSError as error:
            self._give_up(error)
        self._file = None

    def _write(self, line: dict[str, Any], *, is_last: bool = False) -> None:
        """Writes a line. is_last: the last of a group of lines, after which the file is flushed."""
        if self._file is None:
            return
        try:
            self._file.write(_encode(line) + "\n")
            if is_last:
                self._file.flush()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        _logger.warning("the testbed's log is given up at step %d: %s", self._num_plans, error)
        self._file = None


def _is_empty(output: Any) -> bool:
    """Whether a step has no request and no preemption; such steps are not logged."""
    return not output.total_num_scheduled_tokens and not output.preempted_req_ids


def _check(settings: Any) -> None:
    """Raises ValueError for unknown settings."""
    for key, value in settings.items() if isinstance(settings, dict) else (("", settings),):
        if not (isinstance(value, str) if key == "observe" else key == "tokens" and value in ("ids", "lengths")):
            found = f"{key}={value!r}" if key else repr(value)
            raise ValueError(
                f'additional_config["testbed"] has {found}; the observer has observe (a file), tokens (ids or lengths)'
            )


def _new_file(path: str) -> Any:
    """Opens a new file of this name; if it exists, with the next free number (log-1.jsonl). So no log is overwritten,
    and no two engines write to the same one."""
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise ValueError(f"the observer's log is to be {path}, and there is no such folder: make it, or name another")
    if os.path.exists(path) and not os.path.isfile(path):
        return open(path, "w", encoding="utf-8")
    place, number = path, 0
    stem, suffix = os.path.splitext(path)
    while True:
        try:
            file = open(place, "x", encoding="utf-8")  # noqa: SIM115  open as long as the engine lives
            break
        except FileExistsError:
            number += 1
            place = f"{stem}-{number}{suffix}"
    if number:
        _logger.warning("the testbed's log is written to %s: %s is there already", place, path)
    return file


def free_blocks(scheduler: Any) -> int:
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def describe(scheduler: Any) -> dict[str, Any]:
    """Returns the scheduler's configuration, model and device; num_gpu_blocks is without vLLM's null block."""
    config = scheduler.vllm_config
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    groups = [type(one.kv_cache_spec).__name__ for one in scheduler.kv_cache_config.kv_cache_groups]
    return {
        "vllm": vllm.__version__,
        "scheduler": type(scheduler).__name__,
        "unix_ns": time.time_ns(),
        "config": {name: getattr(scheduler.scheduler_config, name, None) for name in SCHEDULER_FIELDS}
        | {
            "block_size": scheduler.block_size,
            "num_gpu_blocks": scheduler.kv_cache_config.num_blocks - 1,
            "num_kv_cache_groups": len(groups),
            "kv_cache_specs": groups,
            "max_model_len": scheduler.max_model_len,
            "prefix_caching": bool(cache.enable_prefix_caching),
            "kv_dtype": str(cache.cache_dtype),
        },
        "unknown": [name for name in UNKNOWN_TO_US if getattr(config, name, None) is not None],
        "model": {"name": str(model.model), "dtype": str(model.dtype).removeprefix("torch."),
                  "hf_config": json.loads(model.hf_text_config.to_json_string(use_diff=False))},
        "device": {"type": str(config.device_config.device_type), "name": device_name(),
                   "tensor_parallel_size": parallel.tensor_parallel_size,
                   "pipeline_parallel_size": parallel.pipeline_parallel_size,
                   "data_parallel_size": parallel.data_parallel_size},
    }  # fmt: skip


def unknown_to_us(request: Any) -> str:
    """Returns a feature that a request uses and that this testbed lacks; empty: none."""
    if request.sampling_params is None:
        return "pooling"
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "prompts of embeddings"
    if getattr(request, "structured_output_request", None) is not None:
        return "structured output"
    if request.lora_request is not None:
        return "LoRA"
    if request.mm_features:
        return "multimodal inputs"
    if getattr(request, "resumable", False):
        return "streaming sessions"
    return ""


def device_name() -> str:
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"


class ObservedScheduler(Scheduler):
    """vLLM's synchronous scheduler, observed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.scheduler_config.async_scheduling and not isinstance(self, AsyncScheduler):
            raise ValueError(
                "vLLM schedules asynchronously, and ObservedScheduler does not: take real.vllm.ObservedAsyncScheduler, "
                "or --no-async-scheduling"
            )
        self.testbed_log = Log(self)

    def add_request(self, request: Any) -> None:
        self.testbed_log.added(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        began_ns = self.testbed_log.now_ns()
        output = super().schedule(*args, **kwargs)
        self.testbed_log.planned(began_ns, output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        began_ns = self.testbed_log.now_ns()
        results = super().update_from_output(scheduler_output, model_runner_output)
        self.testbed_log.committed(began_ns, scheduler_output, results)
        return results

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """Ends requests one by one. For several at once vLLM frees blocks in the order of a set, which no replay can
        reproduce."""
        if request_ids is None:
            request_ids = list(self.requests)
        ended: list[Any] = []
        for name in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if name in self.requests:
                self.testbed_log.aborted(name)
            ended += super().finish_requests(name, finished_status) or ()
        return ended

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> Any:
        is_reset = super().reset_prefix_cache(reset_running_requests, *args, **kwargs)
        self.testbed_log.event("reset_prefix_cache", preempts=bool(reset_running_requests), is_reset=bool(is_reset))
        return is_reset

    def shutdown(self) -> None:
        self.testbed_log.close()
        super().shutdown()


class ObservedAsyncScheduler(ObservedScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler, observed. When it schedules asynchronously, vLLM requires an AsyncScheduler."""
