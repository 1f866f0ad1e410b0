"""What a GPU that is not there (fake_cuda.py) is made of: its tensors, streams, events and graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.real.fake_cuda import FakeGPU

DEVICE = torch.device("cuda", 0)
Clock = dict[int, int]  # by stream, how many of its launches


class TroubleError(AssertionError):
    """What would be an error or a wrong result on a GPU."""


class DeviceTensor(Tensor):
    """Says that it lies on a GPU; `inner`, on the CPU, has its contents."""

    inner: Tensor
    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = is_meta = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="meta",  # what torch's C++ sees: a build for CPUs cannot index tensors of CUDA
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TroubleError(f"{func} of a tensor whose GPU is gone")


class Access(NamedTuple):
    begin: int
    end: int  # bytes of memory
    is_write: bool
    stream: int
    time: int  # the stream's
    what: str


class Launch(NamedTuple):
    """Work on the device. again: does it once more."""

    what: str
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    again: Callable[[], object]


class FakeStream:
    def __init__(self, gpu: FakeGPU) -> None:
        gpu.streams.append(self)
        self.number = len(gpu.streams)
        self.clock: Clock = {}

    def wait_stream(self, other: FakeStream) -> None:
        merge(self.clock, other.clock)

    def query(self) -> bool:
        return True


class FakeEvent:
    def __init__(self, gpu: FakeGPU, enable_timing: bool = False) -> None:
        self._gpu, self._has_timing = gpu, enable_timing
        self.clock: Clock | None = None
        self._at = 0

    def record(self) -> None:
        self._gpu.forbid_in_capture("an event of outside is recorded")
        self.clock, self._at = dict(self._gpu.stream.clock), self._gpu.num_launches

    def wait(self) -> None:
        self._gpu.forbid_in_capture("an event of outside is waited for")
        merge(self._gpu.stream.clock, self.clock or {})

    def query(self) -> bool:
        self._gpu.passed(self.clock or {})
        return True

    def synchronize(self) -> None:
        self._gpu.wait("an event", self.clock or {})

    def elapsed_time(self, end: FakeEvent) -> float:
        for event in (self, end):
            if not event._has_timing or event.clock is None:
                raise TroubleError("the time between events that have none")
            if not is_before(event.clock, self._gpu.host):
                raise TroubleError("the time of an event that is not known to be over")
        return (end._at - self._at) * 1e-3


class FakeGraph:
    """What was launched between the begin and the end of its capture. sizes: of the memory that it has for itself."""

    def __init__(self, gpu: FakeGPU) -> None:
        self._gpu = gpu
        self.launches: list[Launch] = []
        self.sizes: dict[int, int] = {}
        self.pool: object = self
        self.num_replays = 0
        gpu.graphs.add(self)

    def replay(self) -> None:
        self._gpu.forbid_in_capture("a graph is replayed")
        self.num_replays += 1
        for launch in self.launches:
            for tensor in (*launch.reads, *launch.writes):
                if tensor.numel() and place(tensor) not in self.sizes and not self._gpu.holds(tensor):
                    raise TroubleError(f"{launch.what} of a graph uses memory that was let go of")
            self._gpu.launch(launch)
            launch.again()


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


def is_before(clock: Clock, other: Clock) -> bool:
    return all(other.get(stream, 0) >= time for stream, time in clock.items())


def leaves_of(tree: Any) -> list[Any]:
    """What lies in lists, tuples and dictionaries of one another; torch's own takes most of the fake's time."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return [tree]
    return [leaf for one in tree for leaf in leaves_of(one)]


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with its leaves changed."""
    if isinstance(tree, dict):
        return {key: mapped(change, one) for key, one in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([mapped(change, one) for one in tree])
    return change(tree)
