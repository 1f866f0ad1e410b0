"""Where the engine computes: the device, its number format, its description, and how a step's time is measured."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from real.config import DTYPES
from real.parallel.group import SINGLE, TensorGroup
from testbed.errors import ConfigError, DeviceError
from testbed.specs.model import ModelSpec

MEMORY_WORDS = ("out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation")


class Placement(NamedTuple):
    """Where tensors live, in which format, and among which ranks they are shared out."""

    device: torch.device
    dtype: torch.dtype
    group: TensorGroup = SINGLE


def resolve_device(name: str) -> torch.device:
    """`auto`, `cuda` or `cpu` -> a device. Raises DeviceError if CUDA is demanded and absent."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError("backend.device=cuda, but torch finds no CUDA GPU here; use backend.device=cpu or auto")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(name: str | None, spec: ModelSpec) -> torch.dtype:
    """The configured format, or the model's: bfloat16 where its weights are FP8, which nothing is computed in. Raises
    ConfigError if the engine cannot compute in it."""
    chosen = name or ("bfloat16" if spec.dtype == "fp8" else spec.dtype)
    if chosen not in DTYPES:
        raise ConfigError(f"the real backend cannot compute in {chosen}; set backend.dtype to {', '.join(DTYPES)}")
    dtype = getattr(torch, chosen)
    assert isinstance(dtype, torch.dtype)
    return dtype


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Of all weights, over all ranks, where the engine computes in dtype."""
    return spec.weight_bytes() if spec.dtype == "fp8" else spec.num_parameters * dtype.itemsize


def describe_device(device: torch.device) -> str:
    """One line for manifests: the GPU's name, or the CPU's with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    num_threads = torch.get_num_threads()
    return f"{_cpu_name()}, {num_threads} thread{'s' if num_threads > 1 else ''}"


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextmanager
def memory_named(remedy: str) -> Iterator[None]:
    """Turns a GPU that runs out of memory into a DeviceError of one line, which ends with what helps."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceError(f"out of GPU memory; {remedy}") from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch's own error, or that of the driver, cuBLAS, Triton or NCCL, which say it in words.

    Also where it was the first error of several: a capture that memory ends is then told to end, and fails at that.
    """
    if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in MEMORY_WORDS):
        return True
    return error.__context__ is not None and is_out_of_memory(error.__context__)


class CpuStopwatch:
    """Marks instants of the monotonic clock: CPU work is done when its call returns. As CudaStopwatch."""

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
    """Marks instants of a GPU's own time line, by events on the current stream. One measurement at a time; used again
    after `restart`, with the events that it has."""

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
        """Waits for the device once; the ns between consecutive marks."""
        marked = self._events[: self._num_marks]
        marked[-1].synchronize()
        return [round(before.elapsed_time(after) * 1e6) for before, after in pairwise(marked)]  # ms -> ns


Stopwatch = CpuStopwatch | CudaStopwatch


def stopwatch(device: torch.device) -> Stopwatch:
    return CudaStopwatch() if device.type == "cuda" else CpuStopwatch()
