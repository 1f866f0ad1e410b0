"""Files of our schema under names of their own (trace.columns), and arrivals that are instants."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import ConfigError, TraceError
from testbed.traces.fingerprint import fingerprint
from testbed.traces.frozen import freeze_trace
from testbed.traces.readers import open_trace, read_trace
from testbed.traces.readers.own_log import check_columns
from tests.traces.kit import S, check_refused, json_lines, write

COLUMNS = {
    "arrival_time": "Sent At",
    "prompt_tokens": "in#",
    "output_tokens": "Out",
    "session_id": "chat",
    "turn": "no",
}
ROWS = [(0.0, 10, 5, "a", 1), (1.5, 30, 7, "a", 2), (2.25, 12, 3, "b", 1), (2.5, 60, 4, "a", 3)]


def named(**other: Any) -> list[dict[str, Any]]:
    names = dict(zip(COLUMNS, COLUMNS, strict=True)) | other
    return [dict(zip((names[field] for field in COLUMNS), row, strict=True)) for row in ROWS]


def write_as(form: str, folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / f"log.{form}"
    if form == "jsonl":
        return write(folder, file.name, json_lines(*rows))
    if form == "csv":
        lines = [",".join(rows[0]), *(",".join("" if v is None else str(v) for v in row.values()) for row in rows)]
        return write(folder, file.name, "\n".join(lines) + "\n")
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def arrivals_s(trace: Any) -> list[float]:
    return [row.arrival_ns / S for row in trace]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_file_s_own_names_give_the_trace_that_ours_give(tmp_path, form):
    ours = read_trace(form, write_as(form, tmp_path, named()))
    file = write_as(form, tmp_path, named(**COLUMNS))
    check_refused(form, file, "no known field; .*; say what has another name: trace.columns={arrival_time: <its name>")
    for stream in (True, False):
        theirs = open_trace(form, file, stream=stream, columns=COLUMNS)
        assert fingerprint(theirs) == fingerprint(ours)
        assert theirs.notes == ours.notes == ()


def test_a_named_column_takes_the_place_of_one_of_our_name(tmp_path):
    file = write(tmp_path, "t.csv", "arrival_time,prompt_tokens,billed,output_tokens\n0,10,,5\n1,10,16,5\n")
    check_refused("csv", file, ":2: neither 'prompt_token_ids' nor", columns={"prompt_tokens": "billed"})
    file = write(tmp_path, "t.csv", "arrival_time,prompt_tokens,billed,output_tokens\n0,10,12,5\n1,10,16,5\n")
    trace = read_trace("csv", file, columns={"prompt_tokens": "billed"})
    assert [row.num_prompt_tokens for row in trace] == [12, 16]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_named_column_that_is_not_there_is_refused_and_one_without_values_is_not(tmp_path, form):
    rows = [row | {"wait": None} for row in named(**COLUMNS)]
    file = write_as(form, tmp_path, rows)
    said = "trace.columns names 'out', which it has not; did you mean 'Out'\\?"
    check_refused(form, file, said, columns=COLUMNS | {"output_tokens": "out"})
    assert len(read_trace(form, file, columns=COLUMNS | {"cancel_after": "wait"})) == len(ROWS)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"arrival": "ts"}, "trace.columns has 'arrival', which is no field of ours; did you mean 'arrival_ns'"),
        ({"arrival_time": "ts", "deadline": "ts"}, "names 'ts' for arrival_time and for deadline; a column"),
        ({"arrival_time": 3}, "trace.columns.arrival_time is 3; it must be a name in the file"),
        ({"arrival_time": ""}, "trace.columns.arrival_time is ''; it must be a name"),
        (["ts"], r"trace.columns is \['ts'\]; it must be \{<our field>"),
    ],
)  # fmt: skip
def test_columns_that_make_no_sense_are_refused(columns, message):
    with pytest.raises(ConfigError, match=message):
        check_columns(columns)


# --- instants ---

START = datetime(2026, 11, 16, 13, 0, 0, 961000, tzinfo=UTC)
FORMS = {  # how a file may write an instant
    "zoned": lambda at: at.isoformat(),
    "blank and Z": lambda at: at.strftime("%Y-%m-%d %H:%M:%S.%f") + "Z",
    "another zone": lambda at: (at + timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%S.%f") + "+0200",
    "naive": lambda at: at.strftime("%Y-%m-%dT%H:%M:%S.%f"),
    "seconds since 1970": lambda at: at.timestamp(),
    "milliseconds since 1970": lambda at: round(at.timestamp() * 1000),
}


@pytest.mark.parametrize("write_instant", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_instants_count_from_the_first_and_rows_out_of_order_are_sorted(tmp_path, form, write_instant):
    rows = [row | {"arrival_time": write_instant(START + timedelta(seconds=row["arrival_time"]))} for row in named()]
    file = write_as(form, tmp_path, rows)
    for stream in (True, False):
        assert arrivals_s(open_trace(form, file, stream=stream)) == pytest.approx([0, 1.5, 2.25, 2.5], abs=1e-6)
    trace = read_trace(form, write_as(form, tmp_path, [rows[i] for i in (2, 0, 1, 3)]))
    assert arrivals_s(trace) == pytest.approx([0, 1.5, 2.25, 2.5], abs=1e-6)
    is_naive = write_instant is FORMS["naive"]
    said = "instants without an offset are read as UTC: where clocks were changed, a gap or order is false"
    assert trace.notes == (*((said,) if is_naive else ()), "2 rows out of order, sorted by arrival")
    with pytest.raises(TraceError, match="before the one before it"):
        open_trace(form, file, stream=True)


@pytest.mark.parametrize("unit", ["ms", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC"])
def test_parquet_s_timestamps_are_instants(tmp_path, unit, zone):
    at = pa.array([START.replace(tzinfo=None) + timedelta(seconds=s) for s in (0, 1.5)], pa.timestamp(unit, zone))
    pq.write_table(pa.table({"arrival_time": at, "prompt_tokens": [3, 4]}), tmp_path / "t.parquet")
    assert arrivals_s(read_trace("parquet", tmp_path / "t.parquet")) == [0, 1.5]


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=5), st.integers(0, 10**9 - 1))
def test_instants_are_exact_to_the_ns(tmp_path_factory, offsets_ns, first_ns):
    def text(ns: int) -> str:
        whole, part = divmod(ns, S)
        return (datetime(2024, 2, 28, tzinfo=UTC) + timedelta(seconds=whole)).strftime(
            "%Y-%m-%dT%H:%M:%S"
        ) + f".{part:09}"

    rows = [{"arrival_time": text(first_ns + ns), "prompt_tokens": 3} for ns in offsets_ns]
    file = write(tmp_path_factory.mktemp("t"), "t.jsonl", json_lines(*rows))
    found = [row.arrival_ns for row in read_trace("jsonl", file)]
    assert found == sorted(ns - min(offsets_ns) for ns in offsets_ns)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("2026-11-16T13:00:00Z", "2026-11-16T13:00:01", "is in instants without an offset; expected instants with an"),
        (START.timestamp(), 5.0, "is in seconds of the run; expected seconds since 1970, as in the rows before"),
        (0.0, START.timestamp() * 1000, "is in milliseconds since 1970; expected seconds of the run"),
        ("2026-11-16T13:00:00Z", "2026-13-16T13:00:01Z", "is '2026-13-16T13:00:01Z'; expected an instant as 2023"),
        ("2026-11-16T13:00:00Z", "16.11.2026 13:00", "is '16.11.2026 13:00'; expected a number of seconds"),
    ],
)  # fmt: skip
def test_arrivals_of_a_file_are_of_one_clock(tmp_path, first, second, said):
    rows = [{"arrival_time": at, "prompt_tokens": 3} for at in (first, second)]
    file = write(tmp_path, "t.jsonl", json_lines(*rows))
    check_refused("jsonl", file, rf"t\.jsonl:2: field 'arrival_time' {said}")
    with pytest.raises(TraceError, match=said):
        list(open_trace("jsonl", file, stream=True))


def test_sessions_of_instants_may_have_think_times(tmp_path):
    rows = [
        {"arrival_time": "2026-11-16T13:00:00Z", "prompt_tokens": 3, "session_id": "a", "turn": 0},
        {"think_time": 2, "prompt_tokens": 9, "session_id": "a", "turn": 1},
        {"arrival_time": "2026-11-16T13:00:04Z", "prompt_tokens": 3},
    ]
    trace = read_trace("jsonl", write(tmp_path, "t.jsonl", json_lines(*rows)))
    assert arrivals_s(trace) == [0, 0, 4]


def test_a_frozen_trace_is_as_it_was_however_late(tmp_path):
    """`arrival_ns` is exact: no instant is made of it."""
    late = write(tmp_path, "t.jsonl", json_lines({"arrival_ns": 1_700_000_000 * S, "prompt_tokens": 3}))
    freeze_trace(read_trace("jsonl", late), tmp_path / "t.parquet")
    assert arrivals_s(read_trace("parquet", tmp_path / "t.parquet")) == [1_700_000_000]


# --- one long line ---


@pytest.mark.parametrize("form", ["csv", "azure", "burstgpt", "lengths", "jsonl"])
def test_a_file_of_one_long_line_is_refused_at_once(tmp_path, form):
    numbers = [i % 1000 / 1000 for i in range(100_000)]
    for name, text in (("twice", json.dumps({"date": "now", "itls": numbers})),
                       ("once", json.dumps({"date": "now", "itls": [*range(100_000)]}))):  # fmt: skip
        file = write(tmp_path, f"{name}.{form}", text)
        began = time.monotonic()
        with pytest.raises(TraceError) as caught:
            read_trace(form, file)
        assert time.monotonic() - began < 5, "quadratic it would be minutes"
        assert len(str(caught.value)) < 500 + len(str(tmp_path))
