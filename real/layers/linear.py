"""Linear layers over flat tokens, and the seam through which quantised weights can come in.

A layer that packs several weights of a checkpoint into one parameter says which in `parts`: the checkpoint's name of
each and its number of rows. The loader copies each weight into its view and checks the shapes; the layers load nothing.
Tensor parallelism shards here: column-parallel layers keep some of each part's rows, row-parallel ones some columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from real.device import Placement


class LinearMethod(Protocol):
    """How a linear layer stores its weight and multiplies by it."""

    def create_weights(self, layer: nn.Module, out_features: int, in_features: int, placement: Placement) -> None: ...

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor: ...


class Unquantized:
    """A dense `weight` [out_features, in_features] in the model's own number format."""

    def create_weights(self, layer: nn.Module, out_features: int, in_features: int, placement: Placement) -> None:
        layer.register_parameter("weight", empty_parameter((out_features, in_features), placement))

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        return functional.linear(x, weight)


def empty_parameter(shape: tuple[int, ...], placement: Placement) -> nn.Parameter:
    """An uninitialised weight that needs no gradient; the loader fills it."""
    return nn.Parameter(torch.empty(shape, device=placement.device, dtype=placement.dtype), requires_grad=False)


class Linear(nn.Module):
    """`x @ weight.T`: [num_tokens, in_features] -> [num_tokens, out_features]. No bias: the models here have none."""

    def __init__(
        self, in_features: int, out_features: int, placement: Placement, method: LinearMethod | None = None
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.method = method or Unquantized()
        self.method.create_weights(self, out_features, in_features, placement)

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self, x)


class RowParallel(Linear):
    """A projection back into the hidden size; under tensor parallelism the ranks hold columns and sum their results."""


class MergedColumnParallel(Linear):
    """Several projections of the same input in one multiplication, their outputs side by side in the order of parts."""

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        placement: Placement,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__(in_features, sum(parts.values()), placement, method)
        self.parts = dict(parts)

    def part_views(self, parameter: Tensor) -> dict[str, Tensor]:
        """The rows of each part, [part's rows, ...]: views, so that writing to them fills the packed weight."""
        return dict(zip(self.parts, torch.split(parameter, list(self.parts.values())), strict=True))


class QKVParallel(MergedColumnParallel):
    """The query, key and value projections of grouped-query attention in one multiplication."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        placement: Placement,
        method: LinearMethod | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        kv_size = num_kv_heads * head_dim
        parts = {"q_proj": num_heads * head_dim, "k_proj": kv_size, "v_proj": kv_size}
        super().__init__(hidden_size, parts, placement, method)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[num_tokens, hidden] -> query [num_tokens, num_heads, head_dim], key and value with num_kv_heads."""
        num_tokens = x.shape[0]
        heads = self(x).view(num_tokens, -1, self.head_dim)  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return query, key, value
