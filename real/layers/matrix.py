"""A weight as it is stored, perhaps in FP8 with scales, and its values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Scales(NamedTuple):
    values: Tensor  # float32 [..., groups of rows, groups of columns]
    row_groups: Tensor  # int32 [out_features]: the group of each row
    column_groups: Tensor  # int32 [in_features]: the group of each column
    run: int = 1  # columns run * i … run * i + run - 1 are of one group, for each i; 0: all columns are


class Matrix(NamedTuple):
    """A weight as it is stored, or several of the same shape along a leading dimension."""

    weight: Tensor  # [..., out_features, in_features]
    scales: Scales | None = None  # None: the weight is not quantised

    def one(self, index: int) -> Matrix:
        """Returns one of several weights."""
        scales = self.scales and self.scales._replace(values=self.scales.values[index])
        return Matrix(self.weight[index], scales)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Returns a single weight ready for a GEMM: an FP8 weight dequantised to `dtype`, another as it is."""
        return self.weight if self.scales is None else dequantize(self.weight, *self.scales[:3], dtype)


def dequantize(weight: Tensor, scales: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """weight [out, in] in e4m3; scales [groups of rows, groups of columns]; rows, columns: the group of each -> the
    weight in `dtype`, rounded once."""
    return (weight.to(torch.float32) * scales[rows][:, columns]).to(dtype)
