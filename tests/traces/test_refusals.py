"""What no clock or memory holds, and what a file says twice, is refused at once, with its place."""

from __future__ import annotations

import gzip
from functools import partial
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest

from testbed.errors import ConfigError, TraceError
from testbed.traces import transforms
from testbed.traces.arrange import arrange
from testbed.traces.generators import SyntheticConfig, generate, stream_generated
from testbed.traces.readers import READERS, open_trace, read_trace
from testbed.traces.readers.own_rows import FOREIGN
from testbed.traces.schema import MAX_NS, Span, Trace, TraceRequest
from testbed.traces.stream import StreamedTrace, whole
from tests.traces.kit import S, check_refused, plain, write

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
FORMS = ("a", "a.gz", "a.zst")


def write_lines(folder: Path, name: str, *lines: str) -> Path:
    return write(folder, name, "\n".join(lines) + "\n")


def streamed(trace: Trace) -> StreamedTrace:
    return StreamedTrace(trace.name, lambda: iter(trace), (), trace.num_requests)


@pytest.mark.parametrize("stream", [False, True])
def test_rows_centuries_apart_are_refused_with_their_place(tmp_path: Path, stream: bool) -> None:
    file = write_lines(tmp_path, "a.csv", HEADER, "1700-11-16 18:15:46.68,3,4", "2023-11-16 18:15:46.68,3,4")
    with pytest.raises(TraceError, match=r"a\.csv:3: the request arrives at 1\.019e\+10 s; expected at most 4,6"):
        whole(open_trace("azure", file, stream=stream))


def test_no_maker_of_traces_goes_beyond_the_clock() -> None:
    late = TraceRequest("r", MAX_NS + 1, (Span(1, 0, 8),), Span(1, 8, 4), place="f:7")
    for make in (lambda: arrange("x", [late]), lambda: list(StreamedTrace("x", lambda: iter([late])))):
        with pytest.raises(TraceError, match=r"f:7: the request arrives at 4\.612e\+09 s; expected at most 4,611"):
            make()
    far = plain(0, MAX_NS / 2 / S)
    for trace in (far, streamed(far)):
        with pytest.raises(TraceError, match="expected at most 4,611"):
            list(transforms.repeat(trace, 4))
    config = SyntheticConfig(num_requests=50, min_turns=50, max_turns=50, closed_loop=False, think_time_s=1e9)
    with pytest.raises(TraceError, match="expected at most 4,611"):
        generate(config, 1)


def test_a_servegen_window_that_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    write_lines(tmp_path, "chunk-0-dataset.json", '{"0": {"input_tokens": "{1: 1}", "output_tokens": "{1: 1}"}}')
    write_lines(tmp_path, "chunk-0-trace.csv", "0,1e9,1,Gamma,1,1")
    check_refused("servegen", tmp_path, r"csv:1: field 'rate' is 1000000000\.0; expected at most 16666\.7", limit=5)
    write_lines(tmp_path, "chunk-0-trace.csv", "0,0,1,Gamma,1,1", "4611686018,0,1,Gamma,1,1")
    check_refused("servegen", tmp_path, "csv:2: field 'start' is 4611686018; expected at most 0", limit=5)


def test_results_that_no_memory_holds_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"times is 1000000000; it must be at most 5,000,000, for 2 requests"):
        transforms.repeat(plain(0, 1), 10**9)
    with pytest.raises(ConfigError, match=r"times is 1000000000; it must be at most 500,000,000"):
        transforms.repeat(streamed(plain(0, 1)), 10**9)
    with pytest.raises(ConfigError, match=r"num_requests is 10000000000; it must be at most 1,000,000,000"):
        SyntheticConfig(num_requests=10**10)
    with pytest.raises(ConfigError, match="has 1,000,000,000 requests; at most 10,000,000 are held in memory"):
        generate(SyntheticConfig(num_requests=10**9))
    for key, least in (("max_turns", 1), ("num_system_prompts", 0), ("num_tenants", 0)):
        with pytest.raises(ConfigError, match=f"{key} is 100000000; it must be {least} to 10,000,000"):
            SyntheticConfig(**{key: 10**8})  # type: ignore[arg-type]  # all of them whole numbers
    long = stream_generated(SyntheticConfig(num_requests=10**9))
    assert len(list(islice(transforms.repeat(long, 1), 3))) == 3


@pytest.mark.parametrize("name", FORMS)
def test_the_line_that_is_no_text_is_named(tmp_path: Path, name: str) -> None:
    rows = [f"2023-11-16 18:{i // 60 % 60:02}:{i % 60:02}.5,3,4" for i in range(1999)]
    raw = "\n".join([HEADER, *rows]).encode() + b"\n2023-11-16 19:00:00.5,3,\xff\n"
    pack = {"a": bytes, "a.gz": gzip.compress, "a.zst": partial(pa.compress, codec="zstd", asbytes=True)}[name]
    (tmp_path / name).write_bytes(pack(raw))
    check_refused("azure", tmp_path / name, f"{name}:2001: not UTF-8 text")


def test_what_a_file_says_twice_is_refused(tmp_path: Path) -> None:
    file = write_lines(tmp_path, "a.csv", HEADER + ",ContextTokens", "2023-11-16 18:15:46.68,3,4,5")
    check_refused("azure", file, r"a\.csv:1: column 'ContextTokens' occurs twice; expected each name once")
    write_lines(tmp_path, "b.csv", HEADER + ",,", "2023-11-16 18:15:46.68,3,4,,")
    assert len(read_trace("azure", tmp_path / "b.csv")) == 1, "columns without a name"
    row = '{"arrival_time": 1, "prompt_tokens": 3, "output_tokens": 2}'
    file = write_lines(tmp_path, "a.jsonl", row, row[:-1] + ', "prompt_tokens": 4}')
    check_refused("jsonl", file, r"a\.jsonl:2: field 'prompt_tokens' occurs twice; expected each name once")


CHAT = (
    '{"chat_id": 7, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 20, "output_length": 4, "type": "text", '
    '"turn": 1, "hash_ids": [1, 2]}'
)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("azure.csv", (HEADER, "2023-11-16 18:15:46.68,3,4")),
        ("burstgpt.csv", ("Timestamp,Model, Request tokens ,Response tokens", "1,m,3,4")),
        ("lengths.csv", ("num_prefill_tokens,num_decode_tokens", "3,4")),
        ("mooncake.jsonl", ('{"timestamp": 0, "input_length": 3, "output_length": 4, "hash_ids": [1]}',)),
        ("bailian.jsonl", (CHAT,)),
        ("jsonl.jsonl", ('{"arrival_time": 0, "prompt_tokens": 3, "timestamp": 0, "hash_ids": [1]}',)),
    ],
)
def test_auto_is_what_the_names_say(tmp_path: Path, name: str, lines: tuple[str, ...]) -> None:
    file = write_lines(tmp_path, name, *lines)
    assert read_trace("auto", file).name == open_trace("auto", file).name == name.partition(".")[0]


def test_auto_knows_every_format_by_its_names_but_those_of_archives() -> None:
    assert {*READERS} - {*FOREIGN} == {"servegen", "agentic", "jsonl", "csv", "parquet"}
