"""Ranks in processes of their own, over torch.distributed: NCCL between GPUs, Gloo between CPUs.

The process groups are created directly, not as torch's default group, because a program can have several engines and
can use torch.distributed itself. Only this machine can connect to them.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import distributed_c10d

from testbed.errors import DeviceError

dist: Any = torch.distributed  # its type stubs are incomplete
c10d: Any = distributed_c10d

HOST = "127.0.0.1"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
JOIN_S = 60.0  # all ranks run when a group is made; one that has died since is not waited for longer

_environment_lock = threading.Lock()


class LostPeerError(DeviceError):
    """A collective failed: another rank has ended, or did not answer in time."""


class DistributedGroup:
    """One rank of a TensorGroup. A call does not wait for a GPU. It raises LostPeerError if it notices a lost peer."""

    def __init__(self, rank: int, size: int, backend: Any) -> None:
        """backend: a torch.distributed.Backend."""
        self.rank = rank
        self.size = size
        self._backend = backend
        self._reduce, self._gather = c10d.AllreduceOptions(), c10d.AllgatherOptions()
        self._reduce.asyncOp = self._gather.asyncOp = False  # on the current stream, where a graph can capture it

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums over all ranks, in place."""
        self._wait(self._backend.allreduce, [tensor], self._reduce)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[..., n] -> [..., ranks * n]."""
        parts = [tensor.new_empty(tensor.shape) for _ in range(self.size)]
        self._wait(self._backend.allgather, [parts], [tensor.contiguous()], self._gather)
        return torch.cat(parts, dim=-1)

    def abort(self) -> None:
        """Ends a collective on which a GPU waits; from any thread. (Between CPUs, a lost connection ends it.)"""
        self._backend.abort()

    def _wait(self, collective: Any, *arguments: Any) -> None:
        try:
            work = collective(*arguments)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise _lost(error) from None


def _lost(error: RuntimeError) -> LostPeerError:
    """The first line of the backend's message, without the place in its own source."""
    return LostPeerError(re.sub(r"^\[[^]]*:\d+\] ", "", str(error).partition("\n")[0]))


def host_store(size: int) -> Any:
    """Returns the store through which ranks connect: a server here, on a free port of this machine only."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        HOST, port, size, True, timedelta(seconds=JOIN_S), wait_for_workers=False, master_listen_fd=listener.detach()
    )


def find_store(port: int, size: int) -> Any:
    return dist.TCPStore(HOST, port, size, False, timedelta(seconds=JOIN_S))


def join(store: Any, rank: int, size: int, device_type: str, timeout_s: float) -> DistributedGroup:
    """Connects to the other ranks; every rank must call it. timeout_s: how long a collective waits for a silent rank.

    Raises LostPeerError.
    """
    try:
        group = DistributedGroup(rank, size, _backend(device_type, store, rank, size, timedelta(seconds=timeout_s)))
    except RuntimeError as error:
        raise _lost(error) from None
    group.all_reduce(torch.zeros(1, device=device_type))  # NCCL connects at the first collective: now, before loading
    return group


def _backend(device_type: str, *arguments: Any) -> Any:
    """Creates torch's backend. Environment variables that torch reads are set only for this call, not for other groups.

    Between GPUs it takes the current device. NCCL's watchdog must leave errors to us: it would end the driver's
    process, and with it the records.
    """
    if device_type == "cuda":
        with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
            return dist.ProcessGroupNCCL(*arguments)
    with _environment("GLOO_SOCKET_IFNAME", LOOPBACK):
        return dist.ProcessGroupGloo(*arguments)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable, for one thread at a time, and restores it afterwards."""
    with _environment_lock:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
