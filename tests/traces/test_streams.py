"""A streamed trace is the whole trace, row for row; the inbox serves both alike, and holds only what is live."""

import io
from heapq import heappop, heappush

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.core.commands import Abort
from testbed.core.outcome import Finished, FinishReason
from testbed.errors import TraceError
from testbed.traces.fingerprint import fingerprint
from testbed.traces.generator_config import AgentConfig, FewShotConfig, RagConfig
from testbed.traces.generators import LengthConfig, SyntheticConfig, generate, stream_generated
from testbed.traces.inbox import READ_AHEAD, TraceInbox
from testbed.traces.readers import open_trace, read_trace
from testbed.traces.schema import Span, Trace, TraceRequest
from testbed.traces.stream import CountedTrace, OutOfOrderError, StreamedTrace, whole

SHORT = LengthConfig("uniform", min_tokens=1, max_tokens=20)


def with_one_each(num_requests, tenants, **more):
    """At least a request for each tenant."""
    return SyntheticConfig(num_requests=max(num_requests, len(tenants)), tenants=tenants, **more)


configs = st.builds(
    with_one_each, num_requests=st.integers(1, 60), arrival=st.sampled_from(SyntheticConfig.KINDS),
    rate=st.sampled_from([0.1, 2.0, 100.0]), num_users=st.integers(1, 7), prompt=st.just(SHORT), output=st.just(SHORT),
    max_turns=st.integers(1, 4), closed_loop=st.booleans(), think_time_s=st.sampled_from([0.0, 1.0, 30.0]),
    max_session_tokens=st.sampled_from([None, 120]), num_system_prompts=st.integers(0, 2),
    system_prompt_tokens=st.just(9), few_shot=st.sampled_from([FewShotConfig(), FewShotConfig(2, 2, SHORT)]),
    rag=st.sampled_from([RagConfig(), RagConfig(5, 2, SHORT)]),
    agent=st.sampled_from([AgentConfig(), AgentConfig(0, 3, SHORT, SHORT)]), num_tenants=st.integers(0, 2),
    tenants=st.sampled_from([(), ({"name": "a", "share": 2, "max_turns": 3}, {"name": "b", "closed_loop": False})]),
)  # fmt: skip


@given(configs, st.integers(0, 3))
def test_a_generated_stream_has_the_rows_of_the_whole_trace(config, seed):
    stream = stream_generated(config, seed)
    trace = generate(config, seed)
    assert tuple(stream) == trace.rows
    assert tuple(stream) == trace.rows, "it can be gone through again"
    counted = CountedTrace(stream)
    assert counted.fingerprint is None
    assert len(list(counted)) == counted.num_requests == len(trace)
    assert counted.fingerprint == fingerprint(trace)


def serve(trace, durations, reasons):
    """What an inbox delivers to a server that takes durations[k] ns for its k-th request."""
    box = TraceInbox(trace, 100)
    live: list = []
    requests: dict = {}
    log = []
    now = num = 0
    while True:
        instants = [at for at in (box.next_ns(), live[0][0] if live else None) if at is not None]
        if not instants:
            break
        now = max(now, min(instants))
        while live and live[0][0] <= now:
            _, k, request = heappop(live)
            if request.request_id in requests:
                del requests[request.request_id]
                box.finished([Finished(request, reasons[k % len(reasons)], "", 1, ())], now)
        for event in box.due(now):
            if isinstance(event, Abort):
                request = requests.pop(event.request_id)
                box.finished([Finished(request, FinishReason.ABORT, "", 0, ())], now)
                log.append((now, "abort", event.request_id))
                continue
            log.append((now, event.request))
            requests[event.request.request_id] = event.request
            heappush(live, (now + durations[num % len(durations)], num, event.request))
            num += 1
        box.check_invariants()
    assert not box._rows
    assert not box._ahead
    return log, sorted(box._unsent)


@given(
    configs,
    st.lists(st.integers(1, 10**10), min_size=1, max_size=9),
    st.lists(st.sampled_from([*[FinishReason.LENGTH] * 6, FinishReason.IGNORED, FinishReason.ABORT]), min_size=1),
)
def test_the_inbox_serves_a_stream_as_it_serves_the_whole_trace(config, durations, reasons):
    counted = CountedTrace(stream_generated(config, 1))
    trace = generate(config, 1)
    assert serve(counted, durations, reasons) == serve(trace, durations, reasons)
    assert counted.fingerprint == fingerprint(trace), "read to its end"


@pytest.mark.parametrize(
    ("more", "at_most"),
    [({}, 2 * READ_AHEAD), ({"max_turns": 4}, 400), ({"arrival": "closed_loop", "num_users": 8}, 200)],
)
def test_memory_follows_what_is_live_and_not_the_trace(more, at_most):
    config = SyntheticConfig(num_requests=5000, rate=10.0, prompt=SHORT, output=SHORT, think_time_s=1.0, **more)
    box = TraceInbox(stream_generated(config, 1), 100)
    now, peak, live = 0, 0, []
    while live or box.next_ns() is not None:
        wake = box.next_ns()
        now = live[0][0] if live and (wake is None or live[0][0] <= wake) else wake
        while live and live[0][0] <= now:
            box.finished([Finished(heappop(live)[2], FinishReason.LENGTH, "", 1, ())], now)
        for number, event in enumerate(box.due(now)):
            heappush(live, (now + 2 * 10**9, box._num_delivered + number / 1e6, event.request))
        peak = max(peak, len(box._rows) + len(box._ahead) + len(box._last_turn) + len(box._heads))
    assert box._num_delivered == 5000
    assert peak <= at_most


def row(name, at, **more):
    return TraceRequest(name, at, (Span(1, 0, 5),), Span(1, 5, 2), **more)


def test_a_stream_out_of_order_is_refused_where_it_goes_back():
    stream = StreamedTrace("x", lambda: iter([row("a", 5, place="f:1"), row("b", 4, place="f:2")]))
    with pytest.raises(
        OutOfOrderError, match=r"f:2: the row arrives at 4e-09 s, before .*; expected rows in order of arrival$"
    ):
        list(stream)
    assert [r.request_id for r in whole(Trace("x", (row("a", 5),)))] == ["a"]


def test_a_stream_without_rows_says_what_was_done_to_it():
    with pytest.raises(TraceError, match=r"'x' has no requests; expected at least one \(after: cut\)"):
        list(StreamedTrace("x", lambda: iter(()), ("cut",)))


def test_a_closed_loop_turn_away_from_the_turn_before_is_refused():
    rows = [row("a", 0, session_id="s", turn=0), row("b", 9, session_id="s", turn=1, think_ns=1)]
    box = TraceInbox(StreamedTrace("x", lambda: iter(rows)), 10)
    with pytest.raises(TraceError, match="closed-loop turn 1 of 's' does not follow the turn before it"):
        box.due(10)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{i // 60:02}:{i % 60:02}.5,{i + 1},{i + 2}\n" for i in range(300)
)
BURST = "Timestamp,Request tokens,Response tokens\n" + "".join(f"{i / 7},{i + 1},{i % 3}\n" for i in range(50))
MOON = "".join(
    f'{{"timestamp": {i * 50}, "input_length": {600 + i}, "output_length": 3, "hash_ids": [1, {i}]}}\n'
    for i in range(50)
)
LENGTHS = "num_prefill_tokens,num_decode_tokens,num_total_tokens\n" + "".join(
    f"{i},{i},{i + i}\n" for i in range(1, 50)
)


BAILIAN = "".join(
    f'{{"chat_id": {i}, "parent_chat_id": {max(-1, i - 3) if i % 2 else -1}, "timestamp": {5 + i / 4},'
    f' "input_length": 40, "output_length": 3, "type": "text", "hash_ids": [1, {i}, 7]}}\n'
    for i in range(50)
)
OWN_CSV = "request_id,arrival_time,prompt_tokens,output_tokens,session_id,turn,colour\n" + "".join(
    f"r{i},{i / 2},{9 + i},4,s{i % 7},{i // 7 + 3},red\n" for i in range(50)
)
OWN_JSONL = "".join(
    f'{{"arrival_time": {i}, "prompt_tokens": {20 + i}, "output_tokens": 3, "session_id": "s{i}", "turn": 0}}\n'
    f'{{"think_time": 1.5, "prompt_tokens": {30 + i}, "output_tokens": 3, "session_id": "s{i}", "turn": 1}}\n'
    for i in range(25)
)
FILES = [
    ("azure", AZURE),
    ("burstgpt", BURST),
    ("mooncake", MOON),
    ("lengths", LENGTHS),
    ("bailian", BAILIAN),
    ("csv", OWN_CSV),
    ("parquet", OWN_CSV),
    ("jsonl", OWN_JSONL),
]


@pytest.mark.parametrize(("name", "text"), FILES)
def test_files_are_the_same_read_whole_and_row_by_row(tmp_path, name, text):
    file = tmp_path / "trace"
    if name == "parquet":
        pd.read_csv(io.StringIO(text)).to_parquet(file)
    else:
        file.write_text(text)
    for limit in (None, 20):
        stream = open_trace(name, file, limit, stream=True)
        assert isinstance(stream, StreamedTrace)
        assert tuple(stream) == read_trace(name, file, limit).rows


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["0,5,x,1", "1,5,x,3"], r"a\.csv:3: turn 3 of session 'x' follows turn 1; .*; set trace\.stream=false"),
        (["1,5,x,2", "2,5,x,1"], r"a\.csv:3: turn 1 of session 'x' follows turn 2"),
        (["0,5,,", "1,0,,"], r"a\.csv:3: field 'prompt_tokens' is '0'"),
        (["0,5,x,1", "1,5,x,"], r"a\.csv:3: field 'turn' is absent; expected it beside 'session_id' in all rows"),
        (["0,5,x,", "1,5,y,1"], r"a\.csv:3: field 'turn' is given; expected it beside 'session_id' in all rows"),
        (
            ["1,5,x,", "0,5,x,"],
            r"a\.csv:3: a row of session 'x' follows one that .*; set trace\.stream=false",
        ),
        ([], "no requests; expected at least one row"),
    ],
)
def test_rows_of_ours_are_checked_in_a_stream_as_well(tmp_path, lines, message):
    file = tmp_path / "a.csv"
    file.write_text("\n".join(["arrival_time,prompt_tokens,session_id,turn", *lines]))
    with pytest.raises(TraceError, match=message):
        list(open_trace("csv", file, stream=True))


def test_an_id_that_is_used_twice_is_refused_in_a_stream(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"request_id": "a", "arrival_time": 0, "prompt_tokens": 1}\n' * 2)
    with pytest.raises(TraceError, match=r"a\.jsonl:2: field 'request_id' is 'a'; expected an id not used before"):
        list(open_trace("auto", tmp_path / "a.jsonl", stream=True))
    (tmp_path / "q.jsonl").write_text(BAILIAN + BAILIAN.splitlines()[-1])
    for stream in (False, True):
        with pytest.raises(TraceError, match=r"q\.jsonl:51: field 'chat_id' is 49; expected an id not used before"):
            list(open_trace("bailian", tmp_path / "q.jsonl", stream=stream))


@pytest.mark.parametrize("cut", [{"end_s": 5.0}, {"transforms": [{"name": "limit", "num_requests": 2}]}])
def test_a_cut_stream_of_a_file_out_of_order_is_refused_before_it_is_used(tmp_path, cut):
    """What is behind the cut may belong before it: nobody would know."""
    file = tmp_path / "a.csv"
    file.write_text("arrival_time,prompt_tokens,output_tokens\n" + "".join(f"{at},5,1\n" for at in (1, 2, 9, 3, 4)))
    keys = {"path": str(file), "name": "csv", **cut}
    assert simulated_trace(keys).num_requests == (4 if "end_s" in cut else 2)
    with pytest.raises(OutOfOrderError, match=r"a\.csv:5: the row arrives at 3\.0 s, before the one before it at 9"):
        simulated_trace({**keys, "stream": True})


def simulated_trace(keys):
    from experiments.configuration.compose import compose_config, to_overrides
    from experiments.wiring.traces import build_source

    return build_source(compose_config(to_overrides({"trace": keys})))


def test_a_large_file_of_ours_with_turns_out_of_order_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("testbed.traces.readers.MAX_WHOLE_BYTES", 100)
    file = tmp_path / "a.jsonl"
    file.write_text(OWN_JSONL)
    assert isinstance(open_trace("auto", file), StreamedTrace)
    lines = OWN_JSONL.splitlines()
    file.write_text("\n".join([*lines[:2], lines[3], lines[2], *lines[4:]]))
    found = open_trace("auto", file)
    assert isinstance(found, Trace)
    assert [(row.session_id, row.turn) for row in found][2:4] == [("s1", 0), ("s1", 1)]


def test_a_large_file_out_of_order_is_read_whole_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("testbed.traces.readers.MAX_WHOLE_BYTES", 100)
    head, *lines = AZURE.splitlines()
    file = tmp_path / "a.csv"
    file.write_text(AZURE)
    stream = open_trace("azure", file)
    assert isinstance(stream, StreamedTrace)
    assert stream.num_requests == 300
    file.write_text("\n".join([head, *lines[1:5], lines[0], *lines[5:]]))
    trace = open_trace("azure", file)
    assert isinstance(trace, Trace)
    assert trace.notes == ("1 row out of order, sorted by arrival",)
    with pytest.raises(OutOfOrderError, match=r"a\.csv:6"):
        list(open_trace("azure", file, stream=True))
