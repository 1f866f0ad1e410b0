"""KV memory on the device and on the host, and the block moves that a plan asks for.

Owns the tensors. Which sequence a block belongs to is known only to the core, whose block ids are used here. On a GPU
our kernels swap on a stream of their own, a few layers at a time: a layer's attention does not wait for the blocks of
later ones. If the kernels cannot run, torch moves the blocks, and the host waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from real import kernels
from real.attention.interface import as_bytes
from real.device import Placement
from real.staging import send_array
from testbed.core.plan import BatchPlan
from testbed.errors import DeviceError
from testbed.specs.model import ModelSpec

Pairs = Sequence[tuple[int, int]]

SWAP_PROGRAMS = 64  # of a launch: enough to saturate the link, few next to the computing kernels
SWAP_LAYERS = 8  # of a launch: with one, small swaps take as long as the host needs to launch them


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype, num_ranks: int = 1) -> int:
    """Returns the bytes of one block's keys and values in all layers, on one rank."""
    per_token = 2 * spec.num_hidden_layers * spec.num_kv_heads_per_rank(num_ranks) * spec.head_dim
    return per_token * block_size * dtype.itemsize


class LayerCaches:
    """Iterates over the KV tensors of the layers. Taking one makes the current stream wait for the swaps of that
    layer."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole  # [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]
        self._layers = whole.unbind(0)
        self._moved: list[torch.cuda.Event] | None = None  # by layer; None: no swaps are in flight

    def __iter__(self) -> Iterator[Tensor]:
        for index, layer in enumerate(self._layers):
            if self._moved is not None:
                self._moved[index].wait()
            yield layer
        self._moved = None  # the stream has waited for all layers

    def will_be_moved(self, events: list[torch.cuda.Event]) -> None:
        """Sets the events to wait for. events: by layer, each recorded after the layer's swaps. They hold until all
        layers were taken, or until `wait`."""
        self._moved = events

    def wait(self) -> None:
        """Makes the current stream wait for the swaps of every layer."""
        if self._moved is not None:
            self._moved[-1].wait()
            self._moved = None


class CacheEngine:
    """A pool on the device and one on the host, each [num_layers, 2 (key, value), num_blocks, block_size, num_kv_heads,
    head_dim]; `gpu` has the layers of the former, `cpu` is the latter.

    `GPU` is the core's name for the device's pool, even if the device is a CPU. It has one block more than the core
    uses, `scratch_block`, to which padding rows and tokens write. Its memory starts as zeros: values at masked
    positions are multiplied by 0, so they must be finite.
    """

    def __init__(
        self,
        spec: ModelSpec,
        placement: Placement,
        *,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_cpu_blocks = num_cpu_blocks
        self.scratch_block = num_gpu_blocks
        tail = (block_size, spec.num_kv_heads_per_rank(placement.group.size), spec.head_dim)
        is_cuda = placement.device.type == "cuda"
        layers = spec.num_hidden_layers
        try:
            gpu = torch.zeros((layers, 2, num_gpu_blocks + 1, *tail), device=placement.device, dtype=dtype)
            cpu = torch.empty(
                (layers, 2, num_cpu_blocks, *tail), dtype=dtype, pin_memory=is_cuda and num_cpu_blocks > 0
            )
        except RuntimeError as error:  # torch has no narrower exception for host memory
            size = block_bytes(spec, block_size, dtype, placement.group.size)
            first_line = str(error).partition("\n")[0]
            raise DeviceError(
                f"no memory for {num_gpu_blocks} KV blocks on {placement.device} and {num_cpu_blocks} in host memory, "
                f"{size:,} bytes each ({first_line}); lower cache.num_gpu_blocks or cache.num_cpu_blocks"
            ) from None
        self.gpu = LayerCaches(gpu)
        self.cpu = cpu
        self._has_kernels = kernels.has_kernels(placement.device)
        self._swaps = SwapStream(placement.device, layers) if self._has_kernels and num_cpu_blocks else None

    def execute(self, plan: BatchPlan) -> Callable[[], int]:
        """Swaps out, then swaps in, then copies. On a GPU the swaps can still be in flight when it returns; iterating
        over `gpu` waits for them.

        Returns a function that waits for the swaps and returns their duration on their own stream, in ns. It returns 0
        without such a stream, or if the plan has copies, which wait for the swaps on the current stream.
        """
        swap_ns: Callable[[], int] = int
        if plan.swap_out or plan.swap_in:
            assert self.num_cpu_blocks, "this engine was made for plans that never swap"
            if self._swaps is None:
                _move(list(self.gpu), list(self.cpu), plan.swap_out)
                _move(list(self.cpu), list(self.gpu), plan.swap_in)
            else:
                moved, swap_ns = self._swaps.launch(self.gpu.whole, self.cpu, plan.swap_out, plan.swap_in)
                self.gpu.will_be_moved(moved)
        if plan.copies:
            self.gpu.wait()
            self.copy(plan.copies)
        return int if plan.copies else swap_ns

    def warm_up(self) -> None:
        """Moves a block in each way, so that no step has to load the kernels. Overwrites blocks."""
        scratch = self.scratch_block
        self.copy([(0, scratch)])
        if self._swaps is not None:
            moved, _ = self._swaps.launch(self.gpu.whole, self.cpu, [(scratch, 0)], [(0, scratch)])
            self.gpu.will_be_moved(moved)
            self.gpu.wait()

    def copy(self, pairs: Pairs) -> None:
        """Copies on write, (source, destination) pairs of GPU blocks. All sources are read before any destination is
        written."""
        whole = self.gpu.whole
        sources, destinations = zip(*pairs, strict=True)
        if self._has_kernels and not set(sources) & set(destinations):
            from real.kernels.block_copy import move_blocks

            planes = whole.flatten(0, 1)
            move_blocks(planes, planes, send_array(np.array(pairs), whole.device))
            return
        ids = send_array(np.array([sources, destinations]), whole.device)
        raw = as_bytes(whole)
        raw.index_copy_(2, ids[1], raw.index_select(2, ids[0]))


class SwapStream:
    """Moves blocks between the device and pinned host memory, in parallel to the computing stream. For each few layers,
    all swaps out are one launch, and all swaps in another."""

    def __init__(self, device: torch.device, num_layers: int) -> None:
        self._stream = torch.cuda.Stream(device)
        self._moved = [torch.cuda.Event() for _ in range(0, num_layers, SWAP_LAYERS)]
        marks = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(2)]
        self._marks = cycle(marks)  # for two launches, as two steps can be in flight

    def launch(
        self, gpu: Tensor, cpu: Tensor, swap_out: Pairs, swap_in: Pairs
    ) -> tuple[list[torch.cuda.Event], Callable[[], int]]:
        """Launches swaps out, then swaps in. Returns for each layer the event after its swaps, and a function that
        waits and returns the duration of all in ns.

        The swaps start after the earlier work of the current stream, that is, after the step that wrote the blocks.
        """
        from real.kernels.block_copy import move_blocks

        began, ended = next(self._marks)
        self._stream.wait_stream(torch.cuda.current_stream(gpu.device))
        with torch.cuda.stream(self._stream):
            began.record()
            out_pairs, in_pairs = (
                send_array(np.array(pairs), gpu.device) if pairs else None for pairs in (swap_out, swap_in)
            )
            on_both = (torch.split(pool.flatten(0, 1), 2 * SWAP_LAYERS) for pool in (gpu, cpu))
            for on_device, on_host, moved in zip(*on_both, self._moved, strict=True):
                if out_pairs is not None:
                    move_blocks(on_host, on_device, out_pairs, SWAP_PROGRAMS)
                if in_pairs is not None:
                    move_blocks(on_device, on_host, in_pairs, SWAP_PROGRAMS)
                moved.record()
            ended.record()

        def elapsed_ns() -> int:
            ended.synchronize()
            return int(began.elapsed_time(ended) * 1e6)  # ms -> ns

        return [self._moved[layer // SWAP_LAYERS] for layer in range(len(gpu))], elapsed_ns


def _move(sources: Sequence[Tensor], destinations: Sequence[Tensor], pairs: Pairs) -> None:
    """Moves blocks by one gather, one transfer and one scatter per layer. One layer at a time bounds the memory."""
    if not pairs:
        return
    source_ids = torch.tensor([source for source, _ in pairs], device=sources[0].device)
    destination_ids = torch.tensor([destination for _, destination in pairs], device=destinations[0].device)
    for source, destination in zip(sources, destinations, strict=True):
        blocks = as_bytes(source).index_select(1, source_ids)  # [2, num_pairs, block_size, num_kv_heads, head_dim]
        as_bytes(destination).index_copy_(1, destination_ids, blocks.to(destination.device))
