"""`testbed tables import own`: a CSV of one's own kernels, for a device of one's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testbed.specs.operator_tables import read_operator_tables
from tests.experiments.kit import Say, option

HEADER = "operator,m,n,k,num_heads,num_kv_heads,head_dim,batch,new_tokens,context,time_us"
GEMMS = [
    (m, n, k)
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    for m in (1, 8, 64, 256, 1024, 8192)
]


def rows() -> list[str]:
    """GEMMs at 45 % of 2.5 PFLOPS and 80 % of 8 TB/s after a floor of 6 us; a few points of attention."""
    lines = [HEADER]
    for m, n, k in GEMMS:
        time_us = 6 + 1e6 * max(2 * m * n * k / (2.5e15 * 0.45), 2 * (n * k + m * (n + k)) / (8e12 * 0.8))
        lines.append(f"gemm,{m},{n},{k},,,,,,,{time_us}")
    lines += [f"attention_decode,,,,32,8,128,{batch},,{512 * batch},{5 + batch}" for batch in (1, 16, 128)]
    return [*lines, "attention_prefill,,,,32,8,128,1,512,0,9.5"]


def files(folder: Path, lines: list[str]) -> list[str]:
    """Writes the CSV and the device's file; returns the arguments that name both."""
    rates = "memory_bytes: 288000000000\nmemory_bytes_per_s: 8e12\nflops_per_s: 2.5e15\n"
    option(folder, "device/mine", f"defaults: [mi300x, _self_]\n{rates}")
    (folder / "mine.csv").write_text("\n".join([*lines, ""]))
    return ["own", str(folder / "mine.csv"), "--device", "mine", "--config-dir", str(folder)]


def test_points_of_a_csv_price_a_device_of_ones_own(tmp_path: Path, say: Say) -> None:
    out = tmp_path / "mine.parquet"
    say("tables", "import", *files(tmp_path, rows()), "--out", str(out)).success()
    tables = read_operator_tables(out)
    assert tables.select("gemm", m=64, n=4096, k=4096)["time_ns"].to_pylist() == pytest.approx([11406.7], rel=1e-4)
    assert tables.select("attention_prefill")["kv_dtype"].to_pylist() == ["bfloat16"]
    assert set(tables.select("gemm")["kv_dtype"].to_pylist()) == {None}
    shown = say("tables", "show", str(out), "--config-dir", str(tmp_path)).success()
    assert "fit gemm_floor_ns=6000 memory_efficiency=0.8 (device=mine has 5000 and" in shown
    (share,) = re.findall(r"fit compute_efficiency=([\d.]+) ", shown)
    assert float(share) == pytest.approx(0.45, rel=0.03), "one point is bound by both"
    assert "compute_efficiency" not in say("tables", "show", str(out)).success(), "only its options say its rates"
    priced = ("--config-dir", str(tmp_path), "device=mine", "cost=tables", f"cost.path={out}", "trace.num_requests=3")
    said = say("run", *priced, "model=llama3.1_8b", f"hydra.run.dir={tmp_path / 'run'}").success()
    assert "of the time is measured (mine.csv own)" in said


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (0, HEADER.replace("time_us", "time"), "has no time; expected one of time_ms, time_us, time_ns"),
        (0, f"{HEADER},time_ns", "has time_us and time_ns; expected one of"),
        (0, HEADER.replace("operator", "kind"), "lacks the column 'operator'"),
        (1, "gem,1,2,3,,,,,,,7", "mine.csv:2: operator is 'gem'; expected one of gemm, "),
        (1, "gemm,1.5,2,3,,,,,,,7", "mine.csv:2: m is '1.5'; expected a whole number"),
        (1, "gemm,1e30,2,3,,,,,,,7", "mine.csv:2: m is '1e30'; expected a whole number"),
        (1, "gemm,,2,3,,,,,,,7", "row 0: m is null; expected at least 1: gemm needs it"),
        (1, "gemm,1,2,3,,,,,,,0", "mine.csv:2: time_us is '0'; expected us, from 0.1 to"),
    ],
)
def test_a_bad_csv_is_told_with_place_and_expectation(
    tmp_path: Path, say: Say, line: int, text: str, message: str
) -> None:
    lines = rows()
    lines[line] = text
    if line == 0 and text.endswith(",time_ns"):
        lines[1:] = [f"{one},5" for one in lines[1:]]
    assert message in say("tables", "import", *files(tmp_path, lines), "--out", str(tmp_path / "o.parquet")).error()
    assert not (tmp_path / "o.parquet").exists()


def test_times_a_thousand_times_too_short_are_refused(tmp_path: Path, say: Say) -> None:
    lines = [HEADER.replace("time_us", "time_ns"), *(f"gemm,{m},65536,65536,,,,,,,9000" for m in (64, 256, 512, 1024))]
    arguments = files(tmp_path, lines)
    assert "in the right unit?" in say("tables", "import", *arguments, "--out", str(tmp_path / "o.parquet")).error()


def test_empty_types_are_as_left_out(tmp_path: Path, say: Say) -> None:
    lines = rows()
    lines = [f"{lines[0]},dtype,kv_dtype", f"{lines[1]},fp8,", *(f"{line},," for line in lines[2:])]
    say("tables", "import", *files(tmp_path, lines), "--out", str(tmp_path / "o.parquet")).success()
    tables = read_operator_tables(tmp_path / "o.parquet")
    assert tables.select("gemm")["dtype"].to_pylist() == ["fp8"] + ["bfloat16"] * (len(GEMMS) - 1)
    assert {*tables.select("attention_decode")["kv_dtype"].to_pylist()} == {"bfloat16"}
    assert tables.select("gemm")["kv_dtype"].null_count == len(GEMMS)


def imported_all_reduces(folder: Path, say: Say, *device: str) -> str:
    """Imports all-reduces at 333 GB/s; returns the file."""
    lines = [f"all_reduce,{i}0000000,2,{30 * i}" for i in range(1, 20)]
    (folder / "a.csv").write_text("\n".join(["operator,num_bytes,num_ranks,time_us", *lines, ""]))
    out = folder / "a.parquet"
    say("tables", "import", "own", str(folder / "a.csv"), "--device", *device, "--out", str(out)).success()
    return str(out)


def test_collectives_of_a_device_that_names_no_interconnect_have_no_bound(tmp_path: Path, say: Say) -> None:
    option(tmp_path, "device/alone", "defaults: [mi300x, _self_]\ninterconnect: none\ninterconnect_bytes_per_s: 0\n")
    known = ("--config-dir", str(tmp_path))
    file = imported_all_reduces(tmp_path, say, "alone", *known)
    shown = say("tables", "show", file, *known, "--plot", str(tmp_path / "figure")).success()
    assert "interconnect_efficiency" not in shown
    few = ("cost=tables", f"cost.path={file}", "trace.num_requests=2", f"hydra.run.dir={tmp_path / 'run'}")
    say("run", *known, "device=alone", *few).success()


def test_a_run_with_another_interconnect_does_not_take_measured_times_for_wrong(tmp_path: Path, say: Say) -> None:
    few = ("cost=tables", f"cost.path={imported_all_reduces(tmp_path, say, 'h100')}", "trace.num_requests=2")
    said = say("run", "device=h100", "device.interconnect=pcie_host", *few, f"hydra.run.dir={tmp_path / 'run'}")
    assert "device.interconnect changes only what tables lack" in said.success()


def test_what_it_needs_is_said(tmp_path: Path, say: Say) -> None:
    error = say("tables", "import", "own", "--out", str(tmp_path / "o.parquet")).error()
    assert "own needs a CSV and the device that was measured: own <file>.csv --device <name>" in error
    arguments = files(tmp_path, rows())[:-2]
    error = say("tables", "import", *arguments, "--out", str(tmp_path / "o.parquet")).error()
    assert "--device is 'mine', which is none of `testbed list device`; one of your own is device/<name>.yaml" in error


def test_a_time_of_the_host_has_no_size(tmp_path: Path, say: Say) -> None:
    arguments = files(tmp_path, ["operator,time_us", "host,50"])
    assert "1 points of mine" in say("tables", "import", *arguments, "--out", str(tmp_path / "o.parquet")).success()


def test_a_type_that_no_model_has_is_refused(tmp_path: Path, say: Say) -> None:
    arguments = files(tmp_path, ["operator,dtype,m,n,k,time_us", "gemm,bf16,1,2,3,7"])
    error = say("tables", "import", *arguments, "--out", str(tmp_path / "o.parquet")).error()
    assert "mine.csv:2: dtype is 'bf16'; expected one of float32, bfloat16, float16, fp8" in error
