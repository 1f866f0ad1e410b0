"""Terms of a data sheet that fit a device's operator tables."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from experiments.configuration.compose import compose_config
from experiments.tables.terms import term_lines
from sim.cost.collectives import Collectives
from testbed.specs.operator_tables import OperatorTables
from tests.cost.test_tables_cost import table


def test_planted_terms_are_found() -> None:
    spec, floor_ns, efficiency, share = compose_config(["device=h100"]).device, 3_300, 0.77, 0.4
    products = [(m, n, k) for m in (1, 8, 64, 512) for n in (4096, 14336, 28672) for k in (2048, 4096, 8192)]
    bound = [2 * (n * k + m * (n + k)) / spec.memory_bytes_per_s * 1e9 for m, n, k in products]
    noise = np.random.Generator(np.random.PCG64(1)).uniform(0.97, 1.03, len(products))
    ns = [(floor_ns + least / efficiency) * factor for least, factor in zip(bound, noise.tolist(), strict=True)]
    ns = [9 * took if m == 512 else took for took, (m, _, _) in zip(ns, products, strict=True)]  # not among them
    sizes = dict(zip("mnk", map(list, zip(*products, strict=True)), strict=True))
    rows = [table("gemm", sizes, ns, kernel="linear", dtype="bfloat16")]
    for size in (2, 4, 8):
        messages = [2**power for power in range(12, 29)]
        links = Collectives(size, share * spec.interconnect_bytes_per_s, spec.interconnect_latency_ns, is_switched=True)
        fast = [links.all_reduce_ns(num_bytes) for num_bytes in messages]
        for kernel, times in (("graph", fast), ("NCCL", [1.5 * one for one in fast]), ("x_eager", [1.0] * len(fast))):
            rows.append(
                table("all_reduce", {"num_bytes": messages}, times, kernel=kernel, dtype="bfloat16", num_ranks=size)
            )
    found = [line.split(" (")[0] for line in term_lines(OperatorTables("h100", "ours", pa.concat_tables(rows)))]
    assert found[1] == "all-reduces of 128 KB to 64 MB fit interconnect_efficiency=0.4"
    fitted = dict(word.split("=") for word in found[0].split() if "=" in word)
    assert float(fitted["gemm_floor_ns"]) == pytest.approx(floor_ns, rel=0.15)
    assert float(fitted["memory_efficiency"]) == pytest.approx(efficiency, rel=0.03)
    assert term_lines(OperatorTables("another", "ours", rows[0])) == []
    assert term_lines(OperatorTables("h100", "ours", rows[0].slice(0, 10))) == []
