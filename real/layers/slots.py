"""Where the weights of a checkpoint go: several can share one parameter, and a rank keeps only its part of some.

A layer that packs or shards weights describes it in `slots`. The loader fills each slot and checks the shapes; layers
load nothing.
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
    full_shape: tuple[int, ...]  # shape of the weight in the checkpoint
    dim: int = 0  # dimension along which the weight is split over the ranks
    start: int = 0  # index along it at which this rank's part begins; the part is as long as the view

    @property
    def is_whole(self) -> bool:
        return tuple(self.view.shape) == self.full_shape

    def part_of(self, full: Tensor) -> Tensor:
        """Returns this rank's part of the whole weight: a view of it with the shape of `view`."""
        return full.narrow(self.dim, self.start, self.view.shape[self.dim])


@runtime_checkable
class HasSlots(Protocol):
    """A layer whose parameters differ from the weights of the checkpoint."""

    def slots(self, name: str, parameter: Tensor) -> Mapping[str, Slot]:
        """Returns the slots of parameter `name`, by the checkpoint's name of the layer; "": the layer's own name."""
        ...


def whole(parameter: Tensor) -> Slot:
    """Returns the slot of a weight that every rank keeps completely."""
    return Slot(parameter, tuple(parameter.shape))


def shared(view: Tensor, dim: int, start: int, full_size: int) -> Slot:
    """Returns the slot of a weight of which this rank keeps a part. full_size: size of the whole weight along `dim`."""
    shape = list(view.shape)
    shape[dim] = full_size
    return Slot(view, tuple(shape), dim, start)


def empty_parameter(shape: tuple[int, ...], placement: Placement) -> nn.Parameter:
    """Returns an uninitialised weight that needs no gradient; the loader fills it."""
    return nn.Parameter(torch.empty(shape, device=placement.device, dtype=placement.dtype), requires_grad=False)
