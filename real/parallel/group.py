"""The ranks that share one model, as its layers see them: the own rank, and sums and gathers over all ranks.

Layers know only this protocol. The transport (NCCL, Gloo, none) is chosen where the processes are created.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TensorGroup(Protocol):
    """The ranks of one model. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum over all ranks; may overwrite and return its argument."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, concatenated along the last dimension in the order of ranks."""
        ...


class SingleRank:
    """The group of a model that is on one device."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor


SINGLE = SingleRank()
