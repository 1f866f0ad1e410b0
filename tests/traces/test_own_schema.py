"""Our own schema: the same trace from JSONL, CSV and Parquet; counts become content; rows survive a round trip."""

import json
import re
from array import array
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import TraceError
from testbed.traces.fingerprint import fingerprint
from testbed.traces.generators import SyntheticConfig, generate, stream_generated
from testbed.traces.readers import open_trace, read_trace
from testbed.traces.readers.own_rows import EXACT_FIELDS, FIELDS, row_from_fields
from testbed.traces.schema import Span, TokenIds, TraceRequest
from testbed.traces.serialize import row_to_json, write_jsonl
from testbed.traces.synthesis import materialize
from tests.traces.kit import check_refused, write

PAGE = Path(__file__).parents[2] / "docs" / "traces.md"


def test_the_page_on_traces_has_all_fields():
    _, _, section = PAGE.read_text().partition("## Our own schema\n")
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(told) == sorted((*FIELDS, *EXACT_FIELDS))


def jsonl(tmp_path: Path, *rows) -> Path:
    file = tmp_path / "t.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def request(name: str, at: float = 0.0, prompt: int = 10, output: int = 4, **more) -> dict:
    return {"request_id": name, "arrival_time": at, "prompt_tokens": prompt, "output_tokens": output, **more}


def prompt_of(row: TraceRequest) -> array:
    return materialize(row.prompt, 5000)


def output_of(row: TraceRequest) -> array:
    assert row.output is not None
    return materialize((row.output,), 5000)


# --- what the fields mean ---


def test_every_field_is_read(tmp_path):
    row = {
        "request_id": "a", "arrival_time": 1.5, "prompt_token_ids": [3, 1, 2], "output_token_ids": [9], "priority": -2,
        "tenant": "t", "session_id": "s", "turn": 0, "cancel_after": 0.25, "deadline": 1.5, "cache_salt": "pepper",
        "max_tokens": 90,
    }  # fmt: skip
    later = request("b", session_id="s", turn=1, think_time=2)
    del later["arrival_time"]
    trace = read_trace("jsonl", jsonl(tmp_path, row, later))
    first, second = trace.rows
    assert first == TraceRequest(
        "a", 1_500_000_000, (TokenIds(array("i", [3, 1, 2])),), TokenIds(array("i", [9])), -2, "t", "s", 0,
        cancel_after_ns=250_000_000, deadline_ns=1_500_000_000, cache_salt="pepper", max_tokens=90,
        place=f"{tmp_path}/t.jsonl:1",
    )  # fmt: skip
    assert (second.think_ns, second.arrival_ns, second.turn) == (2 * 10**9, first.arrival_ns, 1)
    assert prompt_of(second)[:4].tolist() == [3, 1, 2, 9]


def test_times_are_kept_and_rounded_to_the_nanosecond(tmp_path):
    trace = read_trace("jsonl", jsonl(tmp_path, request("a", 7), request("b", 7.1234567891)))
    assert [row.arrival_ns for row in trace] == [7_000_000_000, 7_123_456_789]


def test_counts_give_each_request_a_content_of_its_own(tmp_path):
    trace = read_trace("jsonl", jsonl(tmp_path, request("a"), request("b")))
    a, b = trace.rows
    assert prompt_of(a) != prompt_of(b)
    assert output_of(a) != prompt_of(a)[:4]


def test_a_turn_begins_with_the_turn_before_it_if_it_is_long_enough(tmp_path):
    rows = [
        request("t0", 0, 10, 4, session_id="s", turn=0),
        request("t1", 1, 20, 5, session_id="s", turn=1),
        request("t2", 2, 24, 5, session_id="s", turn=2),  # shorter than 20 + 5: the history was cut
        request("t3", 3, 29, 5, session_id="s", turn=3),
    ]
    t0, t1, t2, t3 = read_trace("jsonl", jsonl(tmp_path, *rows)).rows
    assert prompt_of(t1)[:14] == prompt_of(t0) + output_of(t0)
    assert prompt_of(t2)[:5] != prompt_of(t1)[:5]
    assert prompt_of(t3) == prompt_of(t2) + output_of(t2)
    assert len(t1.prompt) == 1  # a session stays one span, however long it grows


def test_turns_may_stand_in_any_order_in_the_file(tmp_path):
    rows = [
        request("t1", 1, 20, 5, session_id="s", turn=1, think_time=1),
        request("other", 0.5),
        request("t0", 1, 10, 4, session_id="s", turn=0),
    ]
    trace = read_trace("jsonl", jsonl(tmp_path, *rows))
    assert [row.request_id for row in trace] == ["other", "t0", "t1"]
    assert prompt_of(trace.rows[2])[:14] == prompt_of(trace.rows[1]) + output_of(trace.rows[1])


def test_an_unknown_output_shares_the_prompt_only(tmp_path):
    first = request("t0", 0, 10, session_id="s", turn=0)
    del first["output_tokens"]
    t0, t1 = read_trace("jsonl", jsonl(tmp_path, first, request("t1", 1, 20, 5, session_id="s", turn=1))).rows
    assert t0.output is None
    assert prompt_of(t1)[:10] == prompt_of(t0)


def test_ids_and_unknown_fields(tmp_path):
    row = request("x", colour="red")
    del row["request_id"]
    trace = read_trace("jsonl", jsonl(tmp_path, row, row))
    assert [row.request_id for row in trace] == ["0", "1"]
    assert [row.request_id for row in read_trace("jsonl", jsonl(tmp_path, request(7), row))] == ["7", "1"]
    assert trace.notes == ("ignored fields: colour",)
    for stream in (False, True):
        with pytest.raises(TraceError, match=r":2: field 'request_id' is '1'; expected an id not used before"):
            list(open_trace("jsonl", jsonl(tmp_path, request("1"), row), stream=stream))
    with pytest.raises(TraceError, match=r":2: field 'request_id' is '0'; expected an id not used before .*:1\)"):
        read_trace("jsonl", jsonl(tmp_path, row, request("0")))


@pytest.mark.parametrize("name", ["x_request_id", "new_prompt_tokens", "arrival_time_ms"])
def test_a_longer_name_or_one_beside_its_field_is_a_column_of_one_s_own(tmp_path, name):
    for row in (request("a"), {**request("a"), "arrival_ns": 0}):
        assert read_trace("jsonl", jsonl(tmp_path, {**row, name: 7})).notes == (f"ignored fields: {name}",)
        del row["arrival_time"]
    row = {"arrival_time": 0, "prompt_tokens": 9, "max_output_tokens": 7}
    assert read_trace("jsonl", jsonl(tmp_path, row)).notes == ("ignored fields: max_output_tokens",)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("prioritty", "priority"),
        ("Tenant", "tenant"),
        ("num_prompt_tokens", "prompt_tokens"),
        ("deadline_s", "deadline"),
        ("deadline_ms", "deadline"),
        ("cancel_after_ms", "cancel_after"),
        ("think_ms", "think_time"),
        ("think_millis", "think_time"),
        ("arrival_s", "arrival_time"),
        ("output_parts", "output_part"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_misspelt_field_is_an_error_with_its_line_and_the_right_name(tmp_path, misspelt, meant, stream):
    row = request("b", 1.0)
    row[misspelt] = row.pop(meant, 1)
    unit = ", in seconds" if meant in ("arrival_time", "think_time", "cancel_after", "deadline") else ""
    said = rf"t\.jsonl:2: field '{misspelt}' is not known; did you mean '{meant}'{unit}\?"
    with pytest.raises(TraceError, match=said):
        list(open_trace("jsonl", jsonl(tmp_path, request("a"), row), stream=stream))


def test_a_field_beside_the_one_that_it_resembles_is_only_noted(tmp_path):
    trace = read_trace("jsonl", jsonl(tmp_path, request("a", num_prompt_tokens=10, total_tokens=14)))
    assert trace.notes == ("ignored fields: num_prompt_tokens, total_tokens",)


def test_sampling_in_a_row_is_noted_with_the_key_that_sets_it(tmp_path):
    (note,) = read_trace("jsonl", jsonl(tmp_path, request("a", temperature=0.5))).notes
    assert note == "ignored fields: temperature; sampling is set for the whole run, as sampling.temperature"


# --- the three formats ---


def test_csv_parquet_and_jsonl_are_the_same_trace(tmp_path):
    rows = [
        request("a", 0.5, 7, 3, priority=1, tenant="x"),
        request("b", 1.0, 9, 3, session_id="s", turn=0),
        request("c", None, 15, 3, session_id="s", turn=1, think_time=0.5, cancel_after=3.0),
    ]
    rows = [{name: value for name, value in row.items() if value is not None} for row in rows]
    names = list({name: None for row in rows for name in row})
    lines = [",".join(names)] + [",".join(str(row.get(name, "")) for name in names) for row in rows]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    columns = {name: [row.get(name) for row in rows] for name in names}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    expected = fingerprint(read_trace("jsonl", jsonl(tmp_path, *rows)))
    assert fingerprint(read_trace("csv", tmp_path / "t.csv")) == expected
    assert fingerprint(read_trace("parquet", tmp_path / "t.parquet")) == expected
    for name in ("t.jsonl", "t.csv", "t.parquet"):
        assert fingerprint(read_trace("auto", tmp_path / name)) == expected


def test_token_ids_in_a_csv_cell(tmp_path):
    (tmp_path / "t.csv").write_text('arrival_time,prompt_token_ids,output_token_ids\n0,1 2 3,"[4, 5]"\n')
    (row,) = read_trace("csv", tmp_path / "t.csv").rows
    assert (prompt_of(row).tolist(), output_of(row).tolist()) == ([1, 2, 3], [4, 5])


def test_pandas_writes_missing_numbers_as_nan(tmp_path):
    table = pa.table({"arrival_time": [0.0, 1.0], "prompt_tokens": [3, 3], "turn": [0.0, float("nan")],
                      "session_id": ["s", None]})  # fmt: skip
    pq.write_table(table, tmp_path / "t.parquet")
    assert [row.turn for row in read_trace("parquet", tmp_path / "t.parquet")] == [0, None]
    pq.write_table(pa.table({"arrival_time": [float("nan")], "prompt_tokens": [3]}), tmp_path / "t.parquet")
    check_refused("parquet", tmp_path / "t.parquet", r"t\.parquet:1: field 'arrival_time' is nan; expected a number")


def test_unknown_extensions_and_broken_parquet_are_refused(tmp_path):
    (tmp_path / "t.txt").write_text("x")
    (tmp_path / "t.parquet").write_text("x")
    said = r"t\.txt: unknown extension '\.txt'; expected \.jsonl, \.csv or \.parquet"
    check_refused("auto", tmp_path / "t.txt", said)
    file = tmp_path / "t.parquet"
    check_refused("auto", file, r"t\.parquet: not a whole Parquet file")
    pq.write_table(pa.table({"arrival_time": [0.0], "prompt_tokens": [3]}), file)
    whole = bytearray(file.read_bytes())
    for damaged in (slice(4, 40), slice(-60, -30)):  # a page's header, then the footer
        whole[damaged] = b"\xff" * len(whole[damaged])
        file.write_bytes(whole)
        check_refused("auto", file, r"t\.parquet: not a whole Parquet file: .*[^: ]$")
    pq.write_table(pa.table([pa.array([0.0])] * 2, names=["arrival_time"] * 2), file)
    check_refused("auto", file, r"t\.parquet: has the column 'arrival_time' more than once")
    said = r"t\.parquet\.gz: not a Parquet file, which is compressed inside; unpack it"
    check_refused("auto", write(tmp_path, "t.parquet.gz", "x"), said)
    check_refused("auto", tmp_path / "t.jsonl", "does not exist")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,c\n1,2,3\n", "t.csv:2: no known field; .*, found 'a', 'b', 'c'; say what has another name: "),
        ("0,100,20\n1,100,20\n",
         ", found '0', '100', '20'; the first line has values: put the columns' names before it"),
        ("arrival_time;prompt_tokens\n0,5;4\n", "t.csv:2: field 'arrival_time' is '0,5'; expected a number of seconds"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,1,1\n", "read it with trace=azure"),
        ("arrival_time,prompt_tokens,prompt_tokens\n0,1,2\n", r"t\.csv:1: column 'prompt_tokens' occurs twice"),
    ],
)  # fmt: skip
def test_a_csv_of_another_schema_is_told_from_its_header(tmp_path, text, message):
    check_refused("csv", write(tmp_path, "t.csv", text), message)


def test_objects_whose_names_are_numbers_lack_no_header(tmp_path):
    """As pandas writes a frame without names of columns."""
    file = write(tmp_path, "t.jsonl", '{"0": 0.5, "1": 100}\n')
    check_refused("jsonl", file, "found '0', '1'; say what has another name")


# --- bad rows ---

GOOD = request("good")
BAD_ROWS = [
    ({**GOOD, "arrival_time": -1},
     r":1: field 'arrival_time' is -1; expected a number of seconds from 0 to 4,611,686,018"),
    ({**GOOD, "arrival_time": "soon"}, "field 'arrival_time' is 'soon'"),
    ({**GOOD, "arrival_time": True}, "field 'arrival_time' is True"),
    ({**GOOD, "arrival_time": 1e300}, "field 'arrival_time' is 1e"),
    ('{"arrival_time": NaN, "prompt_tokens": 1}', "field 'arrival_time' is nan"),
    ('{"arrival_time": Infinity, "prompt_tokens": 1}', "field 'arrival_time' is inf"),
    ('{"arrival_time": 1' + "0" * 400 + ', "prompt_tokens": 1}', "field 'arrival_time' is 1000"),
    ({"request_id": "a", "prompt_tokens": 1}, "field 'arrival_time' is missing; found request_id, prompt_tokens"),
    ({"arrival_time": 0}, "neither 'prompt_token_ids' nor 'prompt_tokens' is given; expected one of them"),
    ({**GOOD, "prompt_token_ids": [1]}, "both 'prompt_token_ids' and 'prompt_tokens' are given"),
    ({**GOOD, "output_token_ids": [1]}, "both 'output_token_ids' and 'output_tokens' are given"),
    ({**GOOD, "arrival_time": 1e12}, r"arrival_time' is 10+\.0; expected a number of seconds from 0 to 4,611,686,018"),
    ({**GOOD, "arrival_time": "\u0661.\u0665"}, "field 'arrival_time' is '\u0661"),
    ({**GOOD, "think_time": "1_0"}, "field 'think_time' is '1_0'"),
    ({**GOOD, "prompt_tokens": "\u0661"}, "field 'prompt_tokens' is '\u0661'"),
    ({**GOOD, "turn": "\u0661"}, "field 'turn' is '\u0661'"),
    ({"arrival_time": 0, "prompt_token_ids": "\u0661\u0662 3"}, "field 'prompt_token_ids' is '\u0661"),
    ({"arrival_time": 0, "prompt_token_ids": "1_0 3"}, "field 'prompt_token_ids' is '1_0 3'"),
    ({**GOOD, "prompt_tokens": 0}, "field 'prompt_tokens' is 0; expected a whole number of tokens from 1"),
    ({**GOOD, "prompt_tokens": -4}, "field 'prompt_tokens' is -4"),
    ({**GOOD, "prompt_tokens": 1.5}, r"field 'prompt_tokens' is 1\.5"),
    ({**GOOD, "prompt_tokens": 10**12}, "field 'prompt_tokens' is 1000000000000"),
    ({**GOOD, "max_tokens": 0}, "field 'max_tokens' is 0; expected a whole number of tokens from 1"),
    ({**GOOD, "output_tokens": 0}, "field 'output_tokens' is 0"),
    ({"arrival_time": 0, "prompt_token_ids": []}, r"field 'prompt_token_ids' is \[\]; expected a list of at least one"),
    ({"arrival_time": 0, "prompt_token_ids": [1, -2]}, r"field 'prompt_token_ids\[1\]' is -2; expected a token id"),
    ({"arrival_time": 0, "prompt_token_ids": ["1"]}, r"field 'prompt_token_ids\[0\]' is '1'"),
    ({"arrival_time": 0, "prompt_token_ids": "one"}, "field 'prompt_token_ids' is 'one'"),
    ({"arrival_time": 0, "prompt_token_ids": 5}, "field 'prompt_token_ids' is 5; expected a list of at least one"),
    ({**GOOD, "request_id": " "}, "field 'request_id' is ' '; expected a name that is not empty"),
    ({**GOOD, "request_id": True}, "field 'request_id' is True; expected a name"),
    ({**GOOD, "request_id": ""}, "field 'request_id' is ''; expected a name that is not empty"),
    ({**GOOD, "request_id": [1]}, r"field 'request_id' is \[1\]"),
    ({**GOOD, "priority": "high"}, "field 'priority' is 'high'; expected a whole number"),
    ({**GOOD, "cancel_after": -1}, "field 'cancel_after' is -1"),
    ({**GOOD, "turn": 0}, "field 'session_id' is absent; expected it beside 'turn'"),
    ({**GOOD, "session_id": "s", "think_time": 1}, "'turn' is absent; expected it beside 'session_id' and"),
    ({**GOOD, "session_id": "s", "turn": -1}, "field 'turn' is -1; expected a whole number from 0"),
    ({**GOOD, "think_time": 1}, "field 'think_time' is given outside a session"),
    ({**GOOD, "session_id": "s", "turn": 0, "think_time": 1}, "the first turn of session 's' .* has a think_time"),
    ({**GOOD, "prompt_parts": "x"}, "field 'prompt_parts' is 'x'; expected parts as"),
    ({**GOOD, "prompt_parts": [{"span": ["zz", 0, 1]}]}, "field 'prompt_parts' is .*zz"),
    ({**GOOD, "prompt_parts": [{"ids": [1]}]}, "field 'prompt_tokens' is 10; expected 1, the length of 'prompt_parts'"),
    ('{"request_id": "a"', "not JSON: .*expected one whole object on each line"),
    ("7", "found a JSON int; expected one object"),
    ("[" * 100_000, "not JSON: nested too deeply"),
    ('{"arrival_time": ' + "9" * 5000 + "}", "not JSON: a number has too many digits"),
    ({"arrival_time": 0, "prompt_token_ids": "[" * 100_000}, r"field 'prompt_token_ids' is '\[\["),
    ({"a": 0, "b": 1},
     "no known field; expected arrival_time, prompt_tokens, …, found 'a', 'b'; say what has another name: "
     "trace.columns={arrival_time: <its name>, …}$"),
    ({}, "no known field; .* found nothing"),
    ({"timestamp": 0, "input_length": 3, "hash_ids": [1]}, "read it with trace=mooncake"),
    ({"chat_id": 7, "turn": 1, "input_length": 3, "hash_ids": [1]}, "found chat_id, .*; read it with trace=bailian$"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "message"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_bad_rows_are_refused_with_their_place(tmp_path, row, message):
    with pytest.raises(TraceError, match=message) as caught:
        read_trace("jsonl", jsonl(tmp_path, row))
    assert f"{tmp_path}/t.jsonl:1: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([request("a"), request("b"), request("a")], r":3: field 'request_id' is 'a'; .*\(first at .*:1\)"),
        ([request("a", session_id="s", turn=0), request("b", 1, session_id="s", turn=2)],
         r":2: field 'turn' is 2 in session 's'; expected 1, the turn after .*:1"),
        ([request("a", session_id="s", turn=0), request("b", 1, session_id="s", turn=0)],
         r":2: field 'turn' is 0 in session 's'; expected 1"),
        ([request("a", 5, session_id="s", turn=0), request("b", 1, session_id="s", turn=1)],
         r":2: turn 1 of session 's' arrives at 1\.0 s, before turn 0 at 5\.0 s"),
        ([], "no requests; expected at least one row"),
    ],
)  # fmt: skip
def test_rows_that_contradict_each_other_are_refused(tmp_path, rows, message):
    check_refused("jsonl", jsonl(tmp_path, *rows), message)


# --- exact round trips ---

spans = st.builds(Span, st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(1, 10**6))
ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5).map(lambda found: TokenIds(array("i", found)))
parts = spans | ids
instants = st.integers(0, 2**60)
names = st.text(min_size=1).filter(lambda name: name.strip() != "" and "\ud800" not in name)


@st.composite
def trace_rows(draw):
    in_session = draw(st.booleans())
    return TraceRequest(
        request_id=draw(names), arrival_ns=draw(instants), prompt=tuple(draw(st.lists(parts, min_size=1, max_size=4))),
        output=draw(st.none() | parts), priority=draw(st.integers(-(2**31), 2**31 - 1)), tenant=draw(st.none() | names),
        session_id=draw(names) if in_session else None, turn=draw(st.integers(0, 10**6)) if in_session else None,
        think_ns=draw(st.none() | instants) if in_session else None, cancel_after_ns=draw(st.none() | instants),
        deadline_ns=draw(st.none() | instants), cache_salt=draw(st.none() | names),
        max_tokens=draw(st.none() | st.integers(1, 10**6)), place=draw(st.just("") | names),
    )  # fmt: skip


@given(trace_rows(), st.booleans())
def test_a_row_survives_json(row, exact):
    assert row_from_fields(json.loads(json.dumps(row_to_json(row, exact_parts=exact))), row.place) == row


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.zst"])
def test_a_written_trace_reads_back_exactly(tmp_path, name):
    config = SyntheticConfig(num_requests=30, max_turns=4, num_system_prompts=2, num_tenants=2)
    trace = generate(config, seed=3)
    write_jsonl(stream_generated(config, seed=3), tmp_path / name)
    again = read_trace("auto", tmp_path / name)
    assert fingerprint(again) == fingerprint(trace)
    assert [row._replace(place="") for row in again] == list(trace.rows)
    assert again.notes == ()


def test_the_column_of_numbers_that_pandas_writes_first_is_told_though_it_has_no_name(tmp_path):
    (tmp_path / "t.csv").write_text(",arrival_time,prompt_tokens,colour\n0,0,4,red\n")
    assert read_trace("csv", tmp_path / "t.csv").notes == ("ignored fields: one without a name, colour",)
