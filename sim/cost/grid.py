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
        self._axis = axes[0]
        self._values: list[float] = []
        self._parts: list[Grid] = []  # at each point of the first axis, of the other dimensions
        if len(axes) == 1:
            assert len(values) == len(self._axis), "a value for each point"
            self._values = values
        else:
            size = len(values) // len(self._axis)
            self._parts = [Grid(axes[1:], values[i * size : (i + 1) * size]) for i in range(len(self._axis))]

    def at(self, point: tuple[float, ...]) -> float:
        """The value at a point, each of whose coordinates counts as the nearest on its axis where it lies outside."""
        return self._at(point, 0)

    def along(self, x: float) -> float:
        """The same of one dimension."""
        axis, values = self._axis, self._values
        right = bisect_right(axis, x)
        if right == 0:
            return values[0]
        left, low = axis[right - 1], values[right - 1]
        if right == len(axis) or left == x:
            return low
        return low + (values[right] - low) * ((x - left) / (axis[right] - left))

    def clamped(self, point: tuple[float, ...]) -> tuple[float, ...]:
        """The nearest point within the axes; the same one where it lies within."""
        return tuple([min(max(x, axis[0]), axis[-1]) for x, axis in zip(point, self.axes, strict=True)])

    def _at(self, point: tuple[float, ...], dimension: int) -> float:
        if not self._parts:
            return self.along(point[dimension])
        x, axis, parts = point[dimension], self._axis, self._parts
        right = bisect_right(axis, x)
        low = parts[max(0, right - 1)]._at(point, dimension + 1)
        if right == 0 or right == len(axis) or axis[right - 1] == x:
            return low
        left = axis[right - 1]
        return low + (parts[right]._at(point, dimension + 1) - low) * ((x - left) / (axis[right] - left))
