"""Linear layers whose weights are stored in FP8 (e4m3) with scales: one byte of memory per weight.

Activations are not quantised, so results are those of the same weights in the activations' format, on every device. On
a GPU a few tokens are multiplied by the stored weight (real/kernels/few_tokens.py). Else the weight is multiplied by
its scales and converted to the activations' format before each GEMM, on a GPU by one kernel, which reads one byte and
writes two per weight.

A rank's part of a weight can begin and end within a block of weights that share a scale. So the index of the scale is
stored for every row and every column that a rank keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

import torch
from torch import Tensor, nn

from real.device import Placement
from real.kernels import has_kernels
from real.layers.linear import Kept, LinearMethod, Part, Unquantized, dense_slots, multiply
from real.layers.matrix import Matrix, Scales
from real.layers.slots import Slot, shared
from testbed.specs.quantization import Fp8Scheme

STORED = torch.float8_e4m3fn


class Fp8Layout:
    """Which scales of a weight a rank keeps, given the part of the weight that it keeps."""

    def __init__(self, scheme: Fp8Scheme, kept: Kept) -> None:
        self._scheme, (self._rows, self._columns) = scheme, kept
        self._num = {name: num_groups(part, scheme.rows) for name, part in kept.rows.items()}
        self.shape = sum(self._num.values()), num_groups(kept.columns, scheme.columns)

    def groups(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the group of each row and of each column, int32."""
        begin, rows = 0, []
        for name, part in self._rows.items():
            rows.append(_group_of_each(part, self._scheme.rows) + begin)
            begin += self._num[name]
        return torch.cat(rows).to(device), _group_of_each(self._columns, self._scheme.columns).to(device)

    def slots(self, scales: Tensor) -> dict[str, Slot]:
        """Returns a slot for the scales of each packed projection. scales: a parameter of `shape`."""
        views = torch.split(scales, [*self._num.values()])
        return {name: self._slot(view, part) for (name, part), view in zip(self._rows.items(), views, strict=True)}

    def _slot(self, view: Tensor, rows: Part) -> Slot:
        """Scales are split over the ranks as the weights are; a block that two ranks share has its scale on both."""
        scheme, columns = self._scheme, self._columns
        if scheme.rows is None:  # one scale for the whole tensor: a scalar
            return Slot(view[0, 0], ())
        if scheme.columns is not None and not columns.is_whole:
            return shared(view, 1, columns.start // scheme.columns, -(-columns.size // scheme.columns))
        return shared(view, 0, rows.start // scheme.rows, -(-rows.size // scheme.rows))


def fp8_matrix(layer: nn.Module, scheme: Fp8Scheme, columns: Part) -> Matrix:
    """Returns the weight and scales that `Fp8.create_weights` registered in the layer."""
    weight, scales = layer.get_parameter("weight"), layer.get_parameter(scheme.scale_name)
    groups = layer.get_buffer("row_groups"), layer.get_buffer("column_groups")
    return Matrix(weight, Scales(scales, *groups, column_run(scheme, columns)))


def column_run(scheme: Fp8Scheme, columns: Part) -> int:
    """Returns the `run` of the Scales of a rank's columns."""
    return 0 if scheme.columns is None else gcd(columns.start, scheme.columns)


class Fp8:
    """A LinearMethod. It gives a layer: `weight` [out_features, in_features] in e4m3; its scales, float32 [groups of
    rows, groups of columns], under the scheme's name for them; the buffers `row_groups` and `column_groups`."""

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

    def apply(self, layer: nn.Module, kept: Kept, x: Tensor, bias: Tensor | None) -> Tensor:
        matrix = fp8_matrix(layer, self.scheme, kept.columns)
        if has_kernels(x.device):
            from real.kernels.few_tokens import multiply_fp8  # not at the top: needs Triton

            return multiply_fp8(x, matrix, bias)
        return multiply(x, matrix.dense(x.dtype), bias)

    def slots(self, kept: Kept, name: str, parameter: Tensor) -> Mapping[str, Slot]:
        if name == self.scheme.scale_name:
            return Fp8Layout(self.scheme, kept).slots(parameter)
        return dense_slots(kept, parameter)


def linear_method(scheme: Fp8Scheme | None) -> LinearMethod:
    """Returns the method for weights of this scheme; None: for weights that are not quantised."""
    return Unquantized() if scheme is None else Fp8(scheme)


def num_groups(part: Part, size: int | None) -> int:
    """Returns how many groups of `size` consecutive features (None: one group of all) a rank's part touches."""
    return 1 if size is None else -(-(part.start + part.kept) // size) - part.start // size


def _group_of_each(part: Part, size: int | None) -> Tensor:
    """Returns for each feature of a rank's part its group, counted from the first that the part touches; int32
    [part.kept]."""
    if size is None:
        return torch.zeros(part.kept, dtype=torch.int32)
    first = part.start // size
    return (torch.arange(part.start, part.start + part.kept) // size - first).to(torch.int32)
