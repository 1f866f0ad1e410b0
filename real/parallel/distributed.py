"""Ranks in processes of their own, over torch.distributed: NCCL between GPUs, Gloo between CPUs.

The process groups are made directly, not as torch's default group: a program may hold several engines, and may use
torch.distributed for itself. Only this machine can reach them.
"""

from __future__ import annotations

import os
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

dist: Any = torch.distributed  # its type stubs leave out half of it
c10d: Any = distributed_c10d

HOST = "127.0.0.1"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
JOIN_S = 60.0  # everybody is there when a group is made; whoever died since is not waited for longer

_environment_lock = threading.Lock()


class LostPeerError(DeviceError):
    """A sum or a gather did not come about: another rank is gone, or silent for too long."""


class DistributedGroup:
    """One rank of a TensorGroup. A call does not wait for a GPU; it raises LostPeerError where it can know."""

    def __init__(self, rank: int, size: int, backend: Any) -> None:
        """backend: a torch.distributed.Backend."""
        self.rank = rank
        self.size = size
        self._backend = backend
        self._reduce, self._gather = c10d.AllreduceOptions(), c10d.AllgatherOptions()
        self._reduce.asyncOp = self._gather.asyncOp = False  # on the current stream, where a graph can capture it

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        self._wait(self._backend.allreduce, [tensor], self._reduce)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[..., n] -> [..., ranks * n]."""
        parts = [tensor.new_empty(tensor.shape) for _ in range(self.size)]
        self._wait(self._backend.allgather, [parts], [tensor.contiguous()], self._gather)
        return torch.cat(parts, dim=-1)

    def abort(self) -> None:
        """Frees whoever waits in a collective on a GPU. For any thread; between CPUs a broken connection does it."""
        self._backend.abort()

    def _wait(self, collective: Any, *arguments: Any) -> None:
        try:
            work = collective(*arguments)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise LostPeerError(str(error).partition("\n")[0]) from None


def host_store(size: int) -> Any:
    """Where the ranks find each other: a server of this process, on a free port that only this machine can reach."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        HOST, port, size, True, timedelta(seconds=JOIN_S), wait_for_workers=False, master_listen_fd=listener.detach()
    )


def find_store(port: int, size: int) -> Any:
    return dist.TCPStore(HOST, port, size, False, timedelta(seconds=JOIN_S))


def join(store: Any, rank: int, size: int, device_type: str, timeout_s: float) -> DistributedGroup:
    """Connects with the other ranks; each calls it. timeout_s: how long a collective waits for a rank that is silent.

    Raises LostPeerError.
    """
    try:
        group = DistributedGroup(rank, size, _backend(device_type, store, rank, size, timedelta(seconds=timeout_s)))
    except RuntimeError as error:
        raise LostPeerError(str(error).partition("\n")[0]) from None
    group.all_reduce(torch.zeros(1, device=device_type))  # NCCL connects with the first one; loading may part us
    return group


def _backend(device_type: str, *arguments: Any) -> Any:
    """What torch takes from the environment while it makes one is set for ours alone: groups of others are theirs.

    Between GPUs, those that are current: NCCL's watchdog leaves errors to us; it would end the driver with its records.
    """
    if device_type == "cuda":
        with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
            return dist.ProcessGroupNCCL(*arguments)
    with _environment("GLOO_SOCKET_IFNAME", LOOPBACK):
        return dist.ProcessGroupGloo(*arguments)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """The variable has this value within, for one thread at a time, and what it had before afterwards."""
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
