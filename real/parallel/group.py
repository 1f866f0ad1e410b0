"""The ranks that share one model, as its layers see them: who am I, and sums and gathers over all of us.

Layers know this protocol alone; what carries the bytes (NCCL, Gloo, nothing) is chosen where the processes are made.
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
        """The sum over all ranks; may overwrite and return its argument."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks side by side along the last dimension, in the order of ranks."""
        ...


class SingleRank:
    """A model that lies on one device."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor


SINGLE = SingleRank()
