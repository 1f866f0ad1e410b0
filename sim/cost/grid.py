"""A function that is known at the points of a grid: multilinear between the points, constant outside.

Plain arithmetic: a value is the same on every machine. It is linear in the sizes themselves, as a kernel's time is a
floor plus a time for each unit, or for each pair of units. sim/cost/measured.py makes grids.
"""

from __future__ import annotations

from math import prod

from librt.vecs import vec
from mypy_extensions import i64


class Grid:
    """axes: the points of each dimension, ascending. values: one for each combination, the last dimension fastest."""

    def __init__(self, axes: list[list[float]], values: list[float]) -> None:
        sizes = [len(axis) for axis in axes]
        assert all(axis == sorted(set(axis)) for axis in axes), "axes ascend"
        assert len(values) == prod(sizes), "a value for each combination"
        self.axes = axes
        self.first, self.last = axes[0][0], axes[0][-1]  # of the first axis
        self._points: vec[float] = vec[float]([x for axis in axes for x in axis])
        firsts = [sum(sizes[:dimension]) for dimension in range(len(axes) + 1)]  # index of each axis's first point
        self._firsts: vec[i64] = vec[i64](firsts)
        self._values: vec[float] = vec[float](values)
        self._num_dimensions: i64 = len(axes)
        self._strides: vec[i64] = vec[i64]([prod(sizes[dimension + 1 :]) for dimension in range(len(axes))])
        # the point that `seek` set: in each dimension the offset of its left neighbour's values, and its position
        # between that neighbour and the next, from 0 to 1
        self._offsets: vec[i64] = vec[i64]([0] * len(axes))
        self._shares: vec[float] = vec[float]([0.0] * len(axes))

    def at(self, point: tuple[float, ...]) -> float:
        """Returns the value at a point. A coordinate outside its axis counts as the nearest end of the axis."""
        dimension: i64
        for dimension, x in enumerate(point):
            self.seek(dimension, x)
        return self.value()

    def along(self, x: float) -> float:
        """Returns the value at `x` of a grid of one dimension."""
        self.seek(0, x)
        return self.value()

    def clamped(self, point: tuple[float, ...]) -> tuple[float, ...]:
        """Returns the nearest point within the axes: the point itself if it is within."""
        return tuple([min(max(x, axis[0]), axis[-1]) for x, axis in zip(point, self.axes, strict=True)])

    def value(self) -> float:
        """Returns the value at the point that `seek` set."""
        return self._value(0, 0)

    def seek(self, dimension: i64, x: float) -> None:
        """Sets one coordinate of the point for the next `value`."""
        points, first, end = self._points, self._firsts[dimension], self._firsts[dimension + 1]
        left, right = first, end  # points up to `left` are at most x, those from `right` on are above it
        while right - left > 1:
            middle = (left + right) // 2
            if points[middle] <= x:
                left = middle
            else:
                right = middle
        self._offsets[dimension] = (left - first) * self._strides[dimension]
        is_between = right < end and x > points[left]
        self._shares[dimension] = (x - points[left]) / (points[right] - points[left]) if is_between else 0.0

    def _value(self, dimension: i64, offset: i64) -> float:
        """Interpolates over this dimension and the later ones. offset: sum of the offsets in the earlier ones."""
        left, share = offset + self._offsets[dimension], self._shares[dimension]
        right = left + self._strides[dimension]
        is_last = dimension == self._num_dimensions - 1
        low = self._values[left] if is_last else self._value(dimension + 1, left)
        if share == 0.0:
            return low
        return low + ((self._values[right] if is_last else self._value(dimension + 1, right)) - low) * share
