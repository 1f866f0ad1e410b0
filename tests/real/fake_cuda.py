"""A GPU that is not there: tensors that say they lie on one, computed on the CPU, and what the engine calls of
torch.cuda. It raises TroubleError where a GPU would fail or be wrong, and lists where the host would wait for it.

- A tensor of the host among those of the GPU; in a capture also a copy between them, pinned memory, a wait.
- `syncs`: every time that the host waits. What is sent back without a wait is garbage until the host has waited.
- Pinned memory that is written again before the copy from it is over.
- Two streams at the same bytes, one of them writing, without an event between them (vector clocks).
- A graph is what was launched in its capture, launched again: it reads what lies in its inputs' memory at the replay,
  which must be somebody's still.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.real.fake_streams import (
    Access,
    Clock,
    DeviceTensor,
    FakeEvent,
    FakeGraph,
    FakeStream,
    Launch,
    TroubleError,
    is_before,
    leaves_of,
    mapped,
    merge,
    place,
)

GARBAGE = 77
CONTEXT_BYTES = 1 << 20  # of the GPU's memory, held by the driver
GRAPH_BYTES = 1 << 20  # the driver's, for each graph
COPIES = ("to", "_to_copy", "copy_")
PINNING = ("pin_memory", "_pin_memory")
# the host must know their result, or its size, before it goes on
WAITING = (
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "argwhere", "masked_select", "_unique2",
    "unique_dim", "bincount", "allclose",
)  # fmt: skip


class FakeGPU(TorchDispatchMode):
    """One GPU. syncs: why the host waited, each time; `peak` of the bytes of tensors, since it was set."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is traced here: torch's detour around each operation is as long as the operation

    def __init__(self, total_bytes: int = 1 << 28) -> None:
        super().__init__()
        self.total_bytes, self.allocated, self.peak = total_bytes, 0, 0
        self.syncs: list[str] = []
        self.host: Clock = {}  # what the host knows to be over
        self.num_launches = 0
        self.capturing: FakeGraph | None = None
        self.graphs: weakref.WeakSet[FakeGraph] = weakref.WeakSet()
        self.streams: list[FakeStream] = []
        self.stream = FakeStream(self)
        self._tensors: dict[int, int] = {}  # by memory, how many
        self._accesses: dict[int, list[Access]] = defaultdict(list)
        self._pinned: dict[int, Tensor] = {}  # kept, so that their memory is never somebody else's
        self._sent: list[tuple[FakeEvent, Tensor, Tensor]] = []  # pinned memory, what it is until then
        self._fetched: list[tuple[FakeEvent, Tensor, Tensor]] = []  # garbage, what it is from then on

    # --- streams, waits, captures ---

    @contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def capture(self, graph: FakeGraph, pool: object = None, stream: FakeStream | None = None) -> Iterator[None]:
        self.synchronize()
        if stream is None or not stream.clock.get(stream.number):
            raise TroubleError("nothing ran on the capture's stream before: it would load kernels and pick algorithms")
        if gc.isenabled():
            raise TroubleError("in a capture: a collection may free graphs, kernels and pinned memory")
        graph.pool = pool or graph
        with self.on_stream(stream):
            self.capturing = graph
            try:
                yield
            finally:
                self.capturing = None

    def synchronize(self, device: object = None) -> None:
        everything: Clock = {}
        for stream in self.streams:
            merge(everything, stream.clock)
        self.wait("the whole device", everything)

    def wait(self, why: str, clock: Clock) -> None:
        self.forbid_in_capture(f"a wait for {why}")
        self.syncs.append(why)
        self.passed(clock)

    def passed(self, clock: Clock) -> None:
        """The host learns that everything up to this is over."""
        merge(self.host, clock)
        for event, host, expected in self._sent:
            if is_before(event.clock or {}, self.host) and not torch.equal(bits(host), bits(expected)):
                raise TroubleError("pinned memory was written again before the copy from it was over")
        self._sent = [one for one in self._sent if not is_before(one[0].clock or {}, self.host)]
        for event, host, result in self._fetched:
            if is_before(event.clock or {}, self.host):
                with torch.inference_mode():
                    host.copy_(result)
        self._fetched = [one for one in self._fetched if not is_before(one[0].clock or {}, self.host)]

    def forbid_in_capture(self, what: str) -> None:
        if self.capturing is not None:
            raise TroubleError(f"in a capture: {what}")

    # --- memory ---

    def holds(self, inner: Tensor) -> bool:
        return place(inner) in self._tensors

    def memory_info(self, device: object = None) -> tuple[int, int]:
        """Free and total bytes; what tensors let go of is free at once. Graphs of one pool use the same memory."""
        pools: dict[object, int] = {}
        for graph in self.graphs:
            pools[graph.pool] = max(pools.get(graph.pool, 0), sum(graph.sizes.values()))
        held = CONTEXT_BYTES + self.allocated + GRAPH_BYTES * len(self.graphs) + sum(pools.values())
        return self.total_bytes - held, self.total_bytes

    def reserved(self, device: object = None) -> int:
        free, total = self.memory_info()
        return total - free - CONTEXT_BYTES - GRAPH_BYTES * len(self.graphs)

    def reset_peak(self, device: object = None) -> None:
        self.peak = self.allocated

    def _on_device(self, inner: Tensor, *, is_new: bool) -> DeviceTensor:
        """The tensor as one of the GPU. is_new: its memory was allocated for it."""
        with torch.inference_mode(inner.is_inference()):
            tensor = DeviceTensor(inner)
        at, size = place(inner), inner.untyped_storage().nbytes()
        if is_new and self.capturing is not None:
            self.capturing.sizes[at] = size
        if any(at in graph.sizes for graph in self.graphs):
            return tensor
        if is_new:
            self._accesses.pop(at, None)
            if self.memory_info()[0] < size:
                raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate too much")
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
        self._tensors[at] = self._tensors.get(at, 0) + 1
        weakref.finalize(tensor, self._let_go, at, size)
        return tensor

    def put(self, inner: Tensor) -> DeviceTensor:
        """What a launch of another package made."""
        return self._on_device(inner, is_new=True)

    def _let_go(self, at: int, size: int) -> None:
        self._tensors[at] -= 1
        if not self._tensors[at]:
            del self._tensors[at]
            self.allocated -= size

    def is_pinned(self, host: Tensor) -> bool:
        return place(host) in self._pinned

    def _as_pinned(self, host: Tensor) -> Tensor:
        self.forbid_in_capture("pinned memory is allocated")
        self._pinned[place(host)] = host
        self._accesses.pop(place(host), None)  # of what was there before it
        return host

    # --- launches ---

    def launch(self, launch: Launch) -> None:
        """Accounts for work on the current stream, or for a graph that is captured."""
        if self.capturing is not None:
            self.capturing.launches.append(launch)
            return
        self.num_launches += 1
        stream = self.stream
        merge(stream.clock, self.host)
        stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        for tensors, is_write in ((launch.reads, False), (launch.writes, True)):
            for tensor in tensors:
                if tensor.numel():
                    self._access(tensor, is_write, launch.what)

    def _access(self, tensor: Tensor, is_write: bool, what: str) -> None:
        begin = tensor.data_ptr()
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        end, clock = begin + extent * tensor.element_size(), self.stream.clock
        log, kept = self._accesses[place(tensor)], []
        for one in log:
            is_known = clock.get(one.stream, 0) >= one.time
            if one.begin < end and begin < one.end and (is_write or one.is_write) and not is_known:
                raise TroubleError(f"{what} does not wait for {one.what} on another stream, at the same memory")
            is_covered = begin <= one.begin and one.end <= end and is_known
            if not (is_covered and (is_write or not one.is_write)):
                kept.append(one)
        kept.append(Access(begin, end, is_write, self.stream.number, clock[self.stream.number], what))
        self._accesses[place(tensor)] = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = signature_of(func)
        if called.stays_on_host and not types:
            return func(*args, **(kwargs or {}))
        name, given = called.name, dict(zip(called.arguments, args, strict=False)) | (kwargs or {})
        tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        if name in PINNING:
            return self._as_pinned(given["self"].clone())
        if name in COPIES:
            source = given["src"] if name == "copy_" else given["self"]
            goal = given["self"].device if name == "copy_" else _device(given) or source.device
            if source.device.type != goal.type:
                return self._transfer(func, source, given)
        elif ours and any(not isinstance(tensor, DeviceTensor) and tensor.dim() for tensor in tensors):
            raise TroubleError(f"{func} of tensors on the GPU and on the host")
        if ours and (name in WAITING or _has_mask(name, given)):
            self.wait(str(func), self.stream.clock)
        device = given.get("device")
        if not ours and (device is None or torch.device(device).type == "cpu"):
            made = func(*args, **{key: value for key, value in (kwargs or {}).items() if key != "pin_memory"})
            return self._as_pinned(made) if given.get("pin_memory") else made
        return self._run(func, args, kwargs or {}, ours)

    def _run(self, func: Any, args: Any, kwargs: Any, ours: list[DeviceTensor]) -> Any:
        """An operation of the GPU alone."""
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": torch.device("cpu")}
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        inner_args, inner_kwargs = mapped(_inner, args), mapped(_inner, kwargs)
        work = partial(func, *inner_args, **inner_kwargs)
        result = work()
        known = {id(tensor.inner): tensor for tensor in ours}
        places = {place(tensor.inner) for tensor in ours}
        results = [leaf for leaf in leaves_of(result) if isinstance(leaf, Tensor)]
        fresh = [one for one in results if place(one) not in places and one.numel()]
        written = _written(func, inner_args, inner_kwargs)

        def wrap(one: Any) -> Any:
            if not isinstance(one, Tensor) or id(one) in known:
                return known.get(id(one), one)
            return self._on_device(one, is_new=any(one is other for other in fresh))

        wrapped = mapped(wrap, result)
        if written or fresh:

            def again() -> None:
                for old, new in zip(results, leaves_of(work()), strict=True):
                    if any(old is one for one in fresh):
                        old.copy_(new)

            reads = [tensor.inner for tensor in ours if not any(tensor.inner is one for one in written)]
            self.launch(Launch(str(func), reads, [*written, *fresh], again))
        return wrapped

    def _transfer(self, func: Any, source: Tensor, given: dict[str, Any]) -> Tensor:
        """A copy between the host and the GPU. Only one between pinned memory and the GPU is not waited for."""
        self.forbid_in_capture(f"{func} between the host and the GPU")
        target: Tensor | None = given["self"] if "src" in given else None
        is_async, is_down = bool(given.get("non_blocking")), isinstance(source, DeviceTensor)
        host = source if target is not None and not is_down else target
        if target is None:
            made = _inner(source).to(given.get("dtype") or source.dtype, copy=True)
            host = made if is_down else source
            if is_down and is_async:
                self._as_pinned(made)  # torch pins what it makes for this
            target = made if is_down else self._on_device(made, is_new=True)
        else:
            _inner(target).copy_(_inner(source))
        assert host is not None
        is_async = is_async and place(host) in self._pinned
        self.launch(Launch(str(func), [_inner(source)], [_inner(target)], _nothing))
        done = FakeEvent(self)
        done.record()
        if not is_async:
            self.wait(f"{func} of pageable memory, or one that is asked to wait", done.clock or {})
        elif not is_down:
            self._sent.append((done, source, source.clone()))
        elif "src" in given:  # the device may send it back before the host looks: it is there at once
            self._sent = [one for one in self._sent if place(one[1]) != place(host)]
        else:
            self._fetched.append((done, target, target.clone()))
            target.fill_(GARBAGE)
        return target

    def __enter__(self) -> Any:
        torch._C._ensureCUDADeviceGuardSet()
        self._lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        torch._C._set_only_lift_cpu_tensors(self._lifts)
        return super().__exit__(*error)


class HostGenerator(torch.Generator):
    """Draws on the host, for whatever device it is asked for."""

    def __new__(cls, device: object = None) -> HostGenerator:
        return super().__new__(cls)


def bits(tensor: Tensor) -> Tensor:
    """Its bytes: memory that nobody wrote may hold NaN, which equals nothing."""
    return tensor.contiguous().view(torch.uint8)


def _nothing() -> None: ...


def _inner(item: Any) -> Any:
    return item.inner if isinstance(item, DeviceTensor) else item


def _device(given: dict[str, Any]) -> torch.device | None:
    other, device = given.get("other"), given.get("device")
    return other.device if isinstance(other, Tensor) else None if device is None else torch.device(device)


def _has_mask(name: str, given: dict[str, Any]) -> bool:
    """Whether it is indexed by booleans, or repeated by counts on the device: their sum is the result's size."""
    if name == "repeat_interleave":
        return isinstance(given.get("repeats"), Tensor) and given.get("output_size") is None
    indices = given.get("indices") if name in ("index", "index_put", "index_put_", "_index_put_impl_") else None
    return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indices or ())


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    called = signature_of(func)
    if not called.written:
        return []
    named = dict(zip(called.arguments, args, strict=False)) | kwargs
    return [named[name] for name in called.written if isinstance(named.get(name), Tensor)]


class Signature(NamedTuple):
    name: str
    arguments: list[str]
    written: list[str]
    stays_on_host: bool  # if no tensor of the GPU is among its arguments


@cache
def signature_of(func: Any) -> Signature:
    """Read from torch once: it makes its schemas anew each time they are looked at."""
    schema = func._schema
    name, arguments = schema.name.removeprefix("aten::"), [one.name for one in schema.arguments]
    written = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return Signature(name, arguments, written, "device" not in arguments and name not in (*COPIES, *PINNING))


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch, gpu: FakeGPU, capability: tuple[int, int] = (9, 0)) -> Iterator[FakeGPU]:
    """torch.cuda as if `gpu` were there."""
    cuda = torch.cuda
    properties = SimpleNamespace(multi_processor_count=132, total_memory=gpu.total_bytes)
    for name, value in {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "_lazy_init": _nothing,
        "get_device_name": lambda device=None: "Fake H100", "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties,
        "Stream": lambda device=None: FakeStream(gpu), "current_stream": lambda device=None: gpu.stream,
        "stream": gpu.on_stream, "Event": partial(FakeEvent, gpu), "synchronize": gpu.synchronize,
        "CUDAGraph": lambda: FakeGraph(gpu), "graph": gpu.capture, "graph_pool_handle": object,
        "memory_allocated": lambda device=None: gpu.allocated, "memory_reserved": gpu.reserved,
        "max_memory_allocated": lambda device=None: gpu.peak, "reset_peak_memory_stats": gpu.reset_peak,
        "mem_get_info": gpu.memory_info, "empty_cache": _nothing,
    }.items():  # fmt: skip
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.setattr(torch, "Generator", HostGenerator)
    with gpu:
        yield gpu
