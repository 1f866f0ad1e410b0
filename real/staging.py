"""Sends a step's small inputs to the device: written next to each other in pinned memory, and sent in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, for vector loads of the kernels that read the inputs


class Staging:
    """Pinned host memory and its twin on the device, as large as the largest step so far.

    Tensors that `send` returns are valid for work that is launched before the next `send`. One step can be in flight
    while the next is prepared, so there are two host buffers, which are used in turn. On a CPU nothing is sent.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hosts = [torch.empty(0, dtype=torch.uint8)] * 2
        self._twin = self._hosts[0]

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Returns the arrays as tensors on the device, with the same shapes and number formats. Does not wait."""
        if self._device.type != "cuda":
            return [torch.from_numpy(array) for array in arrays]
        offsets, total = layout(arrays)
        if total > self._twin.numel():
            size = max(1 << 16, 1 << (total - 1).bit_length())
            self._hosts, self._twin = twofold_memory(size, self._device)
        self._hosts.reverse()
        write(arrays, offsets, self._hosts[0].numpy())
        self._twin[:total].copy_(self._hosts[0][:total], non_blocking=True)
        return views(arrays, offsets, self._twin)


def send_array(array: np.ndarray, device: torch.device) -> Tensor:
    """Sends a single array to the device without waiting; torch keeps its pinned memory until the copy is done."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@torch.inference_mode(False)
def twofold_memory(num_bytes: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Allocates two host buffers, pinned for a GPU, and one of the same size on the device. They are no inference
    tensors, so they can be written to outside of inference mode."""
    hosts = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]
    return hosts, torch.empty(num_bytes, dtype=torch.uint8, device=device)


def layout(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Returns the offset of each array if they are stored one after the other, aligned, and their total bytes."""
    offsets, end = [], 0
    for array in arrays:
        offsets.append(end)
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def write(arrays: Sequence[np.ndarray], offsets: Sequence[int], memory: np.ndarray) -> None:
    """Copies each array to its offset in `memory`, uint8 [bytes]."""
    for array, offset in zip(arrays, offsets, strict=True):
        memory[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array


def views(arrays: Sequence[np.ndarray], offsets: Sequence[int], memory: Tensor) -> list[Tensor]:
    """Returns tensors over `memory`, uint8 [bytes], with the shapes and number formats of the arrays."""
    return [
        memory[offset : offset + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, offset in zip(arrays, offsets, strict=True)
    ]
