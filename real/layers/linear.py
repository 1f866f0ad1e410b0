"""Linear layers over flat tokens, and the interface for quantised weights (LinearMethod).

Under tensor parallelism, column-parallel layers keep some of the output features, and their results stay on their rank.
Row-parallel layers keep some of the input features, and their results are summed over the ranks. Sizes of inputs and
outputs are always given for the whole model. Weights have output features in dimension 0 and input features in
dimension 1, whatever a linear method stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from real.device import Placement
from real.kernels import has_kernels
from real.layers.matrix import Matrix
from real.layers.packed import multiply_packed, packed
from real.layers.slots import Slot, empty_parameter, shared
from testbed.specs.model import ModelSpec


class Part(NamedTuple):
    """The consecutive features, of those of the whole model, that this rank keeps."""

    size: int  # features of the whole model
    start: int  # the first that this rank keeps
    kept: int  # how many it keeps

    @property
    def is_whole(self) -> bool:
        return self.kept == self.size


class Kept(NamedTuple):
    """What a rank keeps of a weight [out_features, in_features], or of several of one shape. rows: the part of each
    projection that is packed into it, by the checkpoint's name."""

    rows: Mapping[str, Part]
    columns: Part

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.kept for part in self.rows.values()), self.columns.kept


class LinearMethod(Protocol):
    """How a layer stores its weight and multiplies by it."""

    def create_weights(self, layer: nn.Module, kept: Kept, placement: Placement, num: tuple[int, ...] = ()) -> None:
        """Registers the layer's parameters. num: leading dimensions, if there are several weights of one shape."""
        ...

    def apply(self, layer: nn.Module, kept: Kept, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features], the features of this rank."""
        ...

    def slots(self, kept: Kept, name: str, parameter: Tensor) -> Mapping[str, Slot]:
        """As HasSlots.slots; also called for the bias."""
        ...


class Unquantized:
    """A dense `weight` [out_features, in_features] in the model's own number format."""

    def create_weights(self, layer: nn.Module, kept: Kept, placement: Placement, num: tuple[int, ...] = ()) -> None:
        layer.register_parameter("weight", empty_parameter((*num, *kept.shape), placement))

    def apply(self, layer: nn.Module, kept: Kept, x: Tensor, bias: Tensor | None) -> Tensor:
        return multiply(x, layer.get_parameter("weight"), bias)

    def slots(self, kept: Kept, name: str, parameter: Tensor) -> Mapping[str, Slot]:
        return dense_slots(kept, parameter)


def dense_slots(kept: Kept, parameter: Tensor) -> Mapping[str, Slot]:
    """Returns the slots of a weight or a bias; either its rows or its columns are split over the ranks."""
    rows, columns = kept
    views = torch.split(parameter, [part.kept for part in rows.values()])
    pairs = zip(rows.items(), views, strict=True)
    if parameter.dim() == 2 and not columns.is_whole:
        return {name: shared(view, 1, columns.start, columns.size) for (name, _), view in pairs}
    return {name: shared(view, 0, part.start, part.size) for (name, part), view in pairs}


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: [num_tokens, in_features] -> [num_tokens, out_features]."""
    if has_kernels(x.device):
        from real.kernels.few_tokens import can_multiply, multiply_few  # not at the top: needs Triton

        if can_multiply(x, Matrix(weight)):
            return multiply_few(x, Matrix(weight), bias)
    laid_out = packed(weight) if x.is_cpu and x.dtype == weight.dtype else None
    return functional.linear(x, weight, bias) if laid_out is None else multiply_packed(x, laid_out, bias)


def share(size: int, placement: Placement) -> int:
    """Returns one rank's part of a size, which must be a multiple of the number of ranks."""
    assert size % placement.group.size == 0, f"{size} does not divide among {placement.group.size} ranks"
    return size // placement.group.size


class Linear(nn.Module):
    """`x @ weight.T + bias`: [num_tokens, in_features] -> [num_tokens, out_features].

    in_features, out_features: if it is a number, every rank keeps all of them. out_features as a mapping: several
    projections of the same input, by their names in the checkpoint, in one GEMM; their outputs are concatenated.
    """

    bias: Tensor | None

    def __init__(
        self,
        in_features: int | Part,
        out_features: int | Mapping[str, Part],
        placement: Placement,
        *,
        bias: bool = False,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        self.group = placement.group
        self.kept = Kept(
            {"": whole_part(out_features)} if isinstance(out_features, int) else out_features,
            whole_part(in_features) if isinstance(in_features, int) else in_features,
        )
        self.method = method or Unquantized()
        self.method.create_weights(self, self.kept, placement)
        self.register_parameter("bias", empty_parameter(self.kept.shape[:1], placement) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self, self.kept, x, self.bias)

    def slots(self, name: str, parameter: Tensor) -> Mapping[str, Slot]:
        return self.method.slots(self.kept, name, parameter)


class QKVParallel(Linear):
    """The query, key and value projections of grouped-query attention in one GEMM.

    The spec has the numbers of heads of the whole model, the attributes those of this rank. If there are more ranks
    than KV heads, several ranks hold the same KV head.
    """

    def __init__(
        self, spec: ModelSpec, placement: Placement, *, bias: bool = False, method: LinearMethod | None = None
    ) -> None:
        (rank, size), num_kv_heads = (placement.group.rank, placement.group.size), spec.num_key_value_heads
        self.num_heads = share(spec.num_attention_heads, placement)
        self.num_kv_heads = spec.num_kv_heads_per_rank(size)
        self.head_dim = head_dim = spec.head_dim
        first_kv_head = rank * num_kv_heads // size
        kv = Part(num_kv_heads * head_dim, first_kv_head * head_dim, self.num_kv_heads * head_dim)
        query = even_part(spec.num_attention_heads * head_dim, placement)
        parts = {"q_proj": query, "k_proj": kv, "v_proj": kv}
        super().__init__(spec.hidden_size, parts, placement, bias=bias, method=method)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[num_tokens, hidden] -> query [num_tokens, num_heads, head_dim], key and value with num_kv_heads."""
        num_tokens = x.shape[0]
        heads = self(x).view(num_tokens, -1, self.head_dim)  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return query, key, value


class RowParallel(Linear):
    """A projection back to the hidden size. Each rank multiplies its part of the input features, [num_tokens,
    in_features / ranks]. The results are summed over the ranks, then the bias is added once.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return super().forward(x)
        output = self.group.all_reduce(self.method.apply(self, self.kept, x, None))
        return output if self.bias is None else output.add_(self.bias)


def whole_part(size: int) -> Part:
    """Returns the part of features that every rank keeps completely."""
    return Part(size, 0, size)


def even_part(size: int, placement: Placement) -> Part:
    """Returns this rank's part of features that are split evenly."""
    kept = share(size, placement)
    return Part(size, placement.group.rank * kept, kept)
