"""ServeGen, lengths and agentic sessions: draws are reproducible, what is given is exact, bad rows are refused."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from testbed.errors import ConfigError
from testbed.traces.arrivals import ArrivalConfig
from testbed.traces.fingerprint import fingerprint
from testbed.traces.readers import read_trace
from testbed.traces.readers.agentic import stream_agentic
from testbed.traces.readers.servegen import stream_servegen
from testbed.traces.schema import Span
from testbed.traces.stream import whole
from testbed.traces.synthesis import materialize
from tests.traces.kit import S, check_refused, published, write


def archive(path: Path, files: dict[str, str]) -> Path:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz" if path.name.endswith("gz") else "w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode("utf-8", "surrogateescape"))
            member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            tar.addfile(member, io.BytesIO(text.encode("utf-8", "surrogateescape")))
    raw = buffer.getvalue()
    path.write_bytes(pa.compress(raw, codec="zstd", asbytes=True) if path.name.endswith("zst") else raw)
    return path


# --- ServeGen ---

WINDOWS = "0,0.5,1.2,Gamma,0.69,2.9\n600,0,0,,0,0\n1200,0.25,2.0,Weibull,0.6,3\n"


def dataset(inputs: str = "{10: 0.5, 20: 0.5}", outputs: str = "{3: 1.0}") -> str:
    return json.dumps({"0": {"input_tokens": inputs, "output_tokens": outputs, "reason_ratio": "{}"}})


def clients(windows: str = WINDOWS, data: str | None = None) -> dict[str, str]:
    files = {"m/chunk-0-trace.csv": windows, "m/chunk-0-dataset.json": dataset() if data is None else data}
    return files | {"m/chunk-7-trace.csv": WINDOWS, "m/chunk-7-dataset.json": dataset("{99: 1.0}")}


def test_lengths_from_are_drawn_by_the_run_s_seed(tmp_path, monkeypatch):
    from experiments.configuration.compose import compose_config, to_overrides
    from experiments.wiring.traces import build_trace

    drawn = []
    monkeypatch.setattr("testbed.traces.generators.JointLengths", lambda source: drawn.append(whole(source)))
    given = {"lengths_from": str(archive(tmp_path / "s.tar", clients())), "lengths_format": "servegen"}
    for seed in (0, 1, 1):
        build_trace(compose_config(to_overrides({"trace": given, "seed": seed})))
    (first, second, again) = map(fingerprint, drawn)
    assert first != second == again


def test_clients_send_what_their_windows_say(tmp_path):
    trace = read_trace("servegen", archive(tmp_path / "s.tar.gz", clients()), seed=1)
    assert len(trace) == 2 * (300 + 150)
    assert trace.notes == ("drawn from 2 clients with seed 1",)
    assert {row.tenant for row in trace} == {"client-0", "client-7"}
    mine = [row for row in trace if row.tenant == "client-0"]
    in_window = [sum(start * S <= row.arrival_ns < (start + 600) * S for row in mine) for start in (0, 600, 1200)]
    assert in_window == [300, 0, 150]
    assert {row.num_prompt_tokens for row in mine} == {10, 20}
    assert {row.num_prompt_tokens for row in trace if row.tenant == "client-7"} == {99}
    assert {row.num_output_tokens for row in trace} == {3}
    assert len({row.request_id for row in trace}) == len(trace)
    assert mine[0].place.endswith("s.tar.gz:m/chunk-0-trace.csv:1")


@pytest.mark.parametrize(
    ("process", "cv"), [("0.5,Gamma,9,1", 0.5), ("2,Gamma,9,1", 2.0), ("9,Weibull,1,1", 1.0), ("9,Weibull,2,1", 0.523)]
)
def test_gaps_have_the_spread_of_their_window_and_fill_it(process, cv, tmp_path):
    files = {"chunk-0-trace.csv": f"0,10,{process}\n600,10,{process}\n", "chunk-0-dataset.json": dataset()}
    arrivals_s = [row.arrival_ns / S for row in read_trace("servegen", archive(tmp_path / "s.tar", files), seed=1)]
    gaps = np.diff(arrivals_s)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)
    assert np.median(arrivals_s) == pytest.approx(600, abs=60)
    assert 1190 < arrivals_s[-1] < 1200


def test_lengths_are_those_of_the_last_window_that_has_any(tmp_path):
    pdfs = {"600": "{10: 0.2, 30: 0.8}", "1200": "{20: 1.0}"}  # of what comes before, too
    data = json.dumps({start: {"input_tokens": pdf, "output_tokens": "{3: 1.0}"} for start, pdf in pdfs.items()})
    files = {"chunk-0-trace.csv": "".join(f"{start},2,1,Gamma,1,1\n" for start in range(0, 2400, 600))}
    found = read_trace("servegen", archive(tmp_path / "s.tar", files | {"chunk-0-dataset.json": data}), seed=1)
    lengths = [[row.num_prompt_tokens for row in found if row.arrival_ns // (600 * S) == window] for window in range(4)]
    assert [set(of_window) for of_window in lengths] == [{10, 30}, {10, 30}, {20}, {20}]
    assert [of_window.count(10) for of_window in lengths[:2]] == pytest.approx([240, 240], abs=45)


def test_the_seed_alone_decides_and_all_archives_are_alike(tmp_path):
    first = archive(tmp_path / "s.tar.gz", clients())
    (tmp_path / "folder").mkdir()
    for name, text in (clients() | {"readme.md": ""}).items():
        (tmp_path / "folder" / Path(name).name).write_text(text)
    (tmp_path / "folder" / "chunk-9-trace.csv").mkdir()
    plain = archive(tmp_path / "s.tar", clients() | {"m/chunk-9-trace.csv/": ""})  # a folder, too
    prints = {fingerprint(read_trace("servegen", path, seed=3)) for path in (
        first, plain, archive(tmp_path / "s.tar.zst", clients()), tmp_path / "folder",
    )}  # fmt: skip
    assert len(prints) == 1
    assert fingerprint(read_trace("servegen", first, seed=4)) not in prints
    assert tuple(stream_servegen(first, 100, 3)) == read_trace("servegen", first, seed=3).rows[:100]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (clients("0,0.5,1.2,Gamma,0.69\n"), r"chunk-0-trace\.csv:1: 5 cells; expected 6"),
        (clients("0,x,1.2,Gamma,0.69,1\n"), r"csv:1: field 'rate' is 'x'; expected a number from 0 to 1e"),
        (clients("0,-1,1.2,Gamma,0.69,1\n"), "field 'rate' is '-1'"),
        (clients("0,1,1.2,Pareto,0.69,1\n"), "field 'pattern' is 'Pareto'; expected Gamma, Weibull or nothing"),
        (clients("0,1,1.2,,0.69,1\n"), "field 'pattern' is ''; expected Gamma or Weibull, as the rate is above 0"),
        (clients("0,1,0,Gamma,0.69,1\n"), "field 'CV' is '0'; expected above 0"),
        (clients("0,1,1,Weibull,0,1\n"), "field 'shape' is '0'; expected 0.01 to 1e6"),
        (clients("600,0,0,,0,0\n0,0,0,,0,0\n"), r"csv:2: field 'start' is '0'; expected more than 600"),
        (clients("0,0,0,,0,0\n"), "chunk-7-trace.csv has other windows than the first client"),
        (clients(""), "no windows"),
        (clients(data="[]"), r"chunk-0-dataset\.json: found a JSON list"),
        (clients(data='{"0": {"input_tokens": 3}}'), "field 'input_tokens' is 3; expected a string of"),
        (clients(data=dataset("{}")), "no window has lengths"),
        (clients(data=dataset("{10: 0.2}")), r"window 0: field 'tokens' is '\{10: 0.2\}'; expected .* sum to 1"),
        (clients(data=dataset("{-1: 1.0}")), "whole lengths from 0"),
        (clients(data=dataset("{a: 1.0}")), "field 'tokens' is"),
        ({"m/chunk-0-trace.csv": WINDOWS}, r"client 0 has no lengths; expected chunk-0-dataset\.json"),
        (clients(data=dataset("{inf: 0.5, 10: 0.5}")), r"field 'tokens' is '\{…, inf: …\}'; .* from 0 to 100,000,000"),
        (clients(data=dataset("{1e300: 0.5, 10: 0.5}")), r"field 'tokens' is '\{…, 1e\+300: …\}'"),
        (clients(data=dataset("{3000000000: 1.0}")), r"field 'tokens' is '\{…, 3000000000: …\}'"),
        (clients(data=dataset("{1_0: 1.0}")), "field 'tokens' is '{1_0: 1.0}'"),
        (clients(data=dataset("{\u0663: 1.0}")), "field 'tokens' is"),
        (clients("0,\u0663,1,Gamma,1,1\n"), "field 'rate' is '\u0663'"),
        (clients("0,\udcff,1,Gamma,1,1\n"), r"s\.tar\.gz:m/chunk-0-trace\.csv: not UTF-8 text \(invalid start byte\)"),
        ({"m/chunk-x-trace.csv": WINDOWS}, "the file's name is unknown; expected chunk-N-trace.csv"),
        ({"m/chunk-\u00b2-trace.csv": WINDOWS}, "the file's name is unknown; expected chunk-N-trace.csv"),
        ({"readme.md": ""}, "no client; expected files chunk-N-trace.csv"),
    ],
)
def test_bad_servegen_archives_are_refused(tmp_path, files, message):
    good = archive(tmp_path / "s.tar.gz", clients(data=dataset("{1e300: 0.0, 10: 1.0}")))
    assert len(read_trace("servegen", good)) == 900
    check_refused("servegen", archive(tmp_path / "s.tar.gz", files), message)


@pytest.mark.parametrize("name", ["s.tar.gz", "s.tar.zst", "s.tar"])
def test_damaged_archives_are_refused(tmp_path, monkeypatch, name):
    whole = archive(tmp_path / name, clients()).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 3])
    check_refused("servegen", tmp_path / name, r"damaged|no client|has no lengths")
    (tmp_path / name).write_bytes(b"no archive at all, but long enough to be read as one " * 20)
    check_refused("servegen", tmp_path / name, rf"{name}: damaged")
    check_refused("servegen", tmp_path / "absent.tar", r"absent\.tar: does not exist")
    monkeypatch.setattr("testbed.traces.readers.open_archive._MAX_MEMBER_BYTES", len(WINDOWS) - 1)
    said = rf"{name}:m/chunk-0-trace\.csv: {len(WINDOWS)} bytes; expected at most 1 GiB a file"
    check_refused("servegen", archive(tmp_path / name, clients()), said)


# --- lengths ---


def test_lengths_take_the_arrivals_that_are_asked_for(tmp_path):
    file = tmp_path / "l.csv"
    file.write_text("num_prefill_tokens,num_decode_tokens,pd_ratio\n74,918,0.08\n290,905,0.3\n5,6,1\n")
    trace = read_trace("lengths", file, arrivals=ArrivalConfig("deterministic", 2.0))
    assert [(r.arrival_ns, r.num_prompt_tokens, r.num_output_tokens) for r in trace] == [
        (0, 74, 918), (S // 2, 290, 905), (S, 5, 6)
    ]  # fmt: skip
    assert trace.notes == ("arrivals are not the file's: deterministic, 2 per second, seed 0",)
    assert fingerprint(read_trace("lengths", file, seed=1)) != fingerprint(read_trace("lengths", file, seed=2))
    with pytest.raises(ConfigError, match="seed is -1"):
        read_trace("lengths", file, seed=-1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_prefill_tokens,num_decode_tokens\n0,1\n", r"l\.csv:2: field 'num_prefill_tokens' is '0'"),
        ("num_prefill_tokens,num_decode_tokens\n1,-1\n", r"l\.csv:2: field 'num_decode_tokens' is '-1'"),
        ("num_prefill_tokens\n1\n", "column 'num_decode_tokens' is missing"),
        ("num_prefill_tokens,num_decode_tokens\n", "no requests"),
    ],
)
def test_bad_length_files_are_refused(tmp_path, text, message):
    check_refused("lengths", write(tmp_path, "l.csv", text), message)


# --- agentic ---


def asked(t, num, ids, **more):
    return {"t": t, "type": "n", "in": num, "out": 7, "hash_ids": ids, "api_time": 1.5, "think_time": 2.0, **more}


def session(name: str = "a", requests=None, **more) -> dict[str, str]:
    nested = {"t": 5.0, "type": "subagent", "agent_id": "sub", "requests": [asked(0, 64, [1]), asked(3, 70, [9])]}
    entries = [asked(0, 130, [1, 2]), nested, asked(10.0, 200, [1, 2, 3])] if requests is None else requests
    fields = {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": entries, **more}
    return {f"traces/{name}.json": json.dumps(fields)}


def test_agentic_sessions_are_chains_with_sub_agents_of_their_own(tmp_path):
    file = archive(tmp_path / "a.tar.gz", session() | session("b"))
    trace = read_trace("agentic", file, arrivals=ArrivalConfig("deterministic", 0.01))
    rows = {row.request_id: row for row in trace}
    assert list(rows) == ["a-t0", "a-t1", "a/sub-t0", "a/sub-t1", "b-t0", "b-t1", "b/sub-t0", "b/sub-t1"]
    assert [(row.session_id, row.turn, row.arrival_ns, row.think_ns) for row in list(trace)[:5]] == [
        ("a", 0, 0, None), ("a", 1, 0, 2 * S), ("a/sub", 0, 5 * S, None), ("a/sub", 1, 5 * S, 2 * S),
        ("b", 0, 100 * S, None),
    ]  # fmt: skip
    tokens = {name: materialize(row.prompt, 999) for name, row in rows.items()}
    assert [len(tokens[name]) for name in ("a-t0", "a-t1")] == [130, 200]
    assert tokens["a-t0"][:128] == tokens["a-t1"][:128]
    assert tokens["a-t0"][128:] != tokens["a-t1"][128:130]  # what has no id is nobody else's
    assert tokens["a-t0"][:64] == tokens["a/sub-t0"]
    assert tokens["a-t0"][:64] != tokens["b-t0"][:64], "ids are local"
    shared = read_trace(
        "agentic", archive(tmp_path / "g.tar", session(hash_id_scope="global") | session("b", hash_id_scope="global"))
    )
    first, second = (next(row for row in shared if row.request_id == f"{name}-t0") for name in "ab")
    assert first.prompt[0] == second.prompt[0]
    assert rows["a/sub-t1"].place.endswith("a.tar.gz:traces/a.json:request 2:request 2")
    assert len(read_trace("agentic", file, limit=1)) == 4


@pytest.mark.parametrize("closed_loop", [True, False])
def test_agentic_sessions_that_overlap_are_the_same_session_by_session(tmp_path, closed_loop):
    entries = [asked(3 * i, 64 + i, [1]) for i in range(9)]
    files = session() | session("b") | session("c", requests=entries) | session("d")
    file = archive(tmp_path / "a.tar.gz", files)
    for config in (ArrivalConfig("deterministic", 0.2), ArrivalConfig("all_at_once"), ArrivalConfig("poisson", 0.3)):
        for limit in (None, 3):
            whole = read_trace("agentic", file, limit, arrivals=config, closed_loop=closed_loop)
            stream = stream_agentic(file, limit, config, closed_loop=closed_loop)
            assert tuple(stream) == whole.rows == tuple(stream)
            assert [row.arrival_ns for row in whole] == sorted(row.arrival_ns for row in whole)


def test_an_agentic_session_that_comes_twice_is_refused(tmp_path):
    twice = {"traces/x.json": next(iter(session("a").values()))}
    file = archive(tmp_path / "a.tar", session("a") | twice)
    check_refused("agentic", file, r"x\.json:request 1: field 'id' is 'a'; expected a session or sub-agent not")


def test_agentic_requests_come_when_recorded_in_an_open_loop(tmp_path):
    file = archive(tmp_path / "a.tar.gz", session())
    trace = read_trace("agentic", file, arrivals=ArrivalConfig("all_at_once"), closed_loop=False)
    assert [(row.request_id, row.arrival_ns // S, row.think_ns) for row in trace] == [
        ("a-t0", 0, None), ("a/sub-t0", 5, None), ("a/sub-t1", 8, None), ("a-t1", 10, None)
    ]  # fmt: skip


def test_think_times_from_an_older_request_are_replaced_and_counted(tmp_path):
    unknown = {"api_time": None}
    entries = [
        asked(0, 64, [1], **unknown), asked(9, 64, [1], think_time=50), asked(20, 64, [1], think_time=None, **unknown),
        asked(30, 64, [1], think_time=4, **unknown), asked(36, 64, [1], think_time=None),
    ]  # fmt: skip
    trace = read_trace("agentic", archive(tmp_path / "a.tar", session(requests=entries)))
    assert [row.think_ns for row in trace] == [None, 9 * S, int(9.5 * S), 4 * S, 6 * S]
    assert trace.notes[1].startswith("1 think time did not count from the request before")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (session(requests=[asked(0, 64, [1, 2])]),
         r"a\.json:request 1: field 'hash_ids' is 'a list of 2'; expected 1 ids"),
        (session(requests=[asked(0, 0, [])]), "field 'in' is 0"),
        (session(requests=[asked(-1, 64, [1])]), "field 't' is -1"),
        (session(requests=[asked(5, 64, [1]), asked(4, 64, [1])]), "request 2: field 't' is 4; expected at least 5"),
        (session(requests=[asked(5, 64, [1]), asked(6, 64, [1], think_time=-3)]), "field 'think_time' is -3"),
        (session(requests=[asked(5, 64, [1], api_time="x"), asked(6, 64, [1], think_time=1)]),
         "request 1: field 'api_time' is 'x'; expected a number of seconds"),
        (session(requests=[{"t": 0}]), "request 1: field 'in' is missing"),
        (session(requests=[3]), "field 'requests' is 3; expected an object"),
        (session(requests={}), "expected a list of requests"),
        (session(requests=[]), "no requests"),
        (session(hash_id_scope="galaxy"), "field 'hash_id_scope' is 'galaxy'; expected local or global"),
        (session(block_size=0), "field 'block_size' is 0"),
        ({"x.json": "{"}, r"x\.json: not JSON"),
    ],
)  # fmt: skip
def test_bad_agentic_sessions_are_refused(tmp_path, files, message):
    check_refused("agentic", archive(tmp_path / "a.tar.gz", files), message)


# --- the published files, where the user has them ---


def test_the_servegen_archive_is_read():
    trace = read_trace("servegen", published("servegen_reason_deepseek-r1.tar.gz"), limit=5000)
    assert len(trace) == 5000
    assert trace.notes == ("drawn from 73 clients with seed 0",)


def test_the_lengths_file_is_read_whole():
    trace = read_trace("lengths", published("lengths_sharegpt8k_llama2tok.csv"))
    assert len(trace) == 30_731
    assert (trace.rows[0].num_prompt_tokens, trace.rows[0].num_output_tokens) == (74, 918)


def test_the_agentic_archive_is_read_whole():
    trace = read_trace("agentic", published("agentic_claude_code_verbatim_sample.tar.gz"))
    sessions = {row.session_id for row in trace}
    assert (len(trace), len(sessions), sum("/" in name for name in sessions)) == (377, 24, 6)
    assert isinstance(trace.rows[0].prompt[0], Span)
