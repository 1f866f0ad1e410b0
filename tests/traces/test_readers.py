"""Every published format is read exactly, and every bad row is refused with its place. Bailian: test_bailian.py."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.traces.fingerprint import fingerprint
from testbed.traces.readers import json_list, open_trace, read_trace
from testbed.traces.readers.json_list import json_items
from testbed.traces.readers.open_text import read_pieces, watching
from testbed.traces.schema import Span
from testbed.traces.stream import StreamedTrace
from testbed.traces.synthesis import materialize
from tests.traces.kit import check_refused, json_lines, published, write

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-17 00:00:00.0000001,879,55"
)
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def shape(trace):
    return [(row.arrival_ns, row.num_prompt_tokens, row.num_output_tokens) for row in trace]


# --- Azure ---


def test_azure_keeps_all_seven_digits(tmp_path):
    trace = read_trace("azure", write(tmp_path, "a.csv", AZURE))
    midnight = (5 * 3600 + 44 * 60 + 13) * 10**9 + 319_410_100
    assert shape(trace) == [(0, 374, 44), (4_314_579_000, 396, 109), (midnight, 879, 55)]
    assert [row.request_id for row in trace] == ["azure-0", "azure-1", "azure-2"]
    assert trace.rows[1].place.endswith("a.csv:3")
    assert trace.notes == ()


def test_azure_of_2024_has_offsets(tmp_path):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,1,2\n2024-05-10T01:00:01Z,3,4\n"
    text += "2024-05-10 02:00:01.5+01:00,5,6\n"
    assert [row.arrival_ns for row in read_trace("azure", write(tmp_path, "a.csv", text))] == [
        0, 3600_990_070_000, 3601_490_070_000,
    ]  # fmt: skip


def test_unordered_rows_are_sorted_and_that_is_said(tmp_path):
    lines = AZURE.split("\r\n")
    trace = read_trace("azure", write(tmp_path, "a.csv", "\n".join([lines[0], lines[2], lines[1], lines[3]])))
    assert [row.arrival_ns for row in trace][:2] == [0, 4_314_579_000]
    assert trace.notes == ("1 row out of order, sorted by arrival",)


def test_limit_reads_the_first_rows_only(tmp_path):
    assert len(read_trace("azure", write(tmp_path, "a.csv", AZURE + "\nbroken"), limit=2)) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:15,1,2", r"a\.csv:2: field 'TIMESTAMP' is '2023-11-16 18:15'; expected an instant"),
        ("2023-13-16 18:15:00,1,2", r"field 'TIMESTAMP' is '2023-13-16 18:15:00'"),
        ("2023-11-16 24:15:00,1,2", r"field 'TIMESTAMP' is '2023-11-16 24:15:00'"),
        ("2023-11-16 18:15:00,x,2",
         r"a\.csv:2: field 'ContextTokens' is 'x'; expected a whole number of tokens from 1"),
        ("2023-11-16 18:15:00,-3,2", r"field 'ContextTokens' is '-3'"),
        ("2023-11-16 18:15:00,0,2", r"field 'ContextTokens' is '0'"),
        ("2023-11-16 18:15:00,1,0", r"field 'GeneratedTokens' is '0'"),
        ("2023-11-16 18:15:00,1,nan", r"field 'GeneratedTokens' is 'nan'"),
        ("2023-11-16 18:15:00,1,inf", r"field 'GeneratedTokens' is 'inf'"),
        ("2023-11-16 18:15:00,1,1_0", r"field 'GeneratedTokens' is '1_0'"),
        ("2023-11-16 18:15:00,100000001,1", r"field 'ContextTokens' is '100000001'; expected .* to 100,000,000"),
        ("2023-11-16 18:15:00,1,2.5", r"field 'GeneratedTokens' is '2\.5'"),
        ("2023-11-16 18:15:00+99:99,1,2", r"field 'TIMESTAMP' is '2023-11-16 18:15:00\+99:99'; .*\(up to 23:59\)"),
        ("2023-11-16 18:15:00,1", r"a\.csv:2: 2 cells; expected 3, as in the header"),
        ('2023-11-16 18:15:00,1,"2', r"a\.csv:2: not CSV"),
    ],
)  # fmt: skip
def test_bad_azure_rows_are_refused(tmp_path, row, message):
    check_refused("azure", write(tmp_path, "a.csv", AZURE.split("\r\n")[0] + f"\n{row}\n"), message)


def test_mixed_offsets_are_refused(tmp_path):
    file = write(tmp_path, "a.csv", AZURE + "\n2023-11-17 00:00:00+00:00,1,1")
    check_refused("azure", file, r"a\.csv:5: .*expected an offset in all rows or in none")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a\.csv: the file is empty"),
        ("TIMESTAMP\n", "'ContextTokens' is missing; .*, found TIMESTAMP$"),
        ("2023-11-16 18:15:46,44,44\n", r"expected each name once; the first line has values: put the columns' names "),
        ("2023-11-16 18:15:46,374,44\n", r"found 2023-11-16 18:15:46, 374, 44; the first line has values: put the "),
        ("TIMESTAMP\tContextTokens\n", r"column 'GeneratedTokens' is missing; .* found TIMESTAMP, ContextTokens$"),
        ("TIMESTAMP,ContextTokens\n", r"a\.csv:1: column 'GeneratedTokens' is missing; expected .*found TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", r"a\.csv: no requests"),
    ],
)
def test_files_without_rows_are_refused(tmp_path, text, message):
    check_refused("azure", write(tmp_path, "a.csv", text), message)


def test_absent_files_and_folders_are_refused(tmp_path):
    absent = r"nowhere\.csv: does not exist; expected the path of a trace file"
    check_refused("azure", tmp_path / "nowhere.csv", absent)
    check_refused("azure", tmp_path, "is a folder; expected a file")
    check_refused("azure", "/dev/null", "/dev/null: is no plain file; expected the path of a trace file")
    check_refused("sharegpt", tmp_path / "nowhere.csv", absent)
    if Path("/proc/self/mem").is_file():  # its first page is nobody's
        check_refused("azure", "/proc/self/mem", "^/proc/self/mem: cannot be read: Input/output error$")


@pytest.mark.parametrize(
    ("form", "text", "lines"),
    [
        ("azure", AZURE, [2, 3, 4]),
        ("burstgpt", BURST + "5,M,7,1,8,x\n6,M,7,0,7,x\n6,M,7,1,8,x\n", [2, 4]),
        ("lengths", "num_prefill_tokens,num_decode_tokens\n74,918\n290,905\n", [2, 3]),
    ],
)
def test_lengths_alone_are_contents_of_their_own_from_their_first_token_on(tmp_path, form, text, lines):
    trace = read_trace(form, write(tmp_path, "a.csv", text))
    keys = [row.prompt[0].key for row in trace]
    assert len({*keys}) == len(lines)
    for row, key in zip(trace, keys, strict=True):
        num_prompt = row.num_prompt_tokens
        assert (row.prompt, row.output) == ((Span(key, 0, num_prompt),), Span(key, num_prompt, row.num_output_tokens))
    assert [(row.request_id, row.place.rpartition(":")[2]) for row in trace] == [
        (f"{form}-{i}", str(line)) for i, line in enumerate(lines)
    ]


def test_what_is_read_is_told_as_it_is_read(tmp_path):
    rows = "".join(f"\n2023-11-17 00:00:0{i % 10},1,1" for i in range(3996))
    chats = json.dumps([{"conversations": []}] * 9, indent=0)
    told = []
    with watching(told.append):
        read_trace("azure", write(tmp_path, "a.csv", AZURE + rows))
        list(json_items(write(tmp_path, "s.json", chats), "chats"))
    assert told == [2000, 2000, chats.count("\n")]
    read_trace("azure", tmp_path / "a.csv")
    assert len(told) == 3


# --- compression ---


def test_compressed_files_are_read(tmp_path):
    plain = read_trace("azure", write(tmp_path, "a.csv", AZURE))
    (tmp_path / "A.CSV.GZ").write_bytes(gzip.compress(AZURE.encode()))
    half = len(AZURE) // 2
    frames = [pa.compress(part.encode(), codec="zstd", asbytes=True) for part in (AZURE[:half], AZURE[half:])]
    (tmp_path / "a.csv.zst").write_bytes(b"".join(frames))
    assert fingerprint(read_trace("auto", tmp_path / "A.CSV.GZ")) == fingerprint(plain)
    assert fingerprint(read_trace("auto", tmp_path / "a.csv.zst")) == fingerprint(plain)


@pytest.mark.parametrize("name", ["a.csv.gz", "a.csv.zst"])
def test_damaged_compression_is_refused(tmp_path, name):
    text = AZURE + "".join(f"\n2023-11-17 00:00:0{i % 10},{i + 1},{i * i + 1}" for i in range(3000))
    packed = gzip.compress(text.encode()) if name.endswith("gz") else pa.compress(text.encode(), "zstd", asbytes=True)
    for damaged in (packed[: len(packed) // 2], b"this is no archive at all"):
        (tmp_path / name).write_bytes(damaged)
        check_refused("azure", tmp_path / name, rf"{name}:\d+: damaged compressed file")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    check_refused("azure", tmp_path / "a.csv", r"a\.csv:1: not UTF-8 text")


# --- BurstGPT ---


def test_burstgpt_leaves_failed_requests_out(tmp_path):
    rows = "5,ChatGPT,472,18,490,Conversation log\n45.5,ChatGPT,1087,0,1087,API log\n50,GPT-4,7,1,8,API log\n"
    trace = read_trace("burstgpt", write(tmp_path, "b.csv", BURST + rows))
    assert shape(trace) == [(0, 472, 18), (45 * 10**9, 7, 1)]
    assert trace.notes == ("1 failed request (0 response tokens) left out",)
    assert read_trace("burstgpt", tmp_path / "b.csv", limit=1).notes == ()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("nan,M,1,1,2,x\n", r"b\.csv:2: field 'Timestamp' is 'nan'; expected a number of seconds from 0 to 4,61"),
        ("inf,M,1,1,2,x\n", "field 'Timestamp' is 'inf'"),
        ("-1,M,1,1,2,x\n", "field 'Timestamp' is '-1'"),
        ("1e12,M,1,1,2,x\n", r"field 'Timestamp' is '1e12'; expected a number of seconds from 0 to 4,611,686,018"),
        ("\u0661,M,1,1,2,x\n", "field 'Timestamp' is '\u0661'"),
        ("1_0,M,1,1,2,x\n", "field 'Timestamp' is '1_0'"),
        ("1,M,0,1,2,x\n", "field 'Request tokens' is '0'"),
        ("1,M,1,-1,2,x\n", "field 'Response tokens' is '-1'"),
        ("1,M,1,0,2,x\n", "no requests; expected at least one that did not fail"),
        ("", "no requests; expected at least one that did not fail"),
    ],
)
def test_bad_burstgpt_rows_are_refused(tmp_path, rows, message):
    check_refused("burstgpt", write(tmp_path, "b.csv", BURST + rows), message)


# --- Mooncake ---


def moon(at: int, length: int, ids: list, out: int = 3) -> dict:
    return {"timestamp": at, "input_length": length, "output_length": out, "hash_ids": ids}


def test_equal_hash_ids_are_equal_tokens(tmp_path):
    text = json_lines(moon(1000, 1100, [4, 5, 6]), moon(1500, 1025, [4, 5, 7]), moon(1500, 512, [9]))
    trace = read_trace("mooncake", write(tmp_path, "m.jsonl", text))
    assert shape(trace) == [(0, 1100, 3), (500_000_000, 1025, 3), (500_000_000, 512, 3)]
    assert [row.place[-10:] for row in trace] == ["/m.jsonl:1", "/m.jsonl:2", "/m.jsonl:3"]
    first, second, third = (materialize(row.prompt, 50000) for row in trace)
    assert first[:1024] == second[:1024]
    assert first[1024:1025] != second[1024:]
    assert third[:512] != first[:512]


def test_batched_timestamps_are_spread_only_when_asked(tmp_path):
    text = json_lines(*(moon(at, 5, [i]) for i, at in enumerate((0, 0, 0, 3000, 3000))))
    file = write(tmp_path, "m.jsonl", text)
    assert [row.arrival_ns // 10**6 for row in read_trace("mooncake", file)] == [0, 0, 0, 3000, 3000]
    spread = read_trace("mooncake", file, spread_batches=True)
    assert [row.arrival_ns // 10**6 for row in spread] == [0, 1000, 2000, 3000, 4500]
    assert spread.notes == ("3 of 5 arrivals, batched in the file, were spread up to the next",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'timestamp': 0}", r"m\.jsonl:1: not JSON: .*; expected double quotes, as json\.dumps writes$"),
        ('{"timestamp": 0, "input_length": 5',
         r"m\.jsonl:1: not JSON: Expecting ',' delimiter at column 35; expected one whole object on each line"),
        ("{}", "field 'timestamp' is missing; found nothing$"),
        (json_lines(moon(0, 5, "a")), "field 'hash_ids' is 'a'; expected 1 ids"),
        (json_lines(moon(0, 5, "a" * 59)), r"field 'hash_ids' is 'a{27}\.\.\.a{28}'; expected 1 ids"),
        (json_lines(moon(0, 5, "a" * 58)), r"field 'hash_ids' is 'a{58}'; expected 1 ids"),
        ("[1]\n", r"m\.jsonl:1: found a JSON list; expected one object"),
        ("\n\n", r"m\.jsonl: no requests"),
        ('{"timestamp": 0}\n', r"m\.jsonl:1: field 'input_length' is missing; found timestamp"),
        (
            json_lines(moon(0, 1024, [1])),
            r"field 'hash_ids' is 'a list of 1'; expected 2 ids, one for each block of 512",
        ),
        (json_lines(moon(0, 5, ["a"])), "field 'hash_ids' is 'a'; expected whole numbers"),
        (json_lines(moon(0, 5, [10**30])), r"hash_ids' is 10+; expected whole numbers from -2\*\*63 to 2\*\*64"),
        (json_lines(moon(-1, 5, [1])), "field 'timestamp' is -1; expected whole milliseconds"),
        (json_lines(moon(0, 5, [1], 0)), "field 'output_length' is 0"),
        (json_lines(moon(0, True, [1])), "field 'input_length' is True"),
    ],
)  # fmt: skip
def test_bad_mooncake_rows_are_refused(tmp_path, text, message):
    check_refused("mooncake", write(tmp_path, "m.jsonl", text), message)


# --- ShareGPT ---


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def test_sharegpt_turns_hold_what_was_said_before(tmp_path):
    def said(*values):
        return [{"from": ("human", "gpt")[i % 2], "value": value} for i, value in enumerate(values)]

    chats = [
        {"id": "a", "conversations": said("a bb", "ccc", "dddd", "eeeee")},
        {"id": "b", "conversations": said("only a question")},
        {"id": "no tokens", "conversations": said(" ", "yy")},
        {"id": "c", "conversations": [{"from": "system", "value": "s"}, *said("x", "yy")]},
    ]
    file = write(tmp_path, "s.json", json.dumps(chats, indent=1))
    trace = read_trace("sharegpt", file, tokenizer=words)
    prompts = [materialize(row.prompt, 9).tolist() for row in trace if row.session_id == "sharegpt-0"]
    assert prompts == [[1, 2], [1, 2, 3, 4]]
    assert [row.think_ns for row in trace if row.session_id == "sharegpt-0"] == [None, 0]
    assert len(trace) == 3
    assert {row.arrival_ns for row in trace} == {0}
    assert [row.place.rpartition(":")[2] for row in trace] == [*["conversation 1"] * 2, "conversation 4"]
    assert trace.notes == ("2 conversations without a question and its answer left out",)
    assert tuple(open_trace("sharegpt", file, 2, stream=True, tokenizer=words)) == trace.rows
    assert len(read_trace("sharegpt", file, tokenizer=words, max_turns=1)) == 2
    stream = open_trace("sharegpt", file, stream=True, tokenizer=words)
    assert isinstance(stream, StreamedTrace)
    assert tuple(stream) == trace.rows
    assert tuple(open_trace("sharegpt", file, 1, stream=True, tokenizer=words)) == trace.rows[:2]


def test_sharegpt_ends_a_conversation_where_the_alternation_does(tmp_path):
    """H: a human's text, G: the model's, s: another's; in lower case without a token."""
    said = {"H": ("user", "q"), "h": ("human", " "), "G": ("bing", "a"), "g": ("gpt", ""), "s": ("system", "s")}
    num_turns = {"HG": 1, "HH": 0, "GG": 0, "Hs": 0, "GHG": 1, "sHG": 1, "ssHG": 0, "hG": 0, "Hg": 0, "HGHH": 1,
                 "HGsG": 1, "HGHgHG": 1, "HGhGHG": 1, "HGH": 1, "HGHGHG": 3, "G": 0}  # fmt: skip
    chats = [
        {"conversations": [dict(zip(("from", "value"), said[one], strict=True)) for one in chat]} for chat in num_turns
    ]
    trace = read_trace("sharegpt", write(tmp_path, "s.json", json.dumps(chats)), tokenizer=words)
    ids = [row.session_id for row in trace]
    assert [ids.count(f"sharegpt-{i}") for i in range(len(chats))] == [*num_turns.values()]
    file = write(tmp_path, "s.json", json.dumps(chats[1:]))
    for limit in (1, 2):
        assert len(read_trace("sharegpt", file, limit, tokenizer=words)) == limit, "conversations left out do not count"
    assert read_trace("sharegpt", write(tmp_path, "s.json", json.dumps(chats[:1])), tokenizer=words).notes == ()


@pytest.mark.parametrize("size", [3, 1 << 20])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{", r"s\.json:1: item 1 is not JSON"),
        ("{}", "found a JSON object; expected a list of conversations"),
        ("", "found nothing; expected a list of conversations"),
        ("\n\n 7\n", r"s\.json:3: found '7'; expected a list of conversations"),
        ("[]", "no requests; expected a conversation with a question and its answer"),
        ("[] []", "not JSON: found '\\[' after the list"),
        ('[{"conversations": []}\n{}]', r"s\.json:2: not JSON: found '{' after an item; expected a list"),
        ('[{"conversations": []}', r"the list does not end; expected a list"),
        ('[{"conversations": []},\n{"conversations":\n [}]', r"s\.json:3: item 2 is not JSON: Expecting value"),
        ('[{"conversations": []},\n{"conversations":\n []}\n, 5]', r"conversation 3: found a JSON int"),
        ('[{"conversations": []},\n{"conversations": "',
         r"s\.json:2: item 2 is not JSON: Unterminated string; expected"),
        ("[" * 3000, "item 1 is not JSON"),
        ("[5]", r'conversation 1: found a JSON int; expected \{"id", "conversations"\}'),
        ('[{"conversations": 5}]', r"conversation 1: field 'conversations' is 5; expected a list of"),
        ('[{"conversations": [5]}]', r"conversation 1: field 'conversations' is 5; expected {"),
        ('[{"id": 1}]', r"conversation 1: field 'conversations' is missing; found id"),
        ('[{"conversations": [{"from": "human"}]}]', "field 'conversations' is {'from': 'human'}; expected"),
    ],
)  # fmt: skip
def test_bad_sharegpt_files_are_refused(tmp_path, monkeypatch, text, message, size):
    monkeypatch.setattr(json_list, "read_pieces", lambda path: read_pieces(path, size))
    check_refused("sharegpt", write(tmp_path, "s.json", text), message, tokenizer=words)


@settings(max_examples=60)
@given(
    st.lists(
        st.recursive(
            st.none() | st.booleans() | st.integers(-9, 10**30) | st.floats(allow_nan=False) | st.text(max_size=9),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        ).filter(lambda value: isinstance(value, dict | list | str)),
        max_size=6,
    ),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.integers(1, 40),
)
def test_the_items_of_a_list_are_found_wherever_the_file_is_cut(tmp_path_factory, items, indent, ascii_only, size):
    file = tmp_path_factory.mktemp("json") / "s.json"
    file.write_text(json.dumps(items, indent=indent, ensure_ascii=ascii_only), encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_list, "read_pieces", lambda path: read_pieces(path, size))
        assert list(json_items(file, "items")) == items


@pytest.mark.parametrize("num", [5, 950, 970, 985, 10_000])
def test_deep_nests_are_named_and_not_a_traceback(tmp_path, num):
    deep = "[" * num + "]" * num
    row = '{"timestamp": 0, "input_length": 5, "output_length": 5, "x": "\\u0041", "hash_ids": [' + deep + "]}"
    check_refused("mooncake", write(tmp_path, "m.jsonl", row), r"m\.jsonl:1: ")
    file = write(tmp_path, "s.json", f"[{deep}]")
    check_refused("sharegpt", file, r"conversation 1: |item 1 is not JSON", tokenizer=words)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"request_id": "a\\ud800", "arrival_time": 0, "prompt_tokens": 1}'),
        ("a.jsonl", '{"arrival_time": 0, "prompt_tokens": 1, "tenant": "t\\udc01"}'),
        ("q.jsonl", json.dumps({"chat_id": 1, "parent_chat_id": -1, "type": "\ud83d", "hash_ids": []})),
    ],
)
def test_half_a_character_is_a_bad_row(tmp_path, name, text):
    form = "bailian" if name == "q.jsonl" else "auto"
    check_refused(form, write(tmp_path, name, text), rf"{name}:1: half a character, \\ud.*; expected whole ones")


def test_half_a_character_in_a_conversation_is_named(tmp_path):
    chats = [{"conversations": [{"from": "human", "value": "a \ud83d\ude00"}, {"from": "gpt", "value": "Hi \ud83d"}]}]
    file = write(tmp_path, "s.json", json.dumps(chats))
    check_refused("sharegpt", file, r"conversation 1: half a character, \\ud83d, after 'Hi '", tokenizer=words)
    chats[0]["conversations"][1]["value"] = "Hi \ud83d\ude00"
    assert len(read_trace("sharegpt", write(tmp_path, "s.json", json.dumps(chats)), tokenizer=words)) == 1


def test_lengths_are_not_guessed_without_a_tokenizer(tmp_path):
    said = r"counts are not guessed; set trace\.tokenizer .*convert sharegpt <file>"
    check_refused("sharegpt", write(tmp_path, "s.json", "[]"), said)


# --- the door to all of them ---


def test_formats_are_found_by_name(tmp_path):
    assert len(read_trace("azure", write(tmp_path, "a.csv", AZURE), limit=1)) == 1
    check_refused("azzure", tmp_path, r"unknown trace format 'azzure'; did you mean 'azure'\? choose one of azure")
    check_refused("azure", tmp_path, r"trace\.limit is 0; it must be at least 1", limit=0)


# --- the published files, where the user has them ---


def test_the_azure_file_of_2023_is_read_whole():
    trace = read_trace("azure", published("azure_llm_2023_conv.csv"))
    assert len(trace) == 19_366
    assert trace.rows[-1].arrival_ns == 3_501_721_937_000


def test_the_mooncake_file_shares_as_much_as_its_ids():
    trace = read_trace("mooncake", published("mooncake_fast25_conversation.jsonl.gz"))
    seen: set = set()
    total = hits = 0
    for row in trace:
        for span in row.prompt:
            total += span.length
            hits += span.length if span in seen else 0
            seen.add(span)
    assert len(trace) == 12_031
    assert hits / total == pytest.approx(0.37, abs=0.01)
