"""An engine in a process of its own, and its proxy in this process. Knows plans, results and how a process ends.

Plans are sent whole, with their rows; results come back with the times that the engine measured. A replica of several
ranks starts their processes itself. This module needs no torch; the engine's process does.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from real.config import EngineOptions, RealConfig
from real.driver import Computed, Work
from real.parallel.processes import Channel, Failure, describe_end, end_process, heard, spawn
from testbed.core.plan import BatchPlan
from testbed.errors import DeviceError
from testbed.made_rows import MadeRows
from testbed.specs.model import ModelSpec
from testbed.wording import count

POLL_S = 0.0001  # between two checks of a device that computes


class Described(NamedTuple):
    """What an engine reports about itself once it is created."""

    num_gpu_blocks: int
    num_cpu_blocks: int
    attention_name: str
    attention_reasons: dict[str, str]
    device_description: str
    load_format: str


@dataclass(frozen=True, slots=True)
class ReplicaSetup:
    """What a replica gets when it starts. num_ranks: tensor-parallel size."""

    spec: ModelSpec
    config: RealConfig
    options: EngineOptions
    num_ranks: int

    def work(self, channel: Channel) -> None:
        """Runs in the replica's process: creates the engine, then executes plans until the other end closes."""
        from real.parallel.backend import make_engine

        backend = make_engine(self.spec, self.config, self.options, self.num_ranks)
        channel.send(pickle.dumps(Described(*[getattr(backend, name) for name in Described._fields])))
        in_flight: deque[Any] = deque()
        while True:
            if in_flight and in_flight[0].is_done():
                channel.send(pickle.dumps(in_flight.popleft().wait()))
            elif channel.has_message(POLL_S if in_flight else None):
                message = channel.receive()
                if message is None:
                    return
                in_flight.append(backend.start(_unpacked(message)))


def _packed(plan: BatchPlan) -> bytes:
    """Pickles the plan with its rows."""
    return pickle.dumps(plan.as_dict() | {"rows": plan.scheduled})


def _unpacked(message: bytes) -> BatchPlan:
    fields = pickle.loads(message)
    return BatchPlan(**(fields | {"rows": MadeRows(fields["rows"])}))


class ReplicaEngine:
    """A RealBackend or a RankedBackend in another process. Implements testbed.core.interfaces.Backend.

    number: number of the replica. visible: the GPUs that it sees, as in CUDA_VISIBLE_DEVICES; None: those that this
    process sees. Loading starts at once, so several replicas load at the same time. Call `wait_until_ready` first.
    """

    def __init__(self, setup: ReplicaSetup, number: int, visible: str | None) -> None:
        self._number = number
        self._timeout_s = setup.config.rank_timeout_s
        environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        self._process, self._channel = spawn(self._timeout_s, environment)
        self._channel.send(pickle.dumps(setup))
        self._heard_s = time.monotonic()  # of the last message to or from it

    def wait_until_ready(self) -> Described:
        """Waits for the engine and returns its description. Raises its failure."""
        said = self._heard()
        assert isinstance(said, Described)
        return said

    def start(self, plan: BatchPlan) -> Work:
        self._heard_s = time.monotonic()
        try:
            self._channel.send_across(_packed(plan))  # results of earlier plans may be on their way
        except OSError:
            while True:  # skips results that were already sent, then raises the engine's failure
                self.receive()
        return Work(self._computed)

    @property
    def has_answer(self) -> bool:
        """Whether waiting for the oldest step in flight would not block. Raises the failure that ended the engine;
        DeviceError after backend.rank_timeout_s without a message."""
        if self._channel.has_message(0):
            return True
        if time.monotonic() - self._heard_s > self._timeout_s:
            raise self._silent()
        return False

    def fileno(self) -> int:
        """Returns a file descriptor that is readable when an answer has come."""
        return self._channel.fileno()

    def receive(self) -> Any:
        """Returns its next message. Raises its failure; DeviceError after backend.rank_timeout_s without a message."""
        if not self._channel.has_message(self._timeout_s):
            raise self._silent()
        return self._heard()

    def _computed(self) -> Computed:
        """Returns the result of the oldest plan in flight."""
        computed = self.receive()
        assert isinstance(computed, Computed)
        return computed

    def _silent(self) -> DeviceError:
        return DeviceError(
            f"replica {self._number} says nothing for {self._timeout_s:g} s; if it was only slow, raise "
            "backend.rank_timeout_s"
        )

    def _heard(self) -> Any:
        """Does the same as `receive`, without a time limit."""
        self._channel.has_message(None)  # waits here, as the socket's timeout for sending also holds for receiving
        try:
            message = self._channel.receive()
        except TimeoutError:  # within a message
            raise self._silent() from None
        self._heard_s = time.monotonic()
        if message is None:
            raise DeviceError(f"replica {self._number} {describe_end(self._process)}")
        who = f"replica {self._number}"
        said = heard(message, who)
        if isinstance(said, Failure):
            raise said.error(who)
        return said

    def close(self) -> None:
        """Ends its process. Can be called again."""
        self._channel.hang_up()
        end_process(self._process)


def start_replicas(setup: ReplicaSetup, num_replicas: int) -> tuple[list[ReplicaEngine], Described]:
    """Starts `num_replicas` engines of one setup, each on its own GPUs; on a CPU they share the threads. Returns one
    description for all: if blocks are measured, that of the engine with the fewest. Raises the failure of an engine;
    then no process is left running."""
    import torch

    from real.backend import check_host_memory
    from real.device import resolve_device

    visible: list[str | None] = [None] * num_replicas
    if resolve_device(setup.config.device).type == "cuda":
        visible = [*gpus_of_each(num_replicas, setup.num_ranks)]
    else:
        check_host_memory(setup.spec, setup.config, setup.options, setup.num_ranks, num_replicas)
        num_threads = setup.config.num_threads or torch.get_num_threads()
        setup = replace(setup, config=replace(setup.config, num_threads=max(1, num_threads // num_replicas)))
    engines: list[ReplicaEngine] = []
    try:
        for number, gpus in enumerate(visible):
            engines.append(ReplicaEngine(setup, number, gpus))
        described = [engine.wait_until_ready() for engine in engines]
    except BaseException:
        close_all(engines)
        raise
    least = min(described, key=lambda one: one.num_gpu_blocks)
    return engines, least


def close_all(engines: list[ReplicaEngine]) -> None:
    for engine in engines:
        engine.close()


def gpus_of_each(num_replicas: int, num_ranks: int) -> list[str]:
    """Returns the GPUs of each replica, as for CUDA_VISIBLE_DEVICES. Raises DeviceError if there are too few."""
    import torch

    found = torch.cuda.device_count()
    if num_replicas * num_ranks > found:
        raise DeviceError(
            f"backend.num_replicas is {num_replicas}, of {count(num_ranks, 'GPU')} each, but torch finds "
            f"{found} here; lower it, or set backend.device=cpu"
        )
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = named.split(",") if named else [str(index) for index in range(found)]
    return [",".join(names[number * num_ranks : (number + 1) * num_ranks]) for number in range(num_replicas)]
