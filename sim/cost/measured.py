"""Makes grids of one model's operators from a device's operator tables. Uses pyarrow and numpy, once in a run.

The sizes in a table are not those of a model. Along the sizes that vary from step to step (rows, contexts, bytes) the
points of the table are kept. Points more than OUTLIER times above or below both neighbours are left out, and the others
are made monotone (isotonic regression of their logarithms, which does not change monotone points). Across the sizes
that a model fixes (the two of a GEMM, the heads of attention) the ratio of measured time to roofline is interpolated,
in the logarithm of the sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.grid import Grid
from sim.cost.roofline import RooflineCost
from sim.cost.tables import Measured, Part
from testbed.arrow import numbers_of
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.specs.model import ModelSpec
from testbed.specs.operator_tables import OperatorTables, alike, product_dtype, where

OUTLIER = 1.5
PER_OCTAVE = 8  # prompt lengths for each doubling: the time of a prompt grows with the square of its length
BLOCK = 64  # missing points that are filled at a time
Floats = NDArray[np.float64]
MakeRoofline = Callable[[ModelSpec, int], RooflineCost]  # (model, number of ranks) -> its roofline


def measure(
    tables: OperatorTables, model: ModelSpec, size: int, kv_dtype: str | None, window: int | None, make: MakeRoofline
) -> Measured:
    """Returns the grids for `model` on `size` ranks. make: makes the rooflines that guide the interpolation."""
    roofline = make(model, size)
    attention = _Attention(tables, model, size, kv_dtype, window, make)
    sources = sorted({f"{s} {e}" for s, e in _pairs(tables.rows, "source", "engine")})
    return Measured(
        gemm=_products(tables, roofline, model),
        decode=attention.decode(),
        prefill=attention.prefill(),
        mixed=attention.mixed(),
        all_reduce=_messages(tables, "all_reduce", size),
        all_gather=_messages(tables, "all_gather", size),
        elementwise=_elementwise(tables, model, size, roofline),
        sampler=_sampler(tables, model),
        sources=tuple(sources[:3]),
    )


def _any(tables: OperatorTables, operator: str, column: str, names: tuple[str, ...], **equal: Any) -> Any:
    """Returns the rows of an operator with any of these names in `column`."""
    import pyarrow as pa

    return pa.concat_tables([tables.select(operator, **{column: name}, **equal) for name in names])


def _pairs(rows: Any, *names: str) -> set[tuple[Any, ...]]:
    """Returns the distinct combinations of values in some columns."""
    return set(zip(*(rows[name].to_pylist() for name in names), strict=True))


def _kv_names(kv_dtype: str | None, model: ModelSpec) -> tuple[str, ...]:
    """Returns the table's names for K and V of this type. 16-bit types count as one, and so do the 8-bit types."""
    name = kv_dtype or ("bfloat16" if model.dtype == "fp8" else model.dtype)
    return alike("fp8" if name.startswith("fp8") else name)


# --- points along one size ---


def _medians(sizes: list[Floats], times: Floats) -> list[Floats]:
    """Returns the coordinates of each distinct point, ascending, and the median of its times."""
    order = np.lexsort(sizes[::-1])
    points, times = np.column_stack(sizes)[order], times[order]
    starts = np.flatnonzero(np.append(True, (np.diff(points, axis=0) != 0).any(axis=1)))
    medians = np.array([np.median(part) for part in np.split(times, starts[1:])])
    return [*points[starts].T, medians]


def _line(sizes: Iterable[float], times: Iterable[float]) -> tuple[Floats, Floats]:
    """Returns one time for each size, ascending: the medians of repeats, without outliers, made non-decreasing."""
    xs, ys = _medians([np.asarray(list(sizes), float)], np.asarray(list(times), float))
    kept = _inliers(ys)
    return xs[kept], _isotonic(ys[kept])


def _inliers(ys: Floats) -> NDArray[np.bool_]:
    """Marks all points except those more than OUTLIER times above both neighbours, or below both."""
    kept = np.full(ys.size, True)
    if ys.size > 2:
        low, high = np.minimum(ys[:-2], ys[2:]), np.maximum(ys[:-2], ys[2:])
        kept[1:-1] = (ys[1:-1] <= OUTLIER * high) & (ys[1:-1] >= low / OUTLIER)
    return kept


def _inliers_of(sizes: list[Floats], values: Floats) -> NDArray[np.bool_]:
    """Marks inliers along the last size, for each combination of the others. Points are in ascending order."""
    others = np.column_stack([*sizes[:-1], np.zeros(values.size)])
    starts = np.flatnonzero(np.append(True, (np.diff(others, axis=0) != 0).any(axis=1)))
    return np.concatenate([_inliers(part) for part in np.split(values, starts[1:])])


def _isotonic(ys: Floats) -> Floats:
    """Returns the nearest non-decreasing values: decreasing neighbours get the mean of their logarithms (pool adjacent
    violators). Non-decreasing input is not changed. scipy has this, but its import takes 0.2 s in every run."""
    pools: list[tuple[float, int]] = []  # (mean of the logarithms, number of points)
    logs = np.log(ys).tolist()
    for log in logs:
        mean, num = log, 1
        while pools and pools[-1][0] > mean:
            before, num_before = pools.pop()
            mean = (mean * num + before * num_before) / (num + num_before)
            num += num_before
        pools.append((mean, num))
    fitted = np.repeat([mean for mean, _ in pools], [num for _, num in pools])
    return np.where(fitted == logs, ys, np.exp(fitted))


def _grid(xs: Floats, ys: Floats) -> Grid:
    return Grid([xs.tolist()], ys.tolist())


# --- GEMMs ---


def _products(tables: OperatorTables, roofline: RooflineCost, model: ModelSpec) -> dict[tuple[int, int], Part]:
    """Returns the times of each of the model's GEMMs over rows; sizes not in the table are interpolated."""
    found = {}
    for dtype, width, products in (
        (model.dtype, model.dtype_bytes, roofline.products()[:-1]),
        (product_dtype(model), model.activation_dtype_bytes, roofline.products()[-1:]),  # the LM head
    ):
        lines = _Lines(tables, dtype)
        for _, num_in, num_out in products:
            part = _product(lines, roofline, num_in, num_out, width)
            if part is not None:
                found[num_in, num_out] = part
    return found


def _product(lines: _Lines, roofline: RooflineCost, num_in: int, num_out: int, width: int) -> Part | None:
    line = lines.at(num_in, num_out)
    if line is not None:
        return Part(_grid(*line), True)
    around = lines.around(num_in, num_out)
    if not around:
        return None
    sizes = sorted(set.intersection(*(set(xs.tolist()) for (xs, _), _, _ in around)))
    if not sizes:
        return None
    logs = np.zeros(len(sizes))
    for (xs, ys), (near_in, near_out), weight in around:
        expected = [roofline.product_ns(int(x), near_in, near_out, width) for x in sizes]
        logs += weight * np.log(ys[np.searchsorted(xs, sizes)] / expected)
    own = [roofline.product_ns(int(x), num_in, num_out, width) for x in sizes]
    return Part(_grid(np.asarray(sizes), _isotonic(np.exp(logs) * own)), False)


class _Lines:
    """The GEMMs of a table by their two fixed sizes."""

    def __init__(self, tables: OperatorTables, dtype: str) -> None:
        rows = _any(tables, "gemm", "dtype", alike(dtype))
        self._m, self._n, self._k, self._time = (numbers_of(rows[name]) for name in ("m", "n", "k", "time_ns"))
        self._pairs = {(int(a), int(b)): None for a, b in zip(self._k.tolist(), self._n.tolist(), strict=True)}

    def at(self, num_in: int, num_out: int) -> tuple[Floats, Floats] | None:
        if (num_in, num_out) not in self._pairs:
            return None
        chosen = (self._k == num_in) & (self._n == num_out)
        return _line(self._m[chosen], self._time[chosen])

    def around(self, num_in: int, num_out: int) -> list[tuple[tuple[Floats, Floats], tuple[int, int], float]]:
        """Returns (line, its sizes, weight) of the measured GEMMs around these sizes: the corners of the rectangle of
        neighbouring sizes, weighted by the logarithms of both, if all were measured; else only the nearest GEMM."""
        if not self._pairs:
            return []
        ins = _neighbours(sorted({a: None for a, _ in self._pairs}), num_in)
        outs = _neighbours(sorted({b: None for _, b in self._pairs}), num_out)
        corners = [(a, b, u * v) for a, u in ins for b, v in outs if u * v > 0]
        if not all((a, b) in self._pairs for a, b, _ in corners):
            a, b = min(self._pairs, key=lambda one: abs(np.log(one[0] / num_in)) + abs(np.log(one[1] / num_out)))
            corners = [(a, b, 1.0)]
        found = [(self.at(a, b), (a, b), weight) for a, b, weight in corners]
        return [(line, sizes, weight) for line, sizes, weight in found if line is not None]


def _neighbours(points: list[int], x: int) -> list[tuple[int, float]]:
    """Returns the points on both sides of x, weighted by the logarithm; on a point or beyond the ends, one point."""
    right = int(np.searchsorted(points, x))
    if right < len(points) and points[right] == x:
        return [(x, 1.0)]
    if right == 0 or right == len(points):
        return [(points[min(right, len(points) - 1)], 1.0)]
    left, last = points[right - 1], points[right]
    share = float(np.log(x / left) / np.log(last / left))
    return [(left, 1.0 - share), (last, share)]


# --- attention ---


class _Attention:
    """Attention of one head shape: the model's on one rank if it was measured, else the nearest measured one."""

    def __init__(
        self, tables: OperatorTables, model: ModelSpec, size: int, kv_dtype: str | None, window: int | None,
        make: MakeRoofline,
    ) -> None:  # fmt: skip
        self._tables, self._kv_names, self._window = tables, _kv_names(kv_dtype, model), window
        self._heads = model.num_attention_heads // size, model.num_kv_heads_per_rank(size)
        self._model, self._make, self._own = model, make, make(model, size)

    def decode(self) -> Part | None:
        """Returns ns of one layer over (sequences, context of each); None without measurements."""
        found = self._ratios("attention_decode", "batch", "context")
        if found is None:
            return None
        axes, ratios, is_exact = found
        layers = self._model.num_hidden_layers
        own = np.array([[_decode_ns(self._own, b, c) / layers for c in axes[1]] for b in axes[0]])
        return _part(axes, _rising(ratios * own), is_exact)

    def prefill(self) -> Part | None:
        """Returns measured time / roofline, over (tokens, positions before them); None without measurements."""
        found = self._ratios("attention_prefill", "new_tokens", "context")
        if found is None:
            return None
        (tokens, starts), ratios, is_exact = found
        fine = _refined(tokens)
        own = np.array([[_prefill_ns(self._own, c, s) for s in starts] for c in fine])
        logs = np.array([np.interp(np.log(fine), np.log(tokens), np.log(column)) for column in ratios.T]).T
        return _part([fine, starts], _rising(np.exp(logs) * own) / own, is_exact)

    def mixed(self) -> Part | None:
        """Returns measured time / roofline, over (tokens, positions before them, decodes, context of each); None
        without measurements."""
        found = self._ratios("attention_mixed", "new_tokens", "context", "batch", "decode_context")
        return None if found is None else _part(*found)

    def _ratios(self, operator: str, *sizes: str) -> tuple[list[Floats], Floats, bool] | None:
        """Returns the measured sizes, measured time / roofline on their whole grid, and whether the heads are the
        model's own; None without measurements."""
        found = self._points(operator, *sizes)
        if found is None:
            return None
        *points, ratio, is_exact = found
        axes = [np.unique(values) for values in points]
        return axes, _filled(axes, points, ratio), is_exact

    def _points(self, operator: str, *sizes: str) -> Any:
        """Returns arrays of the sizes and of measured time / roofline, and whether the heads are the model's own; None
        without measurements."""
        fixed = {"head_dim": self._model.head_dim, "window": self._window}
        rows = _any(self._tables, operator, "kv_dtype", self._kv_names, **fixed)
        if operator == "attention_prefill" and rows.num_rows:
            rows = where(rows, batch=1)
        if not rows.num_rows:
            return None
        heads = self._nearest_heads(_pairs(rows, "num_heads", "num_kv_heads"))
        rows = where(rows, num_heads=heads[0], num_kv_heads=heads[1])
        kernels = Counter(rows["kernel"].to_pylist())
        chosen = max(sorted(kernels), key=lambda name: kernels[name])  # the kernel that was timed at most sizes
        rows = where(rows, kernel=chosen)
        *points, times = _medians([numbers_of(rows[name]) for name in sizes], numbers_of(rows["time_ns"]))
        theirs = self._own if heads == self._heads else self._make(self._with_heads(*heads), 1)
        expected = np.array([_attention_ns(theirs, operator, *point) for point in zip(*points, strict=True)])
        ratio = times * self._model.num_hidden_layers / expected
        kept = _inliers_of(points, ratio)
        return *(values[kept] for values in points), ratio[kept], heads == self._heads

    def _nearest_heads(self, measured: set[tuple[int, int]]) -> tuple[int, int]:
        """Returns the measured heads nearest to the model's. KV heads count double: a decode reads their K and V."""

        def distance(heads: tuple[int, int]) -> tuple[float, tuple[int, int]]:
            far = abs(np.log(heads[0] / self._heads[0])) + 2 * abs(np.log(heads[1] / self._heads[1]))
            return float(far), heads

        nearest = min(measured, key=distance)
        return int(nearest[0]), int(nearest[1])

    def _with_heads(self, num_heads: int, num_kv_heads: int) -> ModelSpec:
        return replace(self._model, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads)


def _part(axes: list[Floats], values: Floats, is_exact: bool) -> Part:
    return Part(Grid([axis.tolist() for axis in axes], values.ravel().tolist()), is_exact)


def _attention_ns(cost: RooflineCost, operator: str, *point: float) -> float:
    if operator == "attention_decode":
        return _decode_ns(cost, *point)
    tokens, start, *decodes = (int(x) for x in point)
    if not decodes:
        return _prefill_ns(cost, tokens, start)
    num, context = decodes
    parts = cost.breakdown(BatchShape(num, num * context, (PrefillChunk(start, tokens),), 0))
    return parts["attention_prefill"] + parts["attention_decode"]


def _decode_ns(cost: RooflineCost, batch: float, context: float) -> float:
    return cost.breakdown(BatchShape(int(batch), int(batch * context), (), 0))["attention_decode"]


def _prefill_ns(cost: RooflineCost, tokens: float, start: float) -> float:
    return cost.breakdown(BatchShape(0, 0, (PrefillChunk(int(start), max(1, int(tokens))),), 0))["attention_prefill"]


def _refined(points: Floats) -> Floats:
    """Returns the points, and whole numbers between them, PER_OCTAVE for each doubling."""
    steps = np.arange(0, PER_OCTAVE * np.log2(points[-1] / points[0])) / PER_OCTAVE
    return np.unique(np.concatenate([points, np.round(points[0] * 2.0**steps)]))


def _filled(axes: list[Floats], points: list[Floats], ratio: Floats) -> Floats:
    """Returns the ratios on the whole grid. A missing point gets that of the nearest measured one, by logarithms."""
    shape, index = (
        tuple(axis.size for axis in axes),
        tuple(np.searchsorted(axis, values) for axis, values in zip(axes, points, strict=True)),
    )
    grid = np.full(shape, np.nan)
    grid[index] = ratio
    known, missing = [np.log1p(values) for values in points], np.argwhere(np.isnan(grid))
    for first in range(0, len(missing), BLOCK):
        places = missing[first : first + BLOCK]
        wanted = [np.log1p(axis[at]) for axis, at in zip(axes, places.T, strict=True)]
        far = np.sum([(one[:, None] - other) ** 2 for one, other in zip(wanted, known, strict=True)], axis=0)
        grid[tuple(places.T)] = ratio[far.argmin(axis=1)]
    return grid


def _rising(times: Floats) -> Floats:
    """Makes times non-decreasing along both sizes: isotonic regression of each line, then a running maximum."""
    for axis in (1, 0):
        times = np.apply_along_axis(_isotonic, axis, times)
    return np.maximum.accumulate(np.maximum.accumulate(times, axis=1), axis=0)


# --- the rest ---


def _messages(tables: OperatorTables, operator: str, size: int) -> Part | None:
    """Returns times over bytes, between `size` ranks. Of several kernels the fastest counts, as engines choose it.
    Calls that were timed with the host's launches (`_eager`) are left out."""
    rows = tables.select(operator, num_ranks=size)
    if size == 1 or not rows.num_rows:
        return None
    fastest: dict[int, dict[str, list[float]]] = {}  # bytes -> kernel -> times
    for kernel, num_bytes, ns in zip(
        *(rows[name].to_pylist() for name in ("kernel", "num_bytes", "time_ns")), strict=True
    ):
        if not kernel.endswith("_eager"):
            fastest.setdefault(num_bytes, {}).setdefault(kernel, []).append(ns)
    if not fastest:
        return None
    times = [min(float(np.median(of)) for of in kernels.values()) for kernels in fastest.values()]
    return Part(_grid(*_line(fastest, times)), True)


def _elementwise(tables: OperatorTables, model: ModelSpec, size: int, roofline: RooflineCost) -> Part | None:
    """Returns times of one layer over tokens: two norms, rotary embedding, activation, and q- and k-norm for Qwen3.
    None with experts: no table has the kernels that choose experts and sum their results."""
    if model.experts is not None:
        return None
    q_size, kv_size = (
        model.num_attention_heads // size * model.head_dim, model.num_kv_heads_per_rank(size) * model.head_dim
    )  # fmt: skip
    needed = [("layernorm", model.hidden_size), ("layernorm", model.hidden_size), ("rotary_emb", q_size + kv_size)]
    needed.append(("act_fn", -(-model.intermediate_size // size)))
    if model.has_qk_norm:
        needed.append(("qk_norm", q_size + kv_size))
    lines = []
    for kernel, width in needed:
        rows = tables.select("elementwise", kernel=kernel, n=width)
        if not rows.num_rows and kernel == "qk_norm":  # some tables have only that of one rank, all heads
            rows = tables.select("elementwise", kernel=kernel, n=(q_size + kv_size) * size)
        if not rows.num_rows:
            return None
        lines.append(_line(rows["m"].to_pylist(), rows["time_ns"].to_pylist()))
    sizes = np.unique(np.concatenate([xs for xs, _ in lines]))
    total = np.sum([np.interp(sizes, xs, ys) for xs, ys in lines], axis=0)
    return Part(_grid(sizes, total), True)


def _sampler(tables: OperatorTables, model: ModelSpec) -> Part | None:
    rows = tables.select("sampler", n=model.vocab_size)
    if not rows.num_rows:
        return None
    return Part(_grid(*_line(rows["m"].to_pylist(), rows["time_ns"].to_pylist())), True)
