"""Terms of a data sheet that fit a device's operator tables."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import numpy as np
import pyarrow as pa
import pytest

from experiments.configuration.compose import compose_config
from experiments.tables.terms import term_lines
from sim.cost.collectives import Collectives
from sim.cost.roofline import RooflineCost
from testbed.specs.model import ModelSpec
from testbed.specs.operator_tables import OperatorTables
from tests.cost.test_tables_cost import table


def test_planted_terms_are_found() -> None:
    spec, floor_ns, memory, compute, share = compose_config(["device=h100"]).device, 3_300, 0.77, 0.5, 0.4
    products = [
        (m, n, k) for m in (1, 8, 64, 512, 1000, 4096) for n in (4096, 14336, 28672) for k in (2048, 4096, 8192)
    ]
    least = [2 * (n * k + m * (n + k)) / spec.memory_bytes_per_s / memory for m, n, k in products]
    work = [
        2 * -(-m // spec.gemm_tile_rows) * spec.gemm_tile_rows * n * k / spec.flops_per_s / compute
        for m, n, k in products
    ]
    noise = np.random.Generator(np.random.PCG64(1)).uniform(0.97, 1.03, len(products)).tolist()
    ns = [(floor_ns + 1e9 * max(pair)) * factor for *pair, factor in zip(least, work, noise, strict=True)]
    sizes = dict(zip("mnk", map(list, zip(*products, strict=True)), strict=True))
    rows = [table("gemm", sizes, ns, kernel="linear", dtype="bfloat16")]
    for size in (2, 4, 8):
        messages = [2**power for power in range(12, 29)]
        links = Collectives(size, share * spec.interconnect_bytes_per_s, spec.interconnect_latency_ns, is_switched=True)
        fast = [links.all_reduce_ns(num_bytes) for num_bytes in messages]
        for kernel, times in (("graph", fast), ("NCCL", [1.5 * one for one in fast]), ("x_eager", [1.0] * len(fast))):
            columns = {"num_bytes": messages}
            rows.append(table("all_reduce", columns, times, kernel=kernel, dtype="bfloat16", num_ranks=size))
    few, many, reduced = term_lines(OperatorTables("h100", "ours", pa.concat_tables(rows)), spec)
    assert reduced.startswith("all-reduces of 128 KB to 64 MB fit interconnect_efficiency=0.4 ")
    fitted = dict(word.split("=") for line in (few, many) for word in line.split(" (")[0].split() if "=" in word)
    assert float(fitted["gemm_floor_ns"]) == pytest.approx(floor_ns, rel=0.15)
    assert float(fitted["memory_efficiency"]) == pytest.approx(memory, rel=0.03)
    assert float(fitted["compute_efficiency"]) == pytest.approx(compute, rel=0.03)
    assert term_lines(OperatorTables("another", "ours", rows[0]), None) == []
    assert term_lines(OperatorTables("h100", "ours", rows[0].slice(0, 10)), spec) == []


@pytest.mark.parametrize(("us_per_mb", "share"), [(1e9, "1e-06"), (1e-9, "1")])
def test_a_term_is_one_that_a_device_may_have(us_per_mb: float, share: str) -> None:
    messages = [2**i for i in range(17, 27) for _ in range(2)]
    columns = {"num_bytes": messages, "num_ranks": [2, 4] * 10}
    times = [us_per_mb * num_bytes / 1e3 + 1 for num_bytes in messages]
    rows = table("all_reduce", columns, times, kernel="k", dtype="bfloat16")
    (line,) = term_lines(OperatorTables("h100", "ours", rows), compose_config(["device=h100"]).device)
    assert f" fit interconnect_efficiency={share} " in line


def test_the_efficiency_of_fp8_products_is_found() -> None:
    h100 = compose_config(["device=h100"]).device
    points = [(m, n, k) for m in (128, 512, 4096, 8192) for n in (4096, 14336) for k in (2048, 4096, 8192)]

    def times(share: float) -> list[int]:
        cost = RooflineCost(ModelSpec("m", dtype="fp8"), replace(h100, fp8_efficiency=share))
        return [cost.product_ns(m, k, n, 1) for m, n, k in points]

    measured = times(0.4)
    columns = dict(zip("mnk", map(list, zip(*points, strict=True)), strict=True))
    rows = table("gemm", columns, [float(ns) for ns in measured], kernel="k", dtype="fp8")
    (line,) = term_lines(OperatorTables("h100", "ours", rows), h100)
    said, of_library = line.split(" (device=h100 has 0.52: ")
    assert said.endswith(" rows, with the quantisation of their inputs, fit fp8_efficiency=0.4")
    off = [
        round(100 * median(abs(ns / true - 1) for ns, true in zip(times(share), measured, strict=True)))
        for share in (0.52, 0)
    ]
    assert [int(word) for word in of_library.split() if word.isdigit()] == off
