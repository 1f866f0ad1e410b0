"""Doubtful points of a table: points off their neighbours, times that fall while a size grows, and times that the data
sheet does not allow. They are reported in at most ten sentences with numbers; the tables are not changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from analysis.reading.rows import FloatArray
from experiments.tables.roofline import bounds_ns, has_bound
from testbed.errors import ProfileError
from testbed.specs.device import DeviceSpec
from testbed.specs.operator_tables import OPERATOR_COLUMNS, OPERATORS, SIZES, OperatorTables

MAX_DOUBTS = 10
OFF = 1.5  # a point is off if it differs by more than this factor from the interpolation between its neighbours
FALLS = 0.85  # a time falls if it is below this share of the time at a smaller size
GAP = 4.0  # neighbours further apart than this factor are not used for interpolation
SLOW = 20.0  # if the median GEMM takes more than this times the data sheet's time, unit or device is wrong
_LEAST_SLOW_NS = 5_000.0  # data sheet's time from which on SLOW is tested; below, launches may dominate
_LEAST_SHARE = 0.2  # if the median large point takes less than this share of the data sheet's time, it is an error
_FEW_LARGE = 4  # large points, from which on their median is judged
_LEAST_LOAD_NS = 100_000.0  # a point is large if the data sheet's time is above this: launches are negligible
_APART = ("num_heads", "num_kv_heads", "head_dim", "num_ranks")  # sizes along which points are not compared
_KEYS = tuple(name for name in OPERATOR_COLUMNS if name not in ("operator", "time_ns", "licence"))


def checked(tables: OperatorTables, spec: DeviceSpec | None) -> OperatorTables:
    """The tables with doubts added. spec: the device's data sheet, if the library has it.

    Raises ProfileError if times are far below what the device allows, so that their unit must be wrong.
    """
    found: list[tuple[int, str]] = []
    for operator in OPERATORS:
        rows = tables.select(operator).to_pandas()
        if len(rows):
            found += _of_operator(operator, rows, spec)
    if spec is not None:
        found += _too_slow(tables.select("gemm").to_pandas(), spec)
    ranked = [text for _, text in sorted(found, key=lambda doubt: -doubt[0])]
    said = [*tables.doubts, *ranked]
    if len(said) > MAX_DOUBTS:
        said = [*said[: MAX_DOUBTS - 1], f"and {len(said) - MAX_DOUBTS + 1} more, each about fewer points"]
    return replace(tables, doubts=tuple(said))


def _are(num: int) -> str:
    return f"{num:,} {'is' if num == 1 else 'are'}"


def _of_operator(operator: str, rows: pd.DataFrame, spec: DeviceSpec | None) -> Iterator[tuple[int, str]]:
    """(number of points, sentence) for each dtype with doubts."""
    for dtype, some in rows.groupby("dtype"):
        label, num = f"{operator} {dtype}", len(some)
        points = _Points(some)
        axes = [name for name in SIZES[operator] if name not in _APART and (name != "n" or operator == "gemm")]
        none = np.zeros(len(points))  # the host's time has no size
        off = np.max([none, *(_off_neighbours(points, axis) for axis in axes)], axis=0)
        falls = np.max([none, *(_falling(points, axis) for axis in axes)], axis=0)
        fast = np.zeros(len(points))
        if spec is not None and has_bound(operator, str(dtype), spec):
            fast = _too_fast(label, some, points, operator, spec)
        num_again, num_off, num_falls = num - len(points), int((off > OFF).sum()), int((falls > 1 / FALLS).sum())
        num_fast = int((fast > 1.0).sum())
        parts = []
        if num_again:
            parts.append(f"{_are(num_again)} measured again (their mean is looked at)")
        if num_off:
            parts.append(
                f"{_are(num_off)} more than {OFF:g} x off their neighbours, the worst {off.max():.1f} x at "
                f"{points.words(off.argmax())}"
            )
        if num_falls:
            parts.append(
                f"in {num_falls:,} the time falls by more than {1 - FALLS:.0%} while a size grows, the worst by "
                f"{1 - 1 / falls.max():.0%} at {points.words(falls.argmax())}"
            )
        if num_fast:
            why = "reduced in the switch" if operator == "all_reduce" else "read from a cache"
            parts.append(
                f"{_are(num_fast)} faster than the data sheet allows ({why}?), up to {fast.max():.2f} x at "
                f"{points.words(fast.argmax())}"
            )
        if parts:
            doubtful = num_again + num_off + num_falls + num_fast
            yield doubtful, f"{label}: of {num:,} points, {'; '.join(parts)}"


def _too_slow(rows: pd.DataFrame, spec: DeviceSpec) -> Iterator[tuple[int, str]]:
    """A doubt if the median of all large GEMMs takes many times the data sheet's time."""
    factors: list[float] = []
    for dtype, some in rows.groupby("dtype"):
        if has_bound("gemm", str(dtype), spec):
            bound = bounds_ns("gemm", some, spec)
            large = bound > _LEAST_SLOW_NS
            factors += (some["time_ns"].to_numpy()[large] / bound[large]).tolist()
    if len(factors) >= _FEW_LARGE and (median := float(np.median(factors))) > SLOW:
        yield (
            len(rows),
            f"gemm: half of {len(factors):,} large points take more than {median:,.3g} x the time of the data sheet of "
            f"{spec.name}; is it this device, and are its times in the right unit?",
        )


class _Points:
    """Rows of the same sizes as one point, with their mean time."""

    def __init__(self, rows: pd.DataFrame) -> None:
        by_size = rows.groupby(list(_KEYS), dropna=False)
        self.of_row = by_size.ngroup().to_numpy()  # the point of each row
        self._points = by_size["time_ns"].mean().reset_index()

    def __len__(self) -> int:
        return len(self._points)

    def along(self, axis: str) -> tuple[FloatArray, FloatArray, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """(sizes and times of the points, in an order in which those that differ only in this size are adjacent, with
        this size ascending; the line of points that each belongs to; the number of each point)."""
        others = [name for name in _KEYS if name != axis]
        ordered = self._points.sort_values([*others, axis])
        line = ordered.groupby(others, dropna=False, sort=False).ngroup()
        return ordered[axis].to_numpy(float), ordered["time_ns"].to_numpy(), line.to_numpy(), ordered.index.to_numpy()

    def of_each(self, numbers: np.ndarray[Any, Any], factors: FloatArray) -> FloatArray:
        """The largest factor of each point, 0 for one without any. numbers: the points that the factors are of."""
        found = np.zeros(len(self))
        np.maximum.at(found, numbers, factors)
        return found

    def words(self, number: Any) -> str:
        sizes = self._points.loc[number, [name for name in _KEYS if OPERATOR_COLUMNS[name] == "int64"]].dropna()
        return " ".join(f"{name}={size:,.0f}" for name, size in sizes.items())


def _off_neighbours(points: _Points, axis: str) -> FloatArray:
    """By what factor each point is off the line between its neighbours on both sides, in logarithms; 0 without them.

    A point that is off makes its neighbours look off, too: of adjacent points only the one with the largest factor
    counts.
    """
    size, time_ns, line, number = points.along(axis)
    time_ns = np.log(time_ns)
    inner = np.flatnonzero((line[:-2] == line[2:]) & (size[:-2] > 0)) + 1
    left, here, right = np.log(size[inner - 1]), np.log(size[inner]), np.log(size[inner + 1])
    near = (right - here <= np.log(GAP)) & (here - left <= np.log(GAP))
    inner, left, here, right = inner[near], left[near], here[near], right[near]
    between = time_ns[inner - 1] + (time_ns[inner + 1] - time_ns[inner - 1]) * (here - left) / (right - left)
    factors = np.zeros(len(size))
    factors[inner] = np.exp(np.abs(time_ns[inner] - between))
    is_most = (factors[inner] >= factors[inner - 1]) & (factors[inner] >= factors[inner + 1])
    return points.of_each(number[inner[is_most]], factors[inner[is_most]])


def _falling(points: _Points, axis: str) -> FloatArray:
    """The time at the next smaller size over that of each point; 0 for the smallest size."""
    _, time_ns, line, number = points.along(axis)
    return points.of_each(number[1:], np.where(line[1:] == line[:-1], time_ns[:-1] / time_ns[1:], 0.0))


def _too_fast(label: str, rows: pd.DataFrame, points: _Points, operator: str, spec: DeviceSpec) -> FloatArray:
    """The least time that the data sheet's rates allow over that of each point. Raises ProfileError if the median large
    point took far less, as the unit must be wrong."""
    bound, time_ns = bounds_ns(operator, rows, spec), rows["time_ns"].to_numpy()
    _check_unit(label, bound, time_ns, spec)
    return points.of_each(points.of_row, bound / time_ns)


def check_units(tables: OperatorTables, spec: DeviceSpec) -> None:
    """Raises ProfileError if the times of an operator are so far below what the device allows that their unit must be
    wrong. `checked` does so too, and takes seconds for large tables."""
    for operator in OPERATORS:
        for dtype, rows in tables.select(operator).to_pandas().groupby("dtype"):
            if has_bound(operator, dtype, spec):
                _check_unit(f"{operator} {dtype}", bounds_ns(operator, rows, spec), rows["time_ns"].to_numpy(), spec)


def _check_unit(label: str, bound: FloatArray, time_ns: FloatArray, spec: DeviceSpec) -> None:
    """Raises ProfileError if the median large point took far less than the data sheet's time."""
    large = bound > _LEAST_LOAD_NS
    if large.sum() >= _FEW_LARGE:
        share = float(np.median(time_ns[large] / bound[large]))
        if share < _LEAST_SHARE:
            raise ProfileError(
                f"{label}: half of {int(large.sum()):,} large points take less than {share:.3g} of the least time that "
                f"the data sheet of {spec.name} allows; is it this device, and are its times in the right unit?"
            )
