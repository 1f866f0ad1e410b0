"""The device of the engine, its number format and description, and the measurement of a step's time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch

from real.config import DTYPES
from real.cpu_name import cpu_name
from real.parallel.group import SINGLE, TensorGroup
from testbed.errors import ConfigError, DeviceError
from testbed.specs.model import ModelSpec

MEMORY_WORDS = ("out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation")


class Placement(NamedTuple):
    """The device and format of tensors, and the ranks over which they are split."""

    device: torch.device
    dtype: torch.dtype
    group: TensorGroup = SINGLE


def resolve_device(name: str) -> torch.device:
    """`auto`, `cuda` or `cpu` -> a device. Raises DeviceError if CUDA is requested and not available."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError("backend.device=cuda, but torch finds no CUDA GPU here; use backend.device=cpu or auto")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(name: str | None, spec: ModelSpec) -> torch.dtype:
    """Returns the configured format, or the model's; bfloat16 if the model's weights are FP8, in which the engine does
    not compute. Raises ConfigError if the engine cannot compute in the format."""
    chosen = name or ("bfloat16" if spec.dtype == "fp8" else spec.dtype)
    if chosen not in DTYPES:
        raise ConfigError(f"the real backend cannot compute in {chosen}; set backend.dtype to {', '.join(DTYPES)}")
    dtype = getattr(torch, chosen)
    assert isinstance(dtype, torch.dtype)
    return dtype


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Returns the bytes of all weights, over all ranks. dtype: the format in which the engine computes."""
    return spec.weight_bytes() if spec.dtype == "fp8" else spec.num_parameters * dtype.itemsize


def describe_device(device: torch.device) -> str:
    """Returns one line for manifests: the GPU's name, or the CPU's with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    num_threads = torch.get_num_threads()
    return f"{cpu_name()}, {num_threads} thread{'s' if num_threads > 1 else ''}"


@contextmanager
def memory_named(remedy: str) -> Iterator[None]:
    """Converts out-of-memory errors of a GPU to a DeviceError of one line. remedy: the end of the line."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceError(f"out of GPU memory; {remedy}") from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch's own error, or one of the driver, cuBLAS, Triton or NCCL, recognised by its text.

    Also true if that was the first of several errors: a capture that runs out of memory fails again when it is ended.
    """
    if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in MEMORY_WORDS):
        return True
    return error.__context__ is not None and is_out_of_memory(error.__context__)


class CpuStopwatch:
    """Marks instants of the monotonic clock, as CPU work is done when its call returns. Methods as CudaStopwatch."""

    def __init__(self) -> None:
        self._marks: list[int] = []

    def restart(self) -> None:
        self._marks.clear()

    def mark(self) -> None:
        self._marks.append(time.perf_counter_ns())

    def is_done(self) -> bool:
        return True

    def finish(self) -> list[int]:
        return [after - before for before, after in pairwise(self._marks)]


class CudaStopwatch:
    """Marks instants on the GPU's time line, by events on the current stream. One measurement at a time; `restart`
    begins the next one and reuses the events."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._num_marks = 0

    def restart(self) -> None:
        self._num_marks = 0

    def mark(self) -> None:
        if self._num_marks == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[self._num_marks].record()
        self._num_marks += 1

    def is_done(self) -> bool:
        """Whether the device has passed the last mark."""
        return bool(self._events[self._num_marks - 1].query())

    def finish(self) -> list[int]:
        """Waits once for the device; returns the ns between consecutive marks."""
        marked = self._events[: self._num_marks]
        marked[-1].synchronize()
        return [round(before.elapsed_time(after) * 1e6) for before, after in pairwise(marked)]  # ms -> ns


Stopwatch = CpuStopwatch | CudaStopwatch


def stopwatch(device: torch.device) -> Stopwatch:
    return CudaStopwatch() if device.type == "cuda" else CpuStopwatch()
