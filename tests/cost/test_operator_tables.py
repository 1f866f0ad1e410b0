"""Operator tables: what is written is read again, what is wrong is named, and what is odd is said."""

import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments.tables.columns import rows_of
from experiments.tables.doubts import MAX_DOUBTS, checked
from experiments.tables.roofline import bounds_ns
from testbed.errors import ProfileError
from testbed.specs.device import DeviceSpec
from testbed.specs.operator_tables import (
    METADATA_KEY,
    OPERATOR_COLUMNS,
    OPERATORS,
    OperatorTables,
    of_engine,
    read_operator_tables,
    write_operator_tables,
)

NAMES = {"kernel": "k", "dtype": "bfloat16", "engine": "vllm 1", "source": "made up", "licence": "none"}
SHEET = DeviceSpec(
    "h100", memory_bytes_per_s=1e12, flops_per_s=1e14, interconnect="nvlink", interconnect_bytes_per_s=1e11
)


def products(m, time_ns, n=64, k=64):
    return rows_of(len(m), operator="gemm", m=m, n=n, k=k, time_ns=time_ns, **NAMES)


def attention(operator, time_ns, **sizes):
    heads = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "kv_dtype": "bfloat16"} | sizes
    return rows_of(len(time_ns), operator=operator, time_ns=time_ns, **heads, **NAMES)


def mixed_tables():
    rows = [
        products([1, 2, 4], [1000.0, 1000.5, 1100.0]),
        attention("attention_prefill", [9e3], batch=2, new_tokens=16, context=0),
        attention("attention_decode", [8e3, 9e3], batch=2, context=[16, 32], window=[None, 8]),
        attention("attention_mixed", [9e3], batch=2, new_tokens=16, context=4, decode_context=9),
        rows_of(1, operator="all_reduce", num_bytes=4096, num_ranks=2, time_ns=5e3, **NAMES),
        rows_of(1, operator="all_gather", num_bytes=4096, num_ranks=2, time_ns=5e3, **NAMES),
        rows_of(1, operator="elementwise", m=3, n=64, time_ns=2e3, **NAMES),
        rows_of(1, operator="sampler", m=3, n=640, time_ns=2e3, **NAMES),
        rows_of(1, operator="host", time_ns=2e5, **NAMES),
    ]
    return OperatorTables("h100", "NVIDIA H100", pa.concat_tables(rows), ("one doubt", "another"))


# --- the file ---


def test_tables_are_read_as_they_were_written(tmp_path):
    tables, file = mixed_tables(), tmp_path / "a" / "b" / "h100.parquet"
    write_operator_tables(file, tables, "testbed tables import …", date="2026-11-22")
    again = read_operator_tables(file)
    assert (again.device, again.device_description, again.doubts) == ("h100", "NVIDIA H100", tables.doubts)
    assert again.rows.equals(tables.rows.combine_chunks())
    assert again.rows.column_names == list(OPERATOR_COLUMNS)
    document = json.loads(pq.read_schema(file).metadata[METADATA_KEY.encode()])
    assert (document["format"], document["command"], document["date"]) == (1, "testbed tables import …", "2026-11-22")
    assert "nanoseconds" in document["units"]["time_ns"]
    assert {name for name in OPERATORS if again.select(name).num_rows} == set(OPERATORS)


def test_rows_are_selected_by_what_they_equal():
    tables = mixed_tables()
    assert tables.select("gemm", m=2)["time_ns"].to_pylist() == [1000.5]
    assert tables.select("gemm", m=2, k=65).num_rows == 0
    assert tables.select("attention_decode", window=None)["context"].to_pylist() == [16]
    assert tables.select("attention_decode", window=8)["context"].to_pylist() == [32]
    assert tables.select("all_reduce", dtype="bfloat16", num_ranks=2).num_rows == 1


def test_a_failed_write_leaves_nothing(tmp_path):
    not_text: Any = ({"not": {"text"}},)  # JSON has no sets
    tables = OperatorTables("h100", "", mixed_tables().rows, not_text)
    with pytest.raises(TypeError):
        write_operator_tables(tmp_path / "t.parquet", tables, "")
    assert not list(tmp_path.iterdir())


def check_refused(file, message):
    with pytest.raises(ProfileError, match=message):
        read_operator_tables(file)


def changed(tmp_path, change, operator="gemm", row=1):
    """A file of one operator of whose two rows one has something else."""
    rows = pa.concat_tables([mixed_tables().select(operator)] * 2).slice(0, 2).to_pylist()
    rows[row] |= change
    kinds = {name: pa.type_for_alias(kind) for name, kind in OPERATOR_COLUMNS.items()}
    document = {"format": 1, "device": "h100", "device_description": "", "command": "", "date": "", "doubts": []}
    table = pa.Table.from_pylist(rows, schema=pa.schema(kinds.items()))
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: json.dumps(document)}), tmp_path / "t.parquet")
    return tmp_path / "t.parquet"


@pytest.mark.parametrize(
    ("operator", "change", "message"),
    [
        ("gemm", {"operator": "gem"}, "operator is 'gem'; did you mean 'gemm'"),
        ("gemm", {"operator": None}, "operator is null; expected a name"),
        ("gemm", {"engine": None}, "engine is null; expected a name"),
        ("gemm", {"kernel": ""}, "kernel is ''; expected a name"),
        ("gemm", {"time_ns": -5.0}, r"time_ns is -5\.0; expected a number of ns above 0"),
        ("gemm", {"time_ns": 0.0}, r"time_ns is 0\.0; expected"),
        ("gemm", {"time_ns": math.nan}, "time_ns is nan; expected"),
        ("gemm", {"time_ns": math.inf}, "time_ns is inf; expected"),
        ("gemm", {"time_ns": None}, "time_ns is null; expected"),
        ("gemm", {"k": None}, "k is null; expected at least 1: gemm needs it"),
        ("gemm", {"m": 0}, "m is 0; expected at least 1: gemm needs it"),
        ("attention_prefill", {"context": -1}, "context is -1; expected at least 0: attention_prefill needs it"),
        ("attention_decode", {"context": 0}, "context is 0; expected at least 1: attention_decode needs it"),
        ("attention_decode", {"num_kv_heads": None}, "num_kv_heads is null; expected at least 1"),
        ("attention_decode", {"window": 0}, "window is 0; expected at least 1, or null for none"),
        ("attention_mixed", {"decode_context": None}, "decode_context is null; expected at least 1"),
        ("all_reduce", {"num_bytes": None}, "num_bytes is null; expected at least 1: all_reduce needs it"),
        ("sampler", {"n": None}, "n is null; expected at least 1: sampler needs it"),
    ],
)
def test_a_bad_row_is_named(tmp_path, operator, change, message):
    for row in (0, 1):
        check_refused(changed(tmp_path, change, operator, row), f"t.parquet, row {row}: {message}")


@pytest.mark.parametrize("change", [{"context": 0}, {"window": None}])
def test_a_prompt_may_begin_at_0_and_have_no_window(tmp_path, change):
    assert read_operator_tables(changed(tmp_path, change, "attention_prefill")).rows.num_rows == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "'format' is 2; expected 1"),
        ({"device": None}, "'device' is None; expected str"),
        ({"doubts": "many"}, "'doubts' is 'many'; expected list"),
        ({"doubts": [1]}, r"'doubts' is \[1\]; expected a list of str"),
    ],
)
def test_bad_metadata_is_named(tmp_path, change, message):
    file = changed(tmp_path, {})
    table = pq.read_table(file)
    document = json.loads(table.schema.metadata[METADATA_KEY.encode()]) | change
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: json.dumps(document)}), file)
    check_refused(file, f"t.parquet: {METADATA_KEY}: {message}")


def test_what_is_no_table_is_refused(tmp_path):
    file = tmp_path / "none.parquet"
    check_refused(file, r"no operator tables at .*none.parquet")
    check_refused(tmp_path, r" is a folder, not a file; `testbed tables import`")
    file.write_text("not parquet")
    check_refused(file, r"none.parquet cannot be read as Parquet: .*[^.]; `testbed tables import` writes one")
    table = pq.read_table(changed(tmp_path, {}))
    for wrong, message in (
        (pa.table({"a": [1]}), r"none.parquet has no operator tables: its metadata lacks 'testbed.oper"),
        (table.drop_columns("k"), r"none.parquet lacks the column 'k' \(int64\); it has operator"),
        (table.slice(0, 0), r"none.parquet has no rows"),
        (table.set_column(4, "m", pa.array([1.0, 2.0])), "column 'm' is of type double; expected int64"),
    ):
        pq.write_table(wrong, file)
        check_refused(file, message)
    texts, nulls = table["kernel"].cast(pa.large_string()), pa.nulls(2)
    pq.write_table(table.set_column(1, "kernel", texts).set_column(10, "window", nulls), file)
    assert read_operator_tables(file).rows.schema.field("window").type == pa.int64()


def test_the_rows_of_one_engine_come_with_those_of_none():
    def of(*engines):
        rows = [products([1], [9.0]).set_column(18, "engine", pa.array([engine])) for engine in engines]
        return OperatorTables("h100", "", pa.concat_tables(rows))

    def left(tables, *wanted):
        return of_engine(tables, *wanted, "t").rows["engine"].to_pylist()

    many, one = of("nccl 2.2", "vllm 1", "vllm 2", "sglang 1"), of("sglang 1", "nccl 2.2")
    assert left(many, "vllm", None) == ["nccl 2.2", "vllm 1", "vllm 2"]
    assert left(many, "vllm", "2") == ["nccl 2.2", "vllm 2"]
    assert left(one, "vllm", None) == ["sglang 1", "nccl 2.2"], "of the only engine there is"
    for tables, engine, version in ((many, "trtllm", None), (one, "sglang", "2"), (one, "vllm", "1")):
        with pytest.raises(ProfileError, match=f"^t has no engine '{engine}{f' {version}' if version else ''}'; "):
            left(tables, engine, version)


# --- doubts ---


def line(num=12, **change):
    """Times that are linear in m, with what is planted at some m."""
    m = [2**power for power in range(num)]
    times = {size: 1000.0 * size for size in m} | change.pop("planted", {})
    return OperatorTables("h100", "", products(m, [times[size] for size in m]), ())


def test_a_smooth_table_is_not_doubted():
    assert checked(line(), None).doubts == ()


def test_a_point_off_its_neighbours_is_said_with_its_sizes():
    [doubt] = checked(line(planted={64: 200_000.0}), None).doubts
    assert doubt.startswith("gemm bfloat16: of 12 points, ")
    assert "1 is more than 1.5 x off their neighbours, the worst 3.1 x at m=64 n=64 k=64" in doubt
    assert "the time falls by more than 15% while a size grows, the worst by 36% at m=128" in doubt


def test_a_time_that_falls_a_little_is_noise():
    assert checked(line(planted={64: 32_000.0 * 0.9}), None).doubts != ()  # off its neighbours, but no fall
    assert "falls" not in checked(line(planted={64: 32_000.0 * 0.9}), None).doubts[0]


def test_neighbours_stand_along_one_size_alone():
    """Two lines of different k, far from each other, are no neighbours."""
    rows = pa.concat_tables([line().rows, products([2**p for p in range(12)], [9e6 * 2**p for p in range(12)], k=65)])
    assert checked(OperatorTables("h100", "", rows), None).doubts == ()


def test_points_measured_again_are_one_point():
    again = pa.concat_tables([line().rows, line(planted={64: 64_000.0 * 1.2}).rows])
    [doubt] = checked(OperatorTables("h100", "", again), None).doubts
    assert doubt == "gemm bfloat16: of 24 points, 12 are measured again (their mean is looked at)"


def test_a_point_faster_than_the_data_sheet_is_said():
    m = [4096, 8192, 16384]
    floor = [2 * size * 4096 * 4096 / 1e14 * 1e9 for size in m]
    tables = OperatorTables("h100", "", products(m, [floor[0] * 2, floor[1] * 2, floor[2] * 0.8], n=4096, k=4096))
    [doubt] = checked(tables, SHEET).doubts
    assert "1 is faster than the data sheet allows (read from a cache?), up to 1.25 x at m=16,384" in doubt


def test_times_in_another_unit_are_refused():
    m = np.arange(1000, 1020)
    floor = 2 * m * 4096 * 4096 / 1e14 * 1e9
    good = OperatorTables("h100", "", products(m, floor * 1.4, n=4096, k=4096))
    assert checked(good, SHEET).doubts == ()
    with pytest.raises(ProfileError, match=r"half of 20 large points take less than 0\.0014 of .* in the right unit\?"):
        checked(OperatorTables("h100", "", products(m, floor * 0.0014, n=4096, k=4096)), SHEET)


def test_doubts_are_ten_at_most():
    rows = [line(planted={64: 200_000.0}).rows.set_column(2, "dtype", pa.array([f"t{i}"] * 12)) for i in range(15)]
    doubts = checked(OperatorTables("h100", "", pa.concat_tables(rows), ("standing",)), None).doubts
    assert len(doubts) == MAX_DOUBTS
    assert doubts[0] == "standing"
    assert doubts[-1] == "and 7 more, each about fewer points"


# --- the least time, counted anew pair by pair ---


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("context", "new"), [(0, 7), (3, 4), (9, 3), (0, 1), (100, 1)])
def test_attention_counts_the_pairs_that_the_mask_leaves(context, new, window):
    pairs = sum(min(position + 1, window or 10**9) for position in range(context, context + new))
    slow = DeviceSpec("h100", flops_per_s=1e3, memory_bytes_per_s=1e20)
    rows = attention("attention_prefill", [1e3], batch=2, new_tokens=new, context=context, window=window)
    assert bounds_ns("attention_prefill", rows.to_pandas(), slow)[0] == pytest.approx(
        2 * 4 * 8 * 64 * pairs / 1e3 * 1e9
    )
    rows = attention(
        "attention_mixed", [1e3], batch=2, new_tokens=new, context=context, decode_context=11, window=window
    )
    seen = pairs + 2 * min(11, window or 11)
    assert bounds_ns("attention_mixed", rows.to_pandas(), slow)[0] == pytest.approx(4 * 8 * 64 * seen / 1e3 * 1e9)


def test_decodes_read_k_and_v_once_each():
    fast = DeviceSpec("h100", flops_per_s=1e29, memory_bytes_per_s=1e6)
    rows = attention("attention_decode", [1e3], batch=3, context=100, kv_dtype="fp8")
    num_bytes = 3 * 100 * 2 * 2 * 64 * 1 + 2 * 2 * 8 * 64 * 3
    assert bounds_ns("attention_decode", rows.to_pandas(), fast)[0] == pytest.approx(num_bytes / 1e6 * 1e9)


def test_an_all_reduce_crosses_its_link_twice_almost():
    rows = rows_of(1, operator="all_reduce", num_bytes=1000, num_ranks=4, time_ns=5e3, **NAMES)
    assert bounds_ns("all_reduce", rows.to_pandas(), SHEET)[0] == pytest.approx(2 * 3 / 4 * 1000 / 1e11 * 1e9)


@pytest.mark.parametrize(("interconnect", "rates"), [("pcie_p2p", (25e9, 25e9)), ("pcie_host", (15e9, 5e9))])
def test_over_pcie_messages_cross_at_the_slots_rate_or_share_the_hosts(interconnect, rates):
    card = DeviceSpec("l40s", interconnect=interconnect, host_link_bytes_per_s=25e9)
    for operator, num_crossings in (("all_reduce", 2), ("all_gather", 1)):
        rows = rows_of(2, operator=operator, num_bytes=10**6, num_ranks=[2, 4], time_ns=5e3, **NAMES)
        expected = [num_crossings * (n - 1) / n * 1e6 / rate * 1e9 for n, rate in zip((2, 4), rates, strict=True)]
        assert bounds_ns(operator, rows.to_pandas(), card).tolist() == pytest.approx(expected)
