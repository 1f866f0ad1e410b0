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

import torch
from torch import Tensor, nn

from real.device import Placement
from real.layers.compiled import FP8_CAPABILITY, compiled_on_cuda
from real.layers.linear import Linear, Part, dense_slots, multiply
from real.layers.slots import Slot, shared
from testbed.specs.quantization import Fp8Scheme

STORED = torch.float8_e4m3fn


class Fp8:
    """A LinearMethod: `weight` [out_features, in_features] in e4m3, and its scales, float32, by the scheme's name,
    [groups of rows, groups of columns]."""

    def __init__(self, scheme: Fp8Scheme) -> None:
        self._scheme = scheme

    def create_weights(self, layer: Linear, placement: Placement) -> None:
        scheme, device = self._scheme, placement.device
        num_out = sum(part.kept for part in layer.rows.values())
        weight = torch.empty((num_out, layer.columns.kept), device=device, dtype=STORED)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        groups, rows = 0, []
        for part in layer.rows.values():
            own = group_of_each(part, scheme.rows)
            rows.append(own - own[0] + groups)
            groups += num_groups(part, scheme.rows)
        columns = group_of_each(layer.columns, scheme.columns)
        scales = torch.empty((groups, num_groups(layer.columns, scheme.columns)), device=device, dtype=torch.float32)
        layer.register_parameter(scheme.scale_name, nn.Parameter(scales, requires_grad=False))
        layer.register_buffer("row_groups", torch.cat(rows).to(device), persistent=False)
        layer.register_buffer("column_groups", (columns - columns[0]).to(device), persistent=False)

    def apply(self, layer: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
        weight, scales = layer.get_parameter("weight"), layer.get_parameter(self._scheme.scale_name)
        rows, columns = layer.get_buffer("row_groups"), layer.get_buffer("column_groups")
        return multiply(x, dequantize(weight, scales, rows, columns, x.dtype), bias)

    def slots(self, layer: Linear, name: str, parameter: Tensor) -> Mapping[str, Slot]:
        if name != self._scheme.scale_name:
            return dense_slots(layer, parameter)
        found, begin = {}, 0
        for part_name, part in layer.rows.items():
            end = begin + num_groups(part, self._scheme.rows)
            found[part_name] = self._scale_slot(parameter[begin:end], part, layer.columns)
            begin = end
        return found

    def _scale_slot(self, view: Tensor, rows: Part, columns: Part) -> Slot:
        """Scales are shared out as the weights are; that of a block which lies on two ranks goes to both."""
        scheme = self._scheme
        if scheme.rows is None:  # one of the whole tensor: a scalar
            return Slot(view[0, 0], ())
        if columns.kept < columns.size and scheme.columns is not None:
            return shared(view, 1, columns.start // scheme.columns, -(-columns.size // scheme.columns))
        return shared(view, 0, rows.start // scheme.rows, -(-rows.size // scheme.rows))


def num_groups(part: Part, size: int | None) -> int:
    """Groups of `size` (None: all) in a row that a rank's part touches."""
    return 1 if size is None else -(-(part.start + part.kept) // size) - part.start // size


def group_of_each(part: Part, size: int | None) -> Tensor:
    """Of each row or column of a rank's part, the group that it is in, counted in the whole; int64 [part.kept]."""
    if size is None:
        return torch.zeros(part.kept, dtype=torch.int64)
    return torch.arange(part.start, part.start + part.kept) // size


@partial(compiled_on_cuda, least=FP8_CAPABILITY)
def dequantize(weight: Tensor, scales: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """weight [out, in] in e4m3, scales [groups of rows, groups of columns], the group of each row and column -> the
    weight in `dtype`, rounded once."""
    return (weight.to(torch.float32) * scales[rows][:, columns]).to(dtype)
