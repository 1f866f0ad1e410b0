"""A minimal stand-in for vLLM, so that the plug-ins in real/vllm are tested where vLLM is not installed.

    with stub_vllm():
        from real.vllm.scheduler import CoreInVllm

While it is there a real vLLM is out of sight, and with it go the modules that were imported against it.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from tests.real import vllm_stub_types as types

VERSION = "0.32.0"
RUNNERS = pytest.mark.parametrize("is_newer", [False, True], ids=["older runner", "newer runner"])
LOOPS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
NEED_VLLM = (
    "real.vllm.observer", "real.vllm.told", "real.vllm.scheduler", "real.vllm.seated",
    "experiments.serving.inside_vllm", "tests.real.vllm_stub_engine",
)  # fmt: skip


class Scheduler:
    """A scheduler small enough to be observed: `schedule` gives what a test has written into `plans`."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, block_size: int) -> None:
        self.vllm_config, self.kv_cache_config, self.block_size = vllm_config, kv_cache_config, block_size
        self.scheduler_config = vllm_config.scheduler_config
        self.max_model_len = vllm_config.model_config.max_model_len
        self.requests: dict[str, types.Request] = {}
        self.kv_cache_manager = vllm_config.kv_cache_manager
        self.calls: list[str] = []
        self.plans: list[types.SchedulerOutput] = []

    def add_request(self, request: types.Request) -> None:
        self.requests[request.request_id] = request

    def schedule(self, throttle_prefills: bool = False) -> types.SchedulerOutput:
        output = self.plans.pop(0)
        for name, num_tokens in output.num_scheduled_tokens.items():
            self.requests[name].num_computed_tokens += num_tokens
            self.requests[name].status = types.RequestStatus.RUNNING
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, types.EngineCoreOutputs]:
        results: dict[int, types.EngineCoreOutputs] = {}
        for name, token in model_runner_output.items():
            request = self.requests[name]
            request.append_output_token_ids(token)
            stopped = types.check_stop(request, self.max_model_len)
            made = types.EngineCoreOutput(
                name, [token], finish_reason=request.get_finished_reason() if stopped else None
            )
            results.setdefault(request.client_index, types.EngineCoreOutputs()).outputs.append(made)
            if stopped:
                del self.requests[name]
        return results

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[types.Request]:
        names = list(self.requests) if request_ids is None else request_ids
        names = [names] if isinstance(names, str) else names
        return [self.requests.pop(name) for name in names if name in self.requests]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self.calls.append("reset_prefix_cache")
        return not self.requests

    def get_request_counts(self) -> tuple[int, int]:
        num = sum(request.status == types.RequestStatus.RUNNING for request in self.requests.values())
        return num, len(self.requests) - num

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class AsyncScheduler(Scheduler):
    """The same, by the name that vLLM asks for where it plans ahead."""


def _of(*names: str) -> dict[str, Any]:
    return {name: getattr(types, name) for name in names}


_MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": VERSION},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.v1": {},
    "vllm.v1.core": {},
    "vllm.v1.core.sched": {},
    "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": AsyncScheduler},
    "vllm.v1.core.sched.interface": _of("PauseState", "SchedulerInterface"),
    "vllm.v1.core.sched.output": _of("CachedRequestData", "NewRequestData", "SchedulerOutput"),
    "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
    "vllm.v1.core.sched.utils": _of("check_stop"),
    "vllm.v1.engine": _of("EngineCoreEventType", "EngineCoreOutput", "EngineCoreOutputs", "FinishReason"),
    "vllm.v1.kv_cache_interface": _of("FullAttentionSpec", "SlidingWindowSpec"),
    "vllm.v1.metrics": {},
    "vllm.v1.metrics.stats": _of("PrefixCacheStats", "SchedulerStats"),
    "vllm.v1.request": _of("Request", "RequestStatus"),
}


@contextmanager
def stub_vllm() -> Iterator[None]:
    """The stub is importable as `vllm`. What was imported before is back afterwards."""
    before = _take_out()
    for name, names in _MODULES.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(names)
        _put(name, module)
    try:
        yield
    finally:
        _take_out()
        for name, module in before.items():
            _put(name, module)


def _take_out() -> dict[str, ModuleType]:
    """Every module of vLLM, and each that was imported against it."""
    names = [name for name in sys.modules if name.split(".")[0] == "vllm"]
    taken = {name: sys.modules.pop(name) for name in itertools.chain(names, NEED_VLLM) if name in sys.modules}
    for name in taken:
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(last, None)
    return taken


def _put(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)
