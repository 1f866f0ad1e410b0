"""Sends a step's small inputs to the device: written next to each other in pinned memory, and sent in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, for vector loads of the kernels that read the inputs


class Staging:
    """Pinned host memory and its twin on the device, as large as the largest step so far, and at least `least_bytes`.

    Tensors that `send` returns are valid for work that is launched before the next `send`. Arrays of the same shapes as
    before come back as the same tensors. One step can be in flight while the next is prepared, so there are two host
    buffers, which are used in turn. On a CPU nothing is sent: the tensors are views of the arrays.
    """

    def __init__(self, device: torch.device, least_bytes: int = 1 << 16) -> None:
        self._device, self._least_bytes = device, least_bytes
        self._hosts = [torch.empty(0, dtype=torch.uint8)] * 2
        self._twin = self._hosts[0]
        self._shapes: list[tuple[np.dtype, tuple[int, ...]]] = []  # of the arrays that were sent last
        self._places: list[slice] = []  # of their bytes
        self._sent: list[Tensor] = []

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Returns the arrays as tensors on the device, with the same shapes and number formats. Does not wait."""
        if self._device.type != "cuda":
            return [torch.from_numpy(array) for array in arrays]
        shapes = [(array.dtype, array.shape) for array in arrays]
        if shapes != self._shapes:
            self._lay_out(arrays)
            self._shapes = shapes
        self._hosts.reverse()
        host = self._hosts[0].numpy()
        for array, place in zip(arrays, self._places, strict=True):
            host[place].view(array.dtype).reshape(array.shape)[...] = array
        end = self._places[-1].stop
        self._twin[:end].copy_(self._hosts[0][:end], non_blocking=True)
        return self._sent

    @torch.inference_mode(False)  # inference tensors could not be written to outside of inference mode
    def _lay_out(self, arrays: Sequence[np.ndarray]) -> None:
        """Places the arrays one after the other, aligned; in larger memory if they need it."""
        *begins, total = accumulate((-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays), initial=0)
        if total > self._twin.numel():
            size = max(self._least_bytes, 1 << (total - 1).bit_length())
            self._hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._twin = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._places = [slice(begin, begin + array.nbytes) for begin, array in zip(begins, arrays, strict=True)]
        self._sent = [
            self._twin[place].view(torch.from_numpy(array).dtype).view(array.shape)
            for place, array in zip(self._places, arrays, strict=True)
        ]


def send_array(array: np.ndarray, device: torch.device) -> Tensor:
    """Sends a single array to the device without waiting; torch keeps its pinned memory until the copy is done."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
