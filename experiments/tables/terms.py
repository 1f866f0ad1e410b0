"""Fits terms of a data sheet to a device's tables: those in experiments/conf/device/*.yaml for GEMMs with few rows, for
GEMMs with many rows, and for all-reduces over NVLink or xGMI."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from analysis.reading.rows import FloatArray
from experiments.tables.roofline import numbers
from sim.cost.collectives import collectives_of
from sim.cost.roofline import RooflineCost
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec
from testbed.specs.operator_tables import OperatorTables

_MIN_BYTES, _MAX_ROWS = 8e6, 64  # GEMMs bound by reading weights, as in a decode step
_LARGE, _MANY_ROWS = 2048, (128, 8192)  # GEMMs bound by FLOPs, as in a prefill
_MESSAGES = (2**17, 2**26)  # message sizes, in bytes, in steps of a model with some billion weights
_TIMED_WITH_LAUNCHES = "_eager"
_MIN_POINTS = 12


def term_lines(tables: OperatorTables, spec: DeviceSpec | None) -> list[str]:
    """Lines with the fitted terms next to those of the device. Empty if the tables have too few points, or if nobody
    has the device's data sheet."""
    return [] if spec is None else [*_products(tables, spec), *_fp8_products(tables, spec), *_all_reduces(tables, spec)]


def _products(tables: OperatorTables, spec: DeviceSpec) -> list[str]:
    """Fits GEMMs: time = floor + max(bytes / (rate x efficiency), FLOPs / (rate x efficiency)), with rows rounded up to
    whole tiles. The loss is the mean absolute log error."""
    rows = tables.select("gemm").to_pandas()
    m, n, k, ns = (numbers(rows, name) for name in ("m", "n", "k", "time_ns"))
    is_16_bit = rows["dtype"].isin(("bfloat16", "float16")).to_numpy()
    bytes_ns = 2 * (k * n + m * (k + n)) / spec.memory_bytes_per_s * 1e9
    flops_ns = 2 * np.ceil(m / spec.gemm_tile_rows) * spec.gemm_tile_rows * n * k / spec.flops_per_s * 1e9
    lines = []
    few = is_16_bit & (2 * n * k > _MIN_BYTES) & (m <= _MAX_ROWS)
    if few.sum() >= _MIN_POINTS:
        start = (1e-3 * spec.gemm_floor_ns, spec.memory_efficiency)  # us
        floor_us, efficiency = _minimized(lambda x: _loss(1e3 * abs(x[0]) + bytes_ns[few] / abs(x[1]), ns[few]), start)
        lines.append(
            f"products of at most {_MAX_ROWS} rows and over {_MIN_BYTES / 1e6:g} MB of weights fit gemm_floor_ns="
            f"{round(100 * floor_us) * 10} memory_efficiency={efficiency:.3g} (device={spec.name} has "
            f"{spec.gemm_floor_ns} and {spec.memory_efficiency:g})"
        )
    many = is_16_bit & (n >= _LARGE) & (k >= _LARGE) & (m >= _MANY_ROWS[0]) & (m <= _MANY_ROWS[1])
    if many.sum() >= _MIN_POINTS:
        least_ns = bytes_ns[many] / spec.memory_efficiency

        def loss(x: FloatArray) -> float:
            return _loss(spec.gemm_floor_ns + np.maximum(flops_ns[many] / abs(x[0]), least_ns), ns[many])

        (efficiency,) = _minimized(loss, (spec.compute_efficiency,))
        lines.append(
            f"products of {_MANY_ROWS[0]} to {_MANY_ROWS[1]:,} rows fit compute_efficiency={efficiency:.3g} with "
            f"gemm_tile_rows={spec.gemm_tile_rows} (device={spec.name} has {spec.compute_efficiency:g})"
        )
    return lines


def _fp8_products(tables: OperatorTables, spec: DeviceSpec) -> list[str]:
    """Fits FP8 GEMMs, whose time includes the quantisation of their inputs, as RooflineCost predicts them."""
    rows = tables.select("gemm", dtype="fp8").to_pandas()
    m, n, k, ns = (numbers(rows, name) for name in ("m", "n", "k", "time_ns"))
    many = (n >= _LARGE) & (k >= _LARGE) & (m >= _MANY_ROWS[0]) & (m <= _MANY_ROWS[1])
    if many.sum() < _MIN_POINTS:
        return []
    sizes = np.column_stack([m, k, n])[many].astype(int).tolist()
    model = ModelSpec("fp8", dtype="fp8")

    def times(share: float) -> FloatArray:
        cost = RooflineCost(model, replace(spec, fp8_efficiency=share))
        return np.array([cost.product_ns(num_rows, num_in, num_out, 1) for num_rows, num_in, num_out in sizes])

    def error(share: float) -> str:
        return f"{100 * np.median(np.abs(times(share) / ns[many] - 1)):.0f} % off in the median"

    start = (spec.fp8_efficiency or 0.5,)
    share = _share(_minimized(lambda x: _loss(times(_share(x[0])), ns[many]), start)[0])
    return [
        f"FP8 products of {_MANY_ROWS[0]} to {_MANY_ROWS[1]:,} rows, with the quantisation of their inputs, fit "
        f"fp8_efficiency={share:.2g} (device={spec.name} has {spec.fp8_efficiency:g}: {error(spec.fp8_efficiency)}; "
        f"16-bit arithmetic: {error(0)})"
    ]


def _all_reduces(tables: OperatorTables, spec: DeviceSpec) -> list[str]:
    """Fits all-reduces, of which the fastest kernel for each message is taken, as an engine chooses it."""
    rows = tables.select("all_reduce").to_pandas()
    is_one = rows["num_bytes"].between(*_MESSAGES) & ~rows["kernel"].str.endswith(_TIMED_WITH_LAUNCHES)
    best = rows[is_one].groupby(["num_bytes", "num_ranks"])["time_ns"].min()
    if len(best) < _MIN_POINTS or spec.interconnect not in ("nvlink", "xgmi"):
        return []
    points: list[tuple[int, int]] = best.index.tolist()

    def loss(x: FloatArray) -> float:
        device = replace(spec, interconnect_efficiency=_share(x[0]))
        links = {size: collectives_of(size, device) for _, size in points}
        return _loss(np.array([links[size].all_reduce_ns(num_bytes) for num_bytes, size in points]), best.to_numpy())

    share = _share(_minimized(loss, (spec.interconnect_efficiency,))[0])
    return [
        f"all-reduces of {_MESSAGES[0] >> 10} KB to {_MESSAGES[1] >> 20} MB fit interconnect_efficiency={share:.2g} "
        f"(device={spec.name} has {spec.interconnect_efficiency:g})"
    ]


def _share(x: float) -> float:
    """The nearest share that a device may have: the search may try any number."""
    return float(min(max(abs(x), 1e-6), 1.0))


def _loss(ns: FloatArray, measured: FloatArray) -> float:
    return float(np.abs(np.log(ns / measured)).mean())


def _minimized(loss: Callable[[FloatArray], float], start: tuple[float, ...]) -> tuple[float, ...]:
    from scipy.optimize import minimize  # slow to import

    return tuple(np.abs(minimize(loss, start, method="Nelder-Mead").x).tolist())
