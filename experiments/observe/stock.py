"""`backend.decides=vllm`: replays a trace on vLLM with vLLM's own scheduler, observes it, and makes a run folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from experiments.configuration.compose import compose_config
from experiments.configuration.config import RunConfig
from experiments.configuration.own_class import told
from experiments.conform.replay import composition_of
from experiments.conform.systems import SYSTEMS
from experiments.observe.importing import import_own
from experiments.observe.log import Sender
from experiments.runs.prepare import ReplayLog
from experiments.runs.run_folder import describe_failure, set_aside
from experiments.wiring.build_engine import build_vllm_backend
from real.clocks import RealTimeClock, make_clock
from real.replay import ReplayLag
from real.vllm.config import VllmConfig
from testbed.core.commands import Abort, Arrive
from testbed.core.interfaces import Inbox
from testbed.core.outcome import Finished, FinishReason
from testbed.core.request import Request
from testbed.errors import ConfigError, DeviceError, RunFolderError, TestbedError
from testbed.foreign_text import shown
from testbed.traces.schema import Trace

LOG_FILE = "observed.jsonl"
_COMPOSITIONS = ("unified", *(composition_of(one.options)["composition"] for one in SYSTEMS.values() if one.options))
_TOLD = (  # settings of our scheduler that are passed on to vLLM's own, or that have no effect there
    "name", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "long_prefill_token_threshold", "queue_order",
    "async_scheduling",
)  # fmt: skip
_TOLD_OF_CACHE = (
    "block_size", "num_gpu_blocks", "num_cpu_blocks", "swap_space_gib", "gpu_memory_utilization", "prefix_caching",
    "kv_dtype",
)  # fmt: skip


def replay_stock(
    config: RunConfig, trace: Trace, inbox: Inbox, folder: Path, command: str, told: dict[str, Any]
) -> KeyboardInterrupt | TestbedError | None:
    """Runs the trace and makes `folder`, to which no other process may write, a run folder. told: the options for
    vLLM's scheduler, options_of_stock(config). Returns the failure that ended the run early, or None; the folder then
    holds the finished steps. Raises TestbedError if there is no run: vLLM did not start, or finished no step."""
    assert isinstance(config.backend, VllmConfig)
    log = folder / LOG_FILE
    backend, earlier = _started(config, log, told)
    clock = make_clock(config.backend, backend)
    clock.start()
    sender, replayed = Sender([], backend.log_by(clock.now_ns)), ReplayLog(config, clock=clock)
    serve = partial(_serve, backend, inbox, clock, sender.requests, replayed.lags[0])
    failures = [_failure_of(do) for do in (serve, backend.close)]
    failure = failures[0] or failures[1]
    said = replayed.describe(num_steps=0)
    measured = said | {"host": {"core_wait_share": said["host"]["core_wait_share"]}}  # vLLM tells no more of it
    try:
        import_own(log, folder, config, trace, sender, measured, is_cut=failure is not None, command=command)
    except (OSError, TestbedError) as error:
        if isinstance(failure, KeyboardInterrupt):
            raise failure from error
        why = "" if failure is None else f"{failure}; "
        raise RunFolderError(
            f"{why}no run could be made of the log ({describe_failure(error)}); it is kept: "
            f"testbed observe import {log}"
        ) from failure
    if earlier is not None and config.overwrite and failure is None:
        earlier.unlink()
    return failure


def _failure_of(do: Callable[[], None]) -> KeyboardInterrupt | TestbedError | None:
    """Calls `do`; returns what it raised, or None. Other exceptions of vLLM become a DeviceError of one line."""
    try:
        do()
    except (KeyboardInterrupt, TestbedError) as error:
        return error
    except Exception as error:  # noqa: BLE001  (whatever vLLM raises: what it has done until then is kept)
        failure = DeviceError(f"vLLM raised {told(error)}")
        failure.__cause__ = error
        return failure
    return None


def _started(config: RunConfig, log: Path, told: dict[str, Any]) -> tuple[Any, Path | None]:
    """Starts vLLM without overwriting a log: an earlier log is renamed. Returns the backend and the earlier log, if
    there is one. If vLLM does not start, the earlier log is restored."""
    earlier = set_aside(log, log) if log.exists() else None
    try:
        backend = build_vllm_backend(config, observe=log, told=told)
    except BaseException:
        log.unlink(missing_ok=True)  # the beginning of a log
        if earlier is not None:
            earlier.replace(log)
        raise
    return backend, earlier


def options_of_stock(config: RunConfig) -> dict[str, Any]:
    """Returns the options of vLLM's own scheduler, besides its limits, as arguments of vllm.LLM. Raises ConfigError for
    settings that it does not have: a run must not be labeled with a policy that was not used."""
    scheduler, cache = config.scheduler, config.cache
    preset = "vllm_v1_async" if scheduler.async_scheduling else "vllm_v1"
    usual = compose_config([f"scheduler={preset}"])
    differing = {
        f"{group}.{field.name}": value
        for group, here, there, told in (
            ("scheduler", scheduler, usual.scheduler, _TOLD), ("cache", cache, usual.cache, _TOLD_OF_CACHE)
        )
        for field in fields(there)
        if field.name not in told and (value := getattr(here, field.name)) != getattr(there, field.name)
    }  # fmt: skip
    if scheduler.composition in _COMPOSITIONS:
        differing.pop("scheduler.composition", None)
    if not cache.watermark:
        differing.pop("cache.watermark", None)
    if scheduler.queue_order not in ("fcfs", "priority"):
        differing["scheduler.queue_order"] = scheduler.queue_order
    for key, value in differing.items():
        raise ConfigError(
            f"backend.decides=vllm: vLLM's own scheduler, which scheduler={preset} mirrors, has no {key}={shown(value)}"
            f", as scheduler={scheduler.name} is set: take {preset} with your bounds, or leave backend.decides out"
        )
    threshold = scheduler.long_prefill_token_threshold
    return {"scheduling_policy": scheduler.queue_order} | (
        {"long_prefill_token_threshold": threshold} if threshold else {}
    )


def _serve(backend: Any, inbox: Inbox, clock: RealTimeClock, sent: list[Request], lag: ReplayLag) -> None:
    """The serving loop: adds and aborts the requests that are due, then lets vLLM take a step."""
    live: dict[str, Request] = {}
    while True:
        now_ns = clock.now_ns()
        for event in inbox.due(now_ns):
            if isinstance(event, Arrive):
                sent.append(event.request)
                lag.arrived(event.request, now_ns, 0)
                live[event.request.request_id] = event.request
                backend.add(event.request)
            elif isinstance(event, Abort) and live.pop(event.request_id, None) is not None:
                backend.abort(event.request_id)
        if live:
            clock.before_step()
            ended = [live.pop(name) for name in backend.step_alone() if name in live]
            now_ns = clock.now_ns()
            lag.step_ended(now_ns)
            if ended:
                inbox.finished([Finished(request, FinishReason.LENGTH, "", 0, ()) for request in ended], now_ns)
            continue
        next_ns = inbox.next_ns()
        if next_ns is None:
            return
        clock.wait_until(next_ns)
