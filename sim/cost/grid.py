"""A function known at the points of a grid: multilinear between them, level outside.

Plain arithmetic: a value is the same on every machine. Linear in the sizes themselves, as what a kernel takes is a
floor and so much for each unit, or pair of units. sim/cost/measured.py makes grids.
"""

from __future__ import annotations

from bisect import bisect_right


class Grid:
    """axes: for each dimension its points, ascending. values: one for each combination, the last dimension fastest."""

    def __init__(self, axes: list[list[float]], values: list[float]) -> None:
        assert all(axis == sorted(set(axis)) for axis in axes), "axes ascend"
        self.axes = axes
        self._values = values
        self._strides: list[int] = []
        size = 1
        for axis in reversed(axes):
            self._strides.insert(0, size)
            size *= len(axis)
        assert size == len(values), "a value for each combination"

    def at(self, point: tuple[float, ...]) -> float:
        """The value at a point, each of whose coordinates counts as the nearest on its axis where it lies outside."""
        corners: list[tuple[int, float]] = [(0, 1.0)]
        for x, axis, stride in zip(point, self.axes, self._strides, strict=True):
            right = bisect_right(axis, x)
            if right == 0 or right == len(axis) or axis[right - 1] == x:
                offset = max(0, right - 1) * stride
                corners = [(at + offset, weight) for at, weight in corners]
                continue
            left = axis[right - 1]
            share = (x - left) / (axis[right] - left)
            offset = (right - 1) * stride
            near = [(at + offset, weight * (1.0 - share)) for at, weight in corners]
            corners = near + [(at + offset + stride, weight * share) for at, weight in corners]
        total = 0.0
        for at, weight in corners:
            total += weight * self._values[at]
        return total

    def clamped(self, point: tuple[float, ...]) -> tuple[float, ...]:
        """The nearest point within the axes; the same one where it lies within."""
        return tuple([min(max(x, axis[0]), axis[-1]) for x, axis in zip(point, self.axes, strict=True)])
