"""Logs of one's own: rows that trace.where leaves out, and sessions whose turns the file does not number."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.cli import main
from testbed.errors import ConfigError, TraceError
from testbed.traces.fingerprint import fingerprint
from testbed.traces.readers import open_trace, read_trace
from testbed.traces.readers.own_log import check_where
from tests.traces.kit import S, check_refused, json_lines, write
from tests.traces.test_own_names import write_as

FORMS = ("csv", "jsonl", "parquet")
STATUS = (200, 429, 206, 200, 499, 500, 200)


def logged(**more: Any) -> list[dict[str, Any]]:
    """Rows of a gateway: those of requests that failed have no counts."""
    return [
        {"arrival_time": float(i), "prompt_tokens": 10 + i, "output_tokens": 5, "status": status, "error": None, **more}
        | ({} if status < 300 else {"prompt_tokens": None, "output_tokens": None, "error": "failed"})
        for i, status in enumerate(STATUS)
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("where", "said", "kept"),
    [
        ({"status": 200}, "status: 200", [10, 13, 16]),
        ({"status": "200"}, 'status: "200"', [10, 13, 16]),
        ({"status": [200, 206.0]}, "status: [200, 206.0]", [10, 12, 13, 16]),
        ({"error": None}, "error: null", [10, 12, 13, 16]),
        ({"status": 200, "arrival_time": [0, 2, 3]}, "status: 200, arrival_time: [0, 2, 3]", [10, 13]),
    ],
)
def test_rows_of_other_values_are_left_out_and_counted(tmp_path, form, where, said, kept):
    file = write_as(form, tmp_path, logged())
    check_refused(form, file, ":[23]: neither 'prompt_token_ids' nor 'prompt_tokens' is given")
    for stream in (True, False):
        trace = open_trace(form, file, stream=stream, where=where)
        assert [row.num_prompt_tokens for row in trace] == kept
        each = " (4 by status, 1 by arrival_time)" * (len(where) > 1)
        assert trace.notes[-1] == f"{7 - len(kept)} of 7 rows left out{each}: trace.where={{{said}}}"
        assert not any(name in note for name in where for note in trace.notes[:-1]), "it was not ignored"


@pytest.mark.parametrize("stream", [True, False])
def test_a_limit_is_of_the_rows_that_are_left(tmp_path, stream):
    trace = open_trace("csv", write_as("csv", tmp_path, logged()), 2, stream=stream, where={"status": 200})
    assert [row.num_prompt_tokens for row in trace] == [10, 13]
    assert trace.notes[-1] == "2 of 4 rows left out: trace.where={status: 200}"


@pytest.mark.parametrize("form", FORMS)
def test_a_column_goes_by_the_file_s_name_also_where_it_is_a_field_of_ours(tmp_path, form):
    rows = [row | {"model": "large" if i % 2 else "small"} for i, row in enumerate(logged()) if row["status"] < 300]
    file = write_as(form, tmp_path, rows)
    trace = read_trace(form, file, columns={"tenant": "model"}, where={"model": "small"})
    assert [row.tenant for row in trace] == ["small"] * 3


@pytest.mark.parametrize("form", FORMS)
def test_a_column_that_is_in_no_row_is_refused_with_those_that_are(tmp_path, form):
    file = write_as(form, tmp_path, logged())
    said = "trace.where names 'Status', which it has not; did you mean 'status'\\? found arrival_time, prompt_tokens"
    check_refused(form, file, said, where={"Status": 200})
    check_refused(form, file, r"no requests; .* row by trace\.where=\{status: 201\}", where={"status": 201})
    with pytest.raises(TraceError, match="names 'Status'"):
        open_trace(form, file, stream=True, where={"Status": 200})


def test_truths_and_large_numbers_are_compared_as_they_are(tmp_path):
    given = [(True, 2**60), ("TRUE", 2**60 + 1), (1, 2**60 + 2)]
    rows = [{"arrival_time": 0, "prompt_tokens": 3 + i, "ok": ok, "user": user} for i, (ok, user) in enumerate(given)]
    file = write(tmp_path, "t.jsonl", json_lines(*rows))
    cases = [({"ok": True}, [3, 4]), ({"ok": 1}, [5]), ({"user": 2**60 + 1}, [4]), ({"user": str(2**60)}, [3])]
    for where, kept in cases:
        assert [row.num_prompt_tokens for row in read_trace("jsonl", file, where=where)] == kept


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (["status"], r"trace.where is \['status'\]; it must be \{<a name"),
        ({200: "status"}, "trace.where has 200; it must be a name in the file"),
        ({"status": []}, r"trace.where.status is \[\]; it must be a value, or a list of at least one"),
        ({"status": {"above": 199}}, "trace.where.status is {'above': 199}; it must be a value"),
    ],
)
def test_a_where_that_makes_no_sense_is_refused(where, message):
    with pytest.raises(ConfigError, match=message):
        check_where(where)


def test_the_commands_take_it_as_a_key(tmp_path, capsys):
    file = str(write_as("csv", tmp_path, logged()))
    assert main(["trace", "inspect", "csv", file, "--where", "{status: [200, 206]}"]) == 0
    assert "3 of 7 rows left out: trace.where={status: [200, 206]}" in capsys.readouterr().out
    assert main(["trace", "inspect", "azure", file, "--where", "{status: 200}"]) == 1
    assert "--where goes with csv, jsonl, parquet" in capsys.readouterr().err
    given = ["trace=csv", f"trace.path={file}", "trace.where={status: 200}"]
    assert main(["trace", "freeze", str(tmp_path / "t.parquet"), *given]) == 0
    frozen = read_trace("parquet", tmp_path / "t.parquet")
    assert "4 of 7 rows left out: trace.where={status: 200}" in frozen.notes
    assert fingerprint(frozen) == fingerprint(read_trace("csv", file, where={"status": 200}))


# --- turns ---

NUMBERED = "the file has no turns: they are numbered by arrival within each session"
CHATS = [(0.0, 10, 5, "a"), (1.5, 30, 7, "a"), (1.5, 12, 3, "b"), (2.5, 60, 4, "a"), (2.5, 80, 4, "a")]


def chats(order: tuple[int, ...] = (0, 1, 2, 3, 4), **columns: list[Any]) -> list[dict[str, Any]]:
    names = ("arrival_time", "prompt_tokens", "output_tokens", "session_id")
    rows = [dict(zip(names, row, strict=True)) for row in CHATS]
    return [{"request_id": f"r{i}"} | rows[i] | {name: values[i] for name, values in columns.items()} for i in order]


@pytest.mark.parametrize("form", FORMS)
def test_turns_that_the_file_does_not_have_are_numbered_by_arrival(tmp_path, form):
    given = read_trace(form, write_as(form, tmp_path, chats(turn=[0, 1, 0, 2, 3])))
    file = write_as(form, tmp_path, chats())
    for trace in (open_trace(form, file, stream=True), read_trace(form, file)):
        assert fingerprint(trace) == fingerprint(given)
        assert trace.notes == (NUMBERED,)
    trace = read_trace(form, write_as(form, tmp_path, chats((1, 2, 3, 0, 4))))
    assert fingerprint(trace) == fingerprint(given)
    assert trace.notes == (NUMBERED, "1 row out of order, sorted by arrival")


@pytest.mark.parametrize("stream", [True, False])
def test_the_turns_after_one_that_is_left_out_move_up(tmp_path, stream):
    file = write_as("csv", tmp_path, chats(turn=[4, 5, 1, 6, 7], status=[200, 500, 200, 200, 200]))
    trace = open_trace("csv", file, stream=stream, where={"status": 200})
    assert [(row.session_id, row.turn, row.arrival_ns / S) for row in trace] == [
        ("a", 4, 0), ("b", 1, 1.5), ("a", 5, 2.5), ("a", 6, 2.5)
    ]  # fmt: skip


def test_turns_in_wrong_order_are_refused_also_where_some_are_left_out(tmp_path):
    file = write_as("csv", tmp_path, chats(turn=[1, 9, 1, 3, 2], status=[200, 500, 200, 200, 200]))
    with pytest.raises(TraceError, match="turn 2 of session 'a' follows turn 3; expected turns in order"):
        open_trace("csv", file, stream=True, where={"status": 200})
    assert [row.turn for row in read_trace("csv", file, where={"status": 200}) if row.session_id == "a"] == [1, 2, 3]
    file = write_as("csv", tmp_path, chats(turn=[1, 9, 1, 3, 3], status=[200, 500, 200, 200, 200]))
    check_refused("csv", file, "field 'turn' is 2 in session 'a'; expected 3", where={"status": 200})


# --- gateways' files ---


@pytest.mark.parametrize("form", FORMS)
def test_requests_without_output_are_left_out_and_counted(tmp_path, form):
    rows = [{"at": float(i), "prompt_tokens": 10 + i, "output_tokens": i % 3} for i in range(7)]
    file, named = write_as(form, tmp_path, rows), {"arrival_time": "at"}
    for stream in (True, False):
        trace = open_trace(form, file, stream=stream, columns=named)
        assert [row.num_prompt_tokens for row in trace] == [11, 12, 14, 15]
        assert trace.notes[-1] == "3 requests without output left out: output_tokens is 0"
    chats = write_as(form, tmp_path, [{**row, "session_id": "a", "turn": i} for i, row in enumerate(rows)])
    for stream in (True, False):
        assert [row.turn for row in open_trace(form, chats, stream=stream, columns=named)] == [1, 2, 3, 4]
    none = write_as(form, tmp_path, [{**row, "output_tokens": 0, "arrival_time": 0} for row in rows])
    check_refused(form, none, "[12]: field 'output_tokens' is '?0'?; expected a whole number of tokens from 1")
    said = "[78]: field 'output_tokens' is 0, as in all rows before; expected a request with output"
    check_refused(form, none, said, columns=named)
    written = write_as(form, tmp_path, [{**row, "output_tokens": float(row["output_tokens"])} for row in rows])
    assert read_trace(form, written, columns=named).num_requests == 4


USAGE = {"arrival_time": "created", "prompt_tokens": "usage.prompt_tokens", "output_tokens": "usage.details.out"}


def nested(**more: Any) -> list[dict[str, Any]]:
    return [
        {
            "created": i,
            "usage": {"prompt_tokens": 5 + i, "details": {"out": 3, "cached": 1}, **more},
            "a.b": i,
            "c": {"d": 1},
        }
        for i in range(3)
    ]


def test_a_dotted_name_leads_into_the_objects_of_jsonl(tmp_path):
    file = write(tmp_path, "t.jsonl", json_lines(*nested()))
    trace = read_trace("jsonl", file, columns=USAGE)
    assert [(row.num_prompt_tokens, row.num_output_tokens) for row in trace] == [(5, 3), (6, 3), (7, 3)]
    assert trace.notes == ("ignored fields: usage.details.cached, a.b, c",)
    kept = read_trace("jsonl", file, columns=USAGE, where={"a.b": [0, 2], "c.d": 1})
    assert [row.num_prompt_tokens for row in kept] == [5, 7]
    wrong = {**USAGE, "prompt_tokens": "usage.prompt_token", "max_tokens": "usage.prompt_tokens"}
    said = "trace.columns names 'usage.prompt_toks', which it has not; did you mean 'usage.prompt_tokens'?"
    check_refused("jsonl", file, said, columns={**USAGE, "priority": "usage.prompt_toks"})
    check_refused("jsonl", file, ":1: neither 'prompt_token_ids' nor 'prompt_tokens' is given", columns=wrong)


@pytest.mark.parametrize("form", FORMS)
def test_a_column_may_be_said_to_be_none_of_ours(tmp_path, form):
    rows = [{"arrival_time": float(i), "prompt_tokens": 3, "turn": 9 - i, "tenant": "a"} for i in range(3)]
    file = write_as(form, tmp_path, rows)
    check_refused(form, file, "session_id")
    trace = read_trace(form, file, columns={"turn": None})
    assert [(row.turn, row.tenant) for row in trace] == [(None, "a")] * 3
    file = write_as(form, tmp_path, [{"Turn#": row.pop("turn"), **row} for row in rows])
    check_refused(
        form, file, r"'Turn#' is not known; did you mean 'turn'\? .*; turn: null, that it is a field of your own"
    )
    assert read_trace(form, file, columns={"turn": None}).notes == ()


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_columns_may_be_separated_otherwise(tmp_path, separator):
    text = "arrival_time,prompt_tokens,tenant\n0.5,3,A B\n2.5,4,C\n".replace(",", separator)
    trace = read_trace("csv", write(tmp_path, "t.csv", text))
    assert [(row.num_prompt_tokens, row.tenant) for row in trace] == [(3, "A B"), (4, "C")]
