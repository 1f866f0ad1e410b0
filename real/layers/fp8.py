"""Linear layers whose weights are stored in FP8 (e4m3) with scales: a byte a weight in memory.

What is multiplied by is the weight times its scale, in the format of the activations, made anew for each product: on a
GPU one kernel of torch.compile, which reads a byte and writes two. Activations are not quantised. So results are those
of the same weights in the activations' format, on every device; what is saved is memory, not time.

A part of a weight on one rank may begin and end within a block of weights that share a scale: every row and column that
a rank keeps knows which of the rank's scales is its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from real.device import Placement
from real.layers.compiled import FP8_CAPABILITY, compiled_on_cuda
from real.layers.linear import Kept, LinearMethod, Part, Unquantized, dense_slots, multiply
from real.layers.slots import Slot, shared
from testbed.specs.quantization import Fp8Scheme

STORED = torch.float8_e4m3fn


class Scales(NamedTuple):
    values: Tensor  # float32 [..., groups of rows, groups of columns]
    row_groups: Tensor  # int32 [out_features]: the group that each is in
    column_groups: Tensor  # int32 [in_features]


class Matrix(NamedTuple):
    """A weight as it is stored, or several of the same shape in a dimension before."""

    weight: Tensor  # [..., out_features, in_features]
    scales: Scales | None = None  # None: it is what to multiply by

    def one(self, index: int) -> Matrix:
        """Of several."""
        scales = self.scales and self.scales._replace(values=self.scales.values[index])
        return Matrix(self.weight[index], scales)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """As something to multiply by, of one: in `dtype`, if it is FP8."""
        return self.weight if self.scales is None else dequantize(self.weight, *self.scales, dtype)


class Fp8Layout:
    """Which scales a rank keeps of a weight of which it keeps a part."""

    def __init__(self, scheme: Fp8Scheme, kept: Kept) -> None:
        self._scheme, (self._rows, self._columns) = scheme, kept
        self._num = {name: num_groups(part, scheme.rows) for name, part in kept.rows.items()}
        self.shape = sum(self._num.values()), num_groups(kept.columns, scheme.columns)

    def groups(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of each row and each column the group that it is in, int32."""
        begin, rows = 0, []
        for name, part in self._rows.items():
            rows.append(_group_of_each(part, self._scheme.rows) + begin)
            begin += self._num[name]
        return torch.cat(rows).to(device), _group_of_each(self._columns, self._scheme.columns).to(device)

    def slots(self, scales: Tensor) -> dict[str, Slot]:
        """scales: of `shape`."""
        views = torch.split(scales, [*self._num.values()])
        return {name: self._slot(view, part) for (name, part), view in zip(self._rows.items(), views, strict=True)}

    def _slot(self, view: Tensor, rows: Part) -> Slot:
        """Scales are shared out as the weights are; that of a block which lies on two ranks goes to both."""
        scheme, columns = self._scheme, self._columns
        if scheme.rows is None:  # one of the whole tensor: a scalar
            return Slot(view[0, 0], ())
        if scheme.columns is not None and not columns.is_whole:
            return shared(view, 1, columns.start // scheme.columns, -(-columns.size // scheme.columns))
        return shared(view, 0, rows.start // scheme.rows, -(-rows.size // scheme.rows))


def fp8_matrix(layer: nn.Module, scheme: Fp8Scheme) -> Matrix:
    """What `Fp8.create_weights` gave it."""
    weight, scales = layer.get_parameter("weight"), layer.get_parameter(scheme.scale_name)
    return Matrix(weight, Scales(scales, layer.get_buffer("row_groups"), layer.get_buffer("column_groups")))


class Fp8:
    """A LinearMethod: `weight` [out_features, in_features] in e4m3; its scales, float32, by the scheme's name, [groups
    of rows, groups of columns]; `row_groups` and `column_groups`."""

    def __init__(self, scheme: Fp8Scheme) -> None:
        self.scheme = scheme

    def create_weights(self, layer: nn.Module, kept: Kept, placement: Placement, num: tuple[int, ...] = ()) -> None:
        layout, device = Fp8Layout(self.scheme, kept), placement.device
        weight = torch.empty((*num, *kept.shape), device=device, dtype=STORED)
        scales = torch.empty((*num, *layout.shape), device=device, dtype=torch.float32)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        layer.register_parameter(self.scheme.scale_name, nn.Parameter(scales, requires_grad=False))
        row_groups, column_groups = layout.groups(device)
        layer.register_buffer("row_groups", row_groups, persistent=False)
        layer.register_buffer("column_groups", column_groups, persistent=False)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return multiply(x, fp8_matrix(layer, self.scheme).dense(x.dtype), bias)

    def slots(self, kept: Kept, name: str, parameter: Tensor) -> Mapping[str, Slot]:
        if name == self.scheme.scale_name:
            return Fp8Layout(self.scheme, kept).slots(parameter)
        return dense_slots(kept, parameter)


def linear_method(scheme: Fp8Scheme | None) -> LinearMethod:
    """For weights that are quantised so, or not."""
    return Unquantized() if scheme is None else Fp8(scheme)


def num_groups(part: Part, size: int | None) -> int:
    """Groups of `size` (None: all) in a row that a rank's part touches."""
    return 1 if size is None else -(-(part.start + part.kept) // size) - part.start // size


def _group_of_each(part: Part, size: int | None) -> Tensor:
    """Of each row or column of a rank's part, which of the groups that the part touches it is in; int32 [part.kept]."""
    if size is None:
        return torch.zeros(part.kept, dtype=torch.int32)
    first = part.start // size
    return (torch.arange(part.start, part.start + part.kept) // size - first).to(torch.int32)


@partial(compiled_on_cuda, least=FP8_CAPABILITY)
def dequantize(weight: Tensor, scales: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """weight [out, in] in e4m3, scales [groups of rows, groups of columns], the group of each row and column -> the
    weight in `dtype`, rounded once."""
    return (weight.to(torch.float32) * scales[rows][:, columns]).to(dtype)
