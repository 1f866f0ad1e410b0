"""The engine over several ranks, which the driver uses as one Backend.

The driver's process is rank 0. It schedules, sends each plan, computes its own share, and is the only one that samples.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from real.backend import RealBackend, check_host_memory
from real.config import EngineOptions, RealConfig
from real.device import resolve_device
from real.driver import Computed, Work
from real.models.registry import check_supported
from real.parallel.distributed import DistributedGroup, LostPeerError, host_store, join
from real.parallel.processes import Ranks
from real.parallel.wire import pack
from real.parallel.worker import Setup
from testbed.core.plan import BatchPlan
from testbed.errors import DeviceError
from testbed.made_rows import MadeRows
from testbed.specs.model import ModelSpec
from testbed.wording import count

ABORT_S = 5.0  # limit for an aborted collective to leave the GPU


class RankedBackend:
    """A RealBackend in each of `num_ranks` processes, of which this is one. A testbed.core.interfaces.Backend.

    KV blocks, swap space and cpu_kv_bytes are per rank; a rank has a share of each block. If num_gpu_blocks is
    measured, it is that of the rank with the least memory. On CPUs the ranks share num_threads. Raises ModelError,
    ConfigError or DeviceError; then no process is left running.
    """

    def __init__(self, spec: ModelSpec, config: RealConfig, options: EngineOptions, num_ranks: int) -> None:
        device = resolve_device(config.device)
        check_supported(spec, options.sliding_window, num_ranks, options.max_model_len)
        if device.type == "cuda":
            _check_gpus(num_ranks)
        else:
            check_host_memory(spec, config, options, num_ranks)
            num_threads = config.num_threads or torch.get_num_threads()
            config = replace(config, num_threads=max(1, num_threads // num_ranks))
        store = host_store(num_ranks)
        setups = [
            Setup(rank, num_ranks, store.port, device.type, spec, config, options) for rank in range(1, num_ranks)
        ]
        self.num_ranks = num_ranks
        self._ranks = Ranks(setups, config.rank_timeout_s)
        self._ending = Ending(self._ranks)
        self._end = weakref.finalize(self, self._ending)  # ends the ranks even if `close` is never called
        try:
            with self._explained():
                self._ranks.wait_until_ready()
                if device.type == "cuda":
                    torch.cuda.set_device(0)
                group = join(store, 0, num_ranks, device.type, config.rank_timeout_s)
                if device.type == "cuda":
                    self._ranks.on_failure(group.abort)
                    self._ending.group, self._ending.stream = group, torch.cuda.current_stream()
                self._local = self._ending.local = RealBackend(spec, config, options, group)
        except BaseException:
            self._end()
            raise
        self._store = store  # kept alive: the other ranks stay connected to it
        self.num_gpu_blocks, self.num_cpu_blocks = self._local.num_gpu_blocks, self._local.num_cpu_blocks
        self.attention_name, self.attention_reasons = self._local.attention_name, self._local.attention_reasons
        self.device_description, self.load_format = self._local.device_description, self._local.load_format
        self.cache, self.runner = self._local.cache, self._local.runner  # those of this rank
        self.largest_captured, self.name_parts = self._local.largest_captured, self._local.name_parts

    def start(self, plan: BatchPlan) -> Work:
        """Launches one step on every rank. Measured times are those of this rank. Waiting raises the error that ended
        another rank. Raises DeviceError if the previous step was not waited for."""
        if self._ending.is_in_step or not self._end.alive:
            raise DeviceError("the ranks were stopped in the middle of a step, or closed; load the model again")
        self._ending.is_in_step = True
        began_ns = time.perf_counter_ns()
        rows = plan.scheduled
        with self._explained():
            self._ranks.send(pack(plan, rows))
            send_ns = time.perf_counter_ns() - began_ns
            work = self._local.start(plan.replace(rows=MadeRows(rows)))
        return work._replace(wait=partial(self._finish, work, send_ns))

    def _finish(self, work: Work, send_ns: int) -> Computed:
        """Waits for a step. Its prepare_ns includes the time to send the plan."""
        with self._explained():
            self._ranks.wait_for(work.is_done)
            computed = work.wait()
        self._ending.is_in_step = False
        spans = computed.spans
        return computed._replace(spans=spans.replace(prepare_ns=spans.prepare_ns + send_ns))

    def close(self) -> None:
        """Ends the other ranks; the engine cannot be used afterwards. Can be called again."""
        self._end()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raises the failure of another rank instead of its consequences here, and instead of returning results that it
        may have spoiled."""
        try:
            yield
        except LostPeerError as error:
            raise self._ranks.cause(str(error)) from None
        except RuntimeError:
            self._ranks.check()
            raise
        self._ranks.check()


def make_engine(
    spec: ModelSpec, config: RealConfig, options: EngineOptions, num_ranks: int
) -> RealBackend | RankedBackend:
    """Loads a model on `num_ranks` ranks."""
    return RealBackend(spec, config, options) if num_ranks == 1 else RankedBackend(spec, config, options, num_ranks)


class Ending:
    """Ends an engine. It refers only to the engine's parts, so that it can run as a finalizer. Called once.

    NCCL frees its memory only when no captured graph that uses it is left, so graphs are released before the group is
    aborted. But a graph can only be released when the GPU is done with it. A step in flight may be waiting for a rank
    that never got its plan. Then the abort starts first, in its own thread, which frees the GPU.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.local: RealBackend | None = None
        self.group: DistributedGroup | None = None  # between GPUs
        self.stream: torch.cuda.Stream | None = None  # on which steps run
        self.is_in_step = False

    def __call__(self) -> None:
        group, aborting = self.group, None
        if group is not None and self.is_in_step:
            aborting = threading.Thread(target=group.abort, name="abort", daemon=True)
            aborting.start()
            self._wait_until_idle()
        if self.local is not None:
            self.local.close()
        self._ranks.close()
        if aborting is not None:
            aborting.join()
        elif group is not None:
            group.abort()  # no step in flight: the graphs are gone, NCCL frees its memory

    def _wait_until_idle(self) -> None:
        """Waits until the GPU is idle, at most ABORT_S. Polls, so that other threads can run: releasing a graph that is
        still in use would block them."""
        deadline = time.monotonic() + ABORT_S
        while not self._is_idle() and time.monotonic() < deadline:
            time.sleep(0.001)

    def _is_idle(self) -> bool:
        assert self.stream is not None
        try:
            return self.stream.query()
        except RuntimeError:  # an earlier kernel has failed: nothing runs any more
            return True


def _check_gpus(num_ranks: int) -> None:
    found = torch.cuda.device_count()
    if num_ranks > found:
        raise DeviceError(
            f"device.tensor_parallel_size is {num_ranks}, but torch finds {count(found, 'GPU')} here; lower "
            "it, or set backend.device=cpu"
        )
