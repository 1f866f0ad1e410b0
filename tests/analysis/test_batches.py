"""A summary does not depend on which rows come together, and its memory does not grow with the steps."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.measures.metrics import itl_pooled
from analysis.measures.summary import summarise
from analysis.measures.survival import Pool, distribution, km_steps, pooled_distributions
from analysis.reading import request_columns, timeline
from analysis.reading.request_columns import STRINGS, RequestColumns
from analysis.reading.rows import FileRows, MemoryRows
from testbed.records.schema import REQUEST_COLUMNS, STEP_COLUMNS
from tests.analysis.runs import ARROW, simulate, table

SIZES = (1, 7, 1000, None)


def near(tree: Any) -> Any:
    """The same, but for the last digits of means."""
    if isinstance(tree, dict):
        return {key: near(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [near(value) for value in tree]
    return pytest.approx(tree, rel=1e-12) if isinstance(tree, float) else tree


def with_replica(records: pa.Table, number: int) -> pa.Table:
    index = records.column_names.index("replica")
    return records.set_column(index, "replica", pa.array(np.full(len(records), number, dtype=np.int32)))


def run_of(replicas: int, seed: int, num_requests: int, stop_s: float | None, keep_tokens: bool) -> Any:
    """(requests, steps, manifest); steps of several replicas interleaved by time."""
    runs = [
        simulate(seed=seed + number, num_requests=num_requests, rate=9.0, num_blocks=140, stop_s=stop_s)
        for number in range(replicas)
    ]
    requests = pa.concat_tables([with_replica(run[0], number) for number, run in enumerate(runs)])
    steps = pa.concat_tables([with_replica(run[1], number) for number, run in enumerate(runs)])
    if not keep_tokens:
        index = requests.column_names.index("token_ns")
        requests = requests.set_column(index, "token_ns", pa.nulls(len(requests), pa.list_(pa.int64())))
    return requests, steps.sort_by("end_ns"), runs[0][2] | {"num_replicas": replicas, "router": "random"}


@settings(max_examples=25, deadline=None, derandomize=True, print_blob=True)
@given(
    replicas=st.sampled_from((1, 1, 2, 3)), seed=st.integers(0, 1000), num_requests=st.sampled_from((1, 2, 15, 40)),
    stop_s=st.sampled_from((None, None, 0.0, 0.7, 2.5)), warmup_s=st.sampled_from((0.0, 0.0, 0.5, 100.0)),
    keep_tokens=st.booleans(), size=st.sampled_from(SIZES),
)  # fmt: skip
def test_rows_may_come_in_any_batches(
    replicas: int, seed: int, num_requests: int, stop_s: float | None, warmup_s: float, keep_tokens: bool,
    size: int | None,
) -> None:  # fmt: skip
    requests, steps, manifest = run_of(replicas, seed, num_requests, stop_s, keep_tokens)
    slo = {"ttft_s": 0.3, "tpot_s": 0.03} | ({"itl_max_s": 0.5} if keep_tokens else {})
    whole = summarise(requests, steps, manifest, slo, warmup_s)
    assert whole == summarise(requests.to_pandas(), steps.to_pandas(), manifest, slo, warmup_s)
    assert stop_s is not None or [check["holds"] for check in whole["checks"].values()] == [True, True, True]
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "requests.parquet", Path(folder) / "steps.parquet"
        for file, records in zip(files, (requests, steps), strict=True):
            pq.write_table(records, file, row_group_size=50)
        in_memory = MemoryRows(requests, size), MemoryRows(steps, size)
        on_disk = FileRows(files[0], STRINGS, size or 8192), FileRows(files[1], batch_rows=size or 8192)
        for rows in (in_memory, on_disk):
            assert summarise(*rows, manifest, slo, warmup_s) == whole


@settings(max_examples=15, deadline=None, derandomize=True, print_blob=True)
@given(
    replicas=st.sampled_from((1, 3)), seed=st.integers(0, 1000), stop_s=st.sampled_from((None, 0.7, 2.5)),
    warmup_s=st.sampled_from((0.0, 0.5)), sizes=st.tuples(st.integers(5, 60), st.integers(3, 60)),
)  # fmt: skip
def test_requests_may_come_in_any_pieces_and_windows(
    replicas: int, seed: int, stop_s: float | None, warmup_s: float, sizes: tuple[int, int]
) -> None:
    requests, steps, manifest = run_of(replicas, seed, 30, stop_s, True)
    slo = {"ttft_s": 0.3, "tpot_s": 0.03}
    whole = summarise(requests, steps, manifest, slo, warmup_s)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        pq.write_table(requests, Path(folder) / "requests.parquet", row_group_size=7)
        patch.setattr(request_columns, "PIECE_ROWS", sizes[0])
        patch.setattr(timeline, "WINDOW", sizes[1])
        for rows in (MemoryRows(requests), FileRows(Path(folder) / "requests.parquet", STRINGS)):
            found = summarise(rows, MemoryRows(steps, 9), manifest, slo, warmup_s)
            assert found["checks"] == whole["checks"]
            assert json.dumps(list(found)) == json.dumps(list(whole))
            assert found == near(whole)


@pytest.mark.parametrize("warmup_s", [0.0, 0.5])
def test_what_replicas_did_adds_up_to_what_the_fleet_did(warmup_s: float) -> None:
    requests, steps, manifest = run_of(3, 4, 40, None, True)
    summary = summarise(requests, steps, manifest, None, warmup_s)
    each = pd.DataFrame(summary["replicas"]["each"])
    for name in ("requests_per_s", "output_tokens_per_s"):
        assert each[name].sum() == pytest.approx(summary["throughput"][name])
    frame = steps.to_pandas()
    since = requests.to_pandas()["arrival_ns"].min() + warmup_s * 1e9
    counted = frame[frame["end_ns"] > since]
    assert each["num_steps"].sum() == summary["num_steps"] == len(counted)
    computed = counted["num_prefill_tokens"] + counted["num_decode_tokens"]
    assert each["num_computed_tokens"].tolist() == computed.groupby(counted["replica"]).sum().tolist()
    assert each["num_requests"].sum() == summary["num_requests"]


@pytest.mark.parametrize("replicas", [1, 3])
def test_empty_runs_are_alike_in_any_batches(replicas: int, tmp_path: Path) -> None:
    requests, steps = table([], REQUEST_COLUMNS), table([], STEP_COLUMNS)
    pq.write_table(requests, tmp_path / "requests.parquet")
    pq.write_table(steps, tmp_path / "steps.parquet")
    manifest = {"num_replicas": replicas, "num_gpu_blocks": 10}
    whole = summarise(requests, steps, manifest)
    on_disk = FileRows(tmp_path / "requests.parquet", STRINGS), FileRows(tmp_path / "steps.parquet")
    assert summarise(*on_disk, manifest) == whole
    assert whole["checks"]["never_idle"]["why"] == "not applicable: no step was recorded"
    some = simulate(num_requests=3)[0]  # requests whose steps are lost
    assert summarise(MemoryRows(some, 1), steps, manifest) == summarise(some, steps, manifest)


def test_steps_of_a_fleet_in_a_frame_may_lie_in_any_order() -> None:
    requests, steps, manifest = run_of(2, 5, 30, None, True)
    frame = steps.to_pandas()
    assert summarise(requests, frame.sample(frac=1, random_state=1), manifest) == summarise(requests, frame, manifest)


gaps = st.lists(st.one_of(st.integers(0, 3), st.integers(10**6, 10**6 + 300), st.integers(0, 2**52)), max_size=60)


@settings(deadline=None)
@given(values=gaps, censored=st.lists(st.integers(0, 2**52), max_size=8), size=st.integers(1, 70))
def test_pooled_values_have_the_distribution_that_they_have_together(
    values: list[int], censored: list[int], size: int
) -> None:
    array = np.array(values, dtype=np.int64)
    bounds = np.array(censored, dtype=np.float64)
    passes = lambda: (("gaps", [array[low : low + size]]) for low in range(0, array.size, size))  # noqa: E731
    pooled = pooled_distributions({"gaps": Pool(np.append(bounds, np.nan), 1e9)}, passes)["gaps"]
    together = distribution(array / 1e9, bounds / 1e9)
    for name, value in together.items():
        assert pooled[name] == (None if value is None else pytest.approx(value, rel=1e-9)), name
    in_s = {"gaps": Pool(bounds / 1e9)}
    same = pooled_distributions(in_s, lambda: iter([("gaps", [array / 1e9])]))["gaps"]
    assert same == {
        name: value if value is None else pytest.approx(value, rel=1e-12) for name, value in together.items()
    }
    if not censored and values:
        assert [pooled[name] for name in ("p50", "p99")] == [float(np.quantile(array / 1e9, q)) for q in (0.5, 0.99)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.lists(st.integers(0, 9), max_size=12))
def test_censored_quantiles_are_the_inverse_of_the_kaplan_meier_function(values: list[int], bounds: list[int]) -> None:
    """Interpolated between what each value weighs, which is the definition that `km_positions` computes in one go."""
    observed, censored = np.array(values, dtype=np.float64), np.array(bounds, dtype=np.float64)
    ordered, cdf = km_steps(observed, censored)
    share = 1.0 / (observed.size + censored.size)
    result = distribution(observed, censored)
    if observed.size + censored.size < 2:
        return
    first, last = np.append(0.0, cdf[:-1]) / (1.0 - share), (cdf - share) / (1.0 - share)
    place = np.column_stack((first, last)).ravel()
    for name, level in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
        if abs(level - place[-1]) > 1e-9:
            expected = float(np.interp(level, place, np.repeat(ordered, 2))) if level < place[-1] else None
            assert result[name] == (None if expected is None else pytest.approx(expected, abs=1e-9)), name


def test_pooled_gaps_are_those_of_all_requests() -> None:
    requests = simulate(num_requests=40, stop_s=3.0)[0]
    columns = RequestColumns(MemoryRows(requests, 3))
    assert sorted(itl_pooled(requests)) == sorted(np.concatenate(list(columns.gaps_ns())) / 1e9)
    chosen = np.arange(len(requests)) % 3 == 0
    some = np.concatenate(list(columns.where(chosen).gaps_ns())) / 1e9
    assert some.tolist() == itl_pooled(requests.filter(pa.array(chosen))).tolist()


# --- memory ---

PEAK = """
import sys
from pathlib import Path
from analysis.measures.summary import summarise
from analysis.reading.request_columns import STRINGS
from analysis.reading.rows import FileRows
folder = Path(sys.argv[1])
summary = summarise(
    FileRows(folder / "requests.parquet", STRINGS), FileRows(folder / "steps.parquet"),
    {"backend": "sim", "num_gpu_blocks": 1000},
)
assert [check["holds"] for check in summary["checks"].values()] == [True, True, True], summary["checks"]
assert "pandas" not in sys.modules
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(summary["num_steps"], int(peak) // 1024)
"""


def write_long_run(folder: Path, num_steps: int, length: int) -> None:
    """One request at a time, of `length` steps each; 10 ms a step."""
    folder.mkdir()
    step_ns = 10_000_000
    number = np.arange(num_steps)
    zero = np.zeros(num_steps, dtype=np.int64)
    is_first = number % length == 0
    steps = dict.fromkeys(STEP_COLUMNS, zero) | {
        "step": number,
        "start_ns": number * step_ns,
        "end_ns": (number + 1) * step_ns,
        "num_decode_tokens": np.where(is_first, 0, 1),
        "num_prefill_tokens": np.where(is_first, 10, 0),
        "num_emitted": zero + 1,
        "num_running": zero + 1,
        "free_gpu_blocks": zero + 900,
        "forward_ns": zero + step_ns - number % 1000,
    }
    start = np.arange(num_steps // length) * length * step_ns
    requests = {name: np.zeros_like(start) for name in REQUEST_COLUMNS} | {
        "num_prompt_tokens": np.full_like(start, 10),
        "num_output_tokens": np.full_like(start, length),
        "num_token_steps": np.full_like(start, length),
        **dict.fromkeys(("arrival_ns", "queued_ns", "first_scheduled_ns"), start),
        **dict.fromkeys(("first_token_ns", "first_sent_ns"), start + step_ns),
        **dict.fromkeys(("finish_ns", "last_sent_ns"), start + length * step_ns),
    }
    offsets = pa.array(np.arange(start.size + 1, dtype=np.int32) * length)
    given = {"token_ns": pa.ListArray.from_arrays(offsets, pa.array(steps["end_ns"]))}
    given |= {name: pa.array(["length"] * start.size) for name in ("finish_reason", "tenant", "request_id")}
    for kind, schema, columns in (("requests", REQUEST_COLUMNS, requests), ("steps", STEP_COLUMNS, steps)):
        made = {
            name: given[name] if name in given else pa.nulls(len(columns["replica"]), pa.string())
            if dtype == "string" else pa.array(columns[name]).cast(ARROW[dtype])
            for name, dtype in schema.items()
        }  # fmt: skip
        pq.write_table(pa.table(made), folder / f"{kind}.parquet", row_group_size=8192, compression="zstd")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
@pytest.mark.parametrize(("length", "sizes"), [(300, (90_000, 720_000)), (2, (200_000, 900_000))])
def test_the_memory_of_a_summary_grows_neither_with_steps_nor_with_requests(
    tmp_path: Path, length: int, sizes: tuple[int, int]
) -> None:
    """Up to 720,000 steps, and as many tokens: all step columns of the difference would be 90 MB. And up to 450,000
    requests: the columns that a summary looks at would be 80 MB."""
    peak = {}
    for num_steps in sizes:
        write_long_run(tmp_path / str(num_steps), num_steps, length)
        command = [sys.executable, "-c", PEAK, str(tmp_path / str(num_steps))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        told, peak[num_steps] = map(int, done.stdout.split())
        assert told == num_steps
    assert peak[sizes[1]] - peak[sizes[0]] < 40, peak  # MiB
