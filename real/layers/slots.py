"""Where the weights of a checkpoint go: several may share one parameter, and a rank keeps only its part of some.

A layer that packs or shards says so in `slots`; the loader fills each slot and checks the shapes. Layers load nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from real.device import Placement


class Slot(NamedTuple):
    """The place of one weight of a checkpoint on this rank."""

    view: Tensor  # the part of a parameter that it fills
    full_shape: tuple[int, ...]  # of the weight in the checkpoint
    dim: int = 0  # along which the ranks share the weight
    start: int = 0  # where this rank's part of it begins; it ends with the view

    @property
    def is_whole(self) -> bool:
        return tuple(self.view.shape) == self.full_shape

    def part_of(self, full: Tensor) -> Tensor:
        """What this rank keeps of the whole weight: a view with the shape of `view`."""
        return full.narrow(self.dim, self.start, self.view.shape[self.dim])


@runtime_checkable
class HasSlots(Protocol):
    """A layer whose parameters are not simply weights of the checkpoint."""

    def slots(self, name: str, parameter: Tensor) -> Mapping[str, Slot]:
        """Of the layer's parameter `name`: slots by the checkpoint's name for the layer; "" is the layer's own name."""
        ...


def whole(parameter: Tensor) -> Slot:
    """A weight that every rank keeps."""
    return Slot(parameter, tuple(parameter.shape))


def shared(view: Tensor, dim: int, start: int, full_size: int) -> Slot:
    """A weight of which this rank keeps a part: `full_size` is that of the whole along `dim`."""
    shape = list(view.shape)
    shape[dim] = full_size
    return Slot(view, tuple(shape), dim, start)


def empty_parameter(shape: tuple[int, ...], placement: Placement) -> nn.Parameter:
    """An uninitialised weight that needs no gradient; the loader fills it."""
    return nn.Parameter(torch.empty(shape, device=placement.device, dtype=placement.dtype), requires_grad=False)
