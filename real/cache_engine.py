"""KV memory on the device and on the host, and the block moves that a plan asks for.

Owns the tensors; which block belongs to whom is the core's business. Block ids are those of the core's pools.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from real.device import Placement
from testbed.errors import DeviceError
from testbed.plan import BatchPlan
from testbed.specs import ModelSpec

Pairs = Sequence[tuple[int, int]]


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block's keys and values over all layers."""
    per_token = 2 * spec.num_hidden_layers * spec.num_key_value_heads * spec.head_dim
    return per_token * block_size * dtype.itemsize


class CacheEngine:
    """Per layer a GPU tensor and a CPU tensor, [2 (key, value), num_blocks, block_size, num_kv_heads, head_dim].

    `GPU` is the core's word for the device's pool, also where the device is a CPU. Memory starts as zeros: positions
    that are masked out are multiplied by 0, so they must be finite.
    """

    def __init__(
        self, spec: ModelSpec, placement: Placement, *, block_size: int, num_gpu_blocks: int, num_cpu_blocks: int
    ) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.num_cpu_blocks = num_cpu_blocks
        tail = (block_size, spec.num_key_value_heads, spec.head_dim)
        is_cuda = placement.device.type == "cuda"
        try:
            self.gpu = [
                torch.zeros((2, num_gpu_blocks, *tail), device=placement.device, dtype=placement.dtype)
                for _ in range(spec.num_hidden_layers)
            ]
            self.cpu = [
                torch.empty(
                    (2, num_cpu_blocks, *tail), dtype=placement.dtype, pin_memory=is_cuda and num_cpu_blocks > 0
                )
                for _ in range(spec.num_hidden_layers)
            ]
        except RuntimeError as error:  # torch has no narrower one for host memory
            size = block_bytes(spec, block_size, placement.dtype)
            first_line = str(error).partition("\n")[0]
            raise DeviceError(
                f"no memory for {num_gpu_blocks} KV blocks on {placement.device} and {num_cpu_blocks} in host memory, "
                f"{size:,} bytes each ({first_line}); lower cache.num_gpu_blocks or cache.num_cpu_blocks"
            ) from None

    def execute(self, plan: BatchPlan) -> None:
        """Swaps out, then swaps in, then copies."""
        if plan.swap_out:
            self.swap_out(plan.swap_out)
        if plan.swap_in:
            self.swap_in(plan.swap_in)
        if plan.copies:
            self.copy(plan.copies)

    def swap_out(self, pairs: Pairs) -> None:
        """(GPU block, CPU block): moves blocks to the host."""
        _move(self.gpu, self.cpu, pairs)

    def swap_in(self, pairs: Pairs) -> None:
        """(CPU block, GPU block): moves blocks back."""
        _move(self.cpu, self.gpu, pairs)

    def copy(self, pairs: Pairs) -> None:
        """(GPU block, GPU block): copies on write. All sources are read before any destination is written."""
        _move(self.gpu, self.gpu, pairs)


def _move(sources: list[Tensor], destinations: list[Tensor], pairs: Pairs) -> None:
    """One gather, one transfer and one scatter a layer; a layer at a time bounds the memory in between."""
    source_ids = torch.tensor([source for source, _ in pairs], device=sources[0].device)
    destination_ids = torch.tensor([destination for _, destination in pairs], device=destinations[0].device)
    for source, destination in zip(sources, destinations, strict=True):
        blocks = source.index_select(1, source_ids)  # [2, num_pairs, block_size, num_kv_heads, head_dim]
        destination.index_copy_(1, destination_ids, blocks.to(destination.device))
