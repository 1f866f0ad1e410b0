"""A frozen trace is read back exactly, whole or row by row, and a file that was changed is refused."""

import json

import pyarrow.parquet as pq
import pytest

from testbed.errors import TraceError
from testbed.traces.fingerprint import fingerprint
from testbed.traces.frozen import freeze_trace, frozen_info
from testbed.traces.generators import SyntheticConfig, generate, stream_generated
from testbed.traces.readers import open_trace, read_trace
from testbed.traces.schema import Trace
from testbed.traces.serialize import write_jsonl
from testbed.traces.stream import StreamedTrace, whole
from testbed.traces.transforms import scale_rate
from tests.traces.kit import check_refused

CHAT = SyntheticConfig(num_requests=70, max_turns=4, num_system_prompts=2, num_tenants=2)


@pytest.mark.parametrize("arrival", ["poisson", "closed_loop"])
def test_a_frozen_trace_keeps_rows_name_notes_and_fingerprint(tmp_path, arrival):
    source = scale_rate(stream_generated(SyntheticConfig(num_requests=70, max_turns=3, arrival=arrival), 3), 2.0)
    info = freeze_trace(source, tmp_path / "t.parquet")
    assert frozen_info(tmp_path / "t.parquet") == info
    trace = read_trace("parquet", tmp_path / "t.parquet")
    told = "arrival rate x 2"
    if arrival == "closed_loop":
        told += ", which changes nothing: all requests but closed-loop turns arrive at 0"
    assert (trace.name, trace.notes, fingerprint(trace)) == ("synthetic", (told,), info.fingerprint)
    assert info.fingerprint == fingerprint(source)
    stream = open_trace("parquet", tmp_path / "t.parquet", stream=True)
    assert isinstance(stream, StreamedTrace)
    assert (stream.num_requests, stream.closed_tail) == (70, arrival == "closed_loop")
    assert tuple(stream) == trace.rows
    assert len(read_trace("parquet", tmp_path / "t.parquet", limit=10)) == 10


def test_a_frozen_file_that_was_changed_is_refused(tmp_path):
    file = tmp_path / "t.parquet"
    freeze_trace(generate(CHAT, 3), file)
    table = pq.read_table(file)
    pq.write_table(table.slice(1), file)
    check_refused("parquet", file, r"t\.parquet: 69 requests with fingerprint .* but 70 with .* were frozen")
    with pytest.raises(TraceError, match="freeze the trace again"):
        list(open_trace("parquet", file, stream=True))
    said = json.loads(table.schema.metadata[b"testbed.trace"])
    wrong = {
        "num_requests": ("70", 0, True),
        "fingerprint": (7,),
        "closed_tail": (1,),
        "notes": ("abc",),
        "name": (None,),
    }
    damaged = [json.dumps({**said, key: value}) for key, values in wrong.items() for value in values]
    for text in (*damaged, "[" * 100_000, "{"):
        pq.write_table(table.replace_schema_metadata({b"testbed.trace": text.encode()}), file)
        check_refused("parquet", file, "its metadata is damaged")
    fewer = json.dumps({**said, "num_requests": 69}).encode()
    pq.write_table(table.replace_schema_metadata({b"testbed.trace": fewer}), file)
    check_refused("parquet", file, r"70 requests with fingerprint (\w+), but 69 with \1 were frozen")
    pq.write_table(table.replace_schema_metadata(None), file)
    trace = read_trace("parquet", file)  # our own schema, no longer frozen
    assert trace.name == "parquet"
    assert "metadata is gone, so it was not checked" in trace.notes[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_frozen_file_out_of_order_was_changed_however_it_is_read(tmp_path, stream):
    file = tmp_path / "t.parquet"
    freeze_trace(generate(SyntheticConfig(num_requests=9), 3), file)
    table = pq.read_table(file)
    pq.write_table(table.take([0, 2, 1, *range(3, 9)]), file)
    with pytest.raises(TraceError, match=r"t\.parquet:3: the row arrives before .* freeze the trace again$"):
        whole(open_trace("parquet", file, stream=stream))


def test_what_a_limit_leaves_unchecked_is_said(tmp_path):
    file = tmp_path / "t.parquet"
    freeze_trace(generate(CHAT, 3), file)
    told = "the first 69 of 70 frozen requests, not checked against their fingerprint"
    for read in (read_trace, lambda *given, **more: open_trace(*given, stream=True, **more)):
        assert read("parquet", file, limit=69).notes == (told,)
        assert read("parquet", file, limit=70).notes == read("parquet", file, limit=71).notes == ()
    table = pq.read_table(file)
    doubled = table.set_column(3, "prompt_tokens", table.column("prompt_tokens")).to_pandas()
    doubled.loc[0, "priority"] = 7  # what nothing but the fingerprint can tell
    changed = table.schema.empty_table().from_pandas(doubled, schema=table.schema)
    pq.write_table(changed, file)
    assert len(read_trace("parquet", file, limit=69)) == 69
    for limit in (70, 71):
        check_refused("parquet", file, "freeze the trace again", limit=limit)
    pq.write_table(table.slice(0, 60), file)
    check_refused("parquet", file, "60 requests with fingerprint", limit=65)


def test_a_freeze_that_fails_leaves_no_file(tmp_path):
    def broken():
        yield from generate(CHAT, 1).rows[:5]
        raise TraceError("the disk fell out")

    with pytest.raises(TraceError, match="fell out"):
        freeze_trace(StreamedTrace("x", broken), tmp_path / "t.parquet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a\nb", "a\rb", " a", "a\t"])
def test_a_name_is_kept_whatever_it_is(tmp_path, name):
    row = next(iter(generate(CHAT, 1).rows))
    for field in ("request_id", "tenant", "session_id", "cache_salt"):
        trace = Trace("x", (row._replace(**{field: name}),))
        write_jsonl(trace, tmp_path / "t.jsonl")
        assert fingerprint(read_trace("jsonl", tmp_path / "t.jsonl")) == fingerprint(trace)
