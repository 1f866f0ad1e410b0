"""A run as a timeline: every number of it is the records', to the ns, and viewers read it as it is meant."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from analysis.timelines.export import PHASES, Window, kind_of, write_timeline
from testbed.errors import ConfigError, RunFolderError
from tests.analysis.chrome_events import Event, ns, read
from tests.analysis.runs import change_columns, change_manifest, write_run
from tests.analysis.trace_processor import answers


def drawn(*folders: Path, out: Path | None = None, window: Window | None = None) -> list[Event]:
    write_timeline(folders, out, window, overwrite=True)
    return read(out or folders[0] / "timeline.json")


def slices(events: list[Event], *names: str) -> list[Event]:
    return [event for event in events if event["ph"] == "X" and event["name"] in names]


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


KINDS = ("prefill", "decode", "mixed", "moves")
NUM_BLOCKS = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Short of blocks: it preempts. And at times there is nothing to do."""
    folder = write_run(tmp_path / "run", num_blocks=NUM_BLOCKS, watermark=0.0, rate=6)
    assert sum(row["num_preempted"] for row in records(folder, "steps")) > 3
    return folder


def test_every_step_is_a_slice_with_its_own_numbers(folder: Path) -> None:
    events, rows = drawn(folder), records(folder, "steps")
    found = slices(events, *KINDS)
    assert [(ns(event["ts"]), ns(event["dur"])) for event in found] == [
        (row["start_ns"], row["end_ns"] - row["start_ns"]) for row in rows
    ]
    assert [event["name"] for event in found] == [kind_of(row) for row in rows]
    for event, row in zip(found, rows, strict=True):
        told = event["args"]
        assert told["digest"] == f"{row['digest']:016x}"
        assert told.get("blocked_by") == row["blocked_by"]
        for name in ("step", "num_decodes", "num_prefill_tokens", "num_running", "num_waiting", "free_gpu_blocks"):
            assert told[name] == row[name]


@pytest.mark.parametrize(
    ("decodes", "prefills", "kind"), [(2, 0, "decode"), (0, 1, "prefill"), (2, 1, "mixed"), (0, 0, "moves")]
)
def test_a_step_is_named_by_what_it_computes(decodes: int, prefills: int, kind: str) -> None:
    assert kind_of({"num_decodes": decodes, "num_prefills": prefills}) == kind


def test_where_the_time_went_lies_within_the_step_and_what_the_step_before_hid_is_cut(folder: Path) -> None:
    rows = records(folder, "steps")
    prepare_ns = [row["prepare_ns"] for row in rows]
    hidden = rows[3]["end_ns"] - rows[3]["start_ns"]
    prepare_ns[3] = 10 * hidden
    change_columns(folder / "steps.parquet", prepare_ns=prepare_ns)
    events = drawn(folder)
    for name in ("prepare", "forward", "sample"):
        expected = [row[f"{name}_ns"] for row in rows]
        if name == "prepare":
            expected[3] = hidden - rows[3]["forward_ns"] - rows[3]["sample_ns"]
        assert [ns(event["dur"]) for event in slices(events, name)] == expected
    assert len(slices(events, "schedule")) == len(rows) - 1
    assert slices(events, *KINDS)[3]["args"]["prepare_ns"] == 10 * hidden


def test_every_request_goes_through_its_phases_at_its_own_instants(folder: Path) -> None:
    events = drawn(folder)
    begins: dict[str, dict[str, int]] = defaultdict(dict)
    ends: dict[str, dict[str, int]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "be":
            (begins if event["ph"] == "b" else ends)[event["id2"]["local"]][event["name"]] = ns(event["ts"])
    told = {event["args"]["request_id"]: event["args"] for event in events if "args" in event and event["ph"] == "b"}
    for row in records(folder, "requests"):
        began, ended = begins[row["request_id"]], ends[row["request_id"]]
        assert began.pop("request") == row["arrival_ns"]
        assert ended.pop("request") == row["finish_ns"]
        instants = [row[column] for column in PHASES.values()] + [row["finish_ns"]]
        expected = {
            name: (low, high) for name, low, high in zip(PHASES, instants, instants[1:], strict=False) if low < high
        }
        assert {name: (began[name], ended[name]) for name in began} == expected
        args = told[row["request_id"]]
        for name in ("num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "num_preemptions"):
            assert args[name] == row[name]
        assert args["finish_reason"] == "length"


def test_counters_follow_the_plans_and_fall_to_nothing_between_requests(folder: Path) -> None:
    rows = records(folder, "steps")
    shown: dict[str, dict[int, dict[str, int]]] = defaultdict(dict)
    for event in drawn(folder):
        if event["ph"] == "C":
            assert ns(event["ts"]) not in shown[event["name"]], "one value at a time"
            shown[event["name"]][ns(event["ts"])] = event["args"]

    def at(name: str, instant_ns: int) -> dict[str, int]:
        return shown[name][max(ts for ts in shown[name] if ts <= instant_ns)]

    num_rests = 0
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        free = row["free_gpu_blocks"]
        assert at("KV blocks GPU", row["start_ns"]) == {"used": NUM_BLOCKS - free, "free": free}
        assert at("sequences", row["start_ns"])["waiting"] == row["num_waiting"]
        assert at("tokens per step", row["start_ns"])["decode"] == row["num_decode_tokens"]
        if after is None or after["start_ns"] > row["end_ns"]:
            num_rests += 1
            assert at("tokens per step", row["end_ns"]) == {"decode": 0, "prefill": 0}
            assert at("sequences", row["end_ns"]) == {"running": 0, "waiting": 0, "swapped": 0}
            assert at("KV blocks GPU", row["end_ns"]) == {"used": 0, "free": NUM_BLOCKS}
    assert num_rests > 2


def test_preemptions_are_instants_by_the_steps_counts(folder: Path) -> None:
    instants = [event for event in drawn(folder) if event["ph"] == "i"]
    assert [(ns(event["ts"]), event["name"], event["args"]) for event in instants] == [
        (row["start_ns"], "preempted", {"step": row["step"], "num_requests": row["num_preempted"]})
        for row in records(folder, "steps")
        if row["num_preempted"]
    ]


def write_decisions(folder: Path, *lines: dict[str, Any]) -> None:
    empty = {"preempted": [], "swapped_out": [], "swapped_in": [], "ignored": [], "cached_tokens": {}}
    (folder / "decisions.jsonl").write_text("".join(json.dumps(empty | line) + "\n" for line in lines))


def test_decisions_say_which_request_it_was(folder: Path) -> None:
    write_decisions(
        folder,
        {"step": 1, "time_s": 1.000000001, "cached_tokens": {"r1": 0, "r2": 16}},
        {"step": 2, "time_s": 1.1, "swapped_out": ["r1"], "swapped_in": ["r2"]},
    )
    events = drawn(folder)
    marks = [(ns(e["ts"]), e["name"], e["id2"]["local"], e["args"]["step"]) for e in events if e["ph"] == "n"]
    assert sorted(marks) == [
        (1_000_000_001, "admitted", "r1", 1), (1_000_000_001, "admitted", "r2", 1),
        (1_100_000_000, "swapped in", "r2", 2), (1_100_000_000, "swapped out", "r1", 2),
    ]  # fmt: skip
    instants = [(event["name"], event["args"]["request_id"]) for event in events if event["ph"] == "i"]
    assert instants == [("swapped out", "r1"), ("swapped in", "r2")]


def test_two_runs_of_one_trace_lie_on_one_axis_with_a_process_each(tmp_path: Path) -> None:
    sim, real = write_run(tmp_path / "sim"), write_run(tmp_path / "real", backend="real", noise=0.1)
    out = tmp_path / "both.json.gz"
    events = drawn(sim, real, out=out)
    for pid, run in ((1, sim), (2, real)):
        own = slices([event for event in events if event["pid"] == pid], *KINDS)
        assert [ns(event["ts"]) for event in own] == [row["start_ns"] for row in records(run, "steps")]
    document = json.loads(gzip.decompress(out.read_bytes()))
    named = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    assert named == [f"sim decode_first, {sim}", f"real decode_first, {real}"]
    assert document["otherData"]["run 2"]["backend"] == "real"


def test_each_replica_is_a_process(folder: Path) -> None:
    rows, requests = records(folder, "steps"), records(folder, "requests")
    change_columns(folder / "steps.parquet", replica=[row["step"] % 2 for row in rows])
    change_columns(folder / "requests.parquet", replica=[number % 2 for number in range(len(requests))])
    change_manifest(folder, num_replicas=2)
    events = drawn(folder)
    for event in slices(events, *KINDS):
        assert event["pid"] == 1 + event["args"]["step"] % 2
    assert {event["pid"] for event in events if event["ph"] == "b"} == {1, 2}
    change_columns(folder / "steps.parquet", replica=[2] * len(rows))
    refused(folder, "a row of replica 2")


def test_a_run_without_steps_shows_its_requests(folder: Path) -> None:
    pq.write_table(pq.read_table(folder / "steps.parquet").slice(0, 0), folder / "steps.parquet")
    assert {event["ph"] for event in drawn(folder)} == {"b", "e"}
    refused(folder, "no steps in its records", Window(steps=(0, 1)))


def test_what_an_interrupted_run_left_open_lasts_until_its_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "cut", num_requests=40, stop_s=1.0)
    assert f"{folder} is partial" in write_timeline([folder])
    events = read(folder / "timeline.json")
    end_ns = max(row["end_ns"] for row in records(folder, "steps"))
    unfinished = {
        event["args"]["request_id"] for event in events if event.get("args", {}).get("finish_reason") == "unfinished"
    }
    began = [row for row in records(folder, "requests") if row["finish_ns"] is None]
    assert unfinished == {row["request_id"] for row in began} != set()
    for event in events:
        if event["ph"] == "e" and event["name"] == "request" and event["id2"]["local"] in unfinished:
            row = next(row for row in began if row["request_id"] == event["id2"]["local"])
            assert ns(event["ts"]) == max(end_ns, row["arrival_ns"])


# --- windows ---


def test_a_window_has_what_overlaps_it_whole(folder: Path) -> None:
    events = drawn(folder, window=Window(1.0, 2.0))
    rows = [row for row in records(folder, "steps") if row["start_ns"] < 2e9 and row["end_ns"] > 1e9]
    assert [ns(event["ts"]) for event in slices(events, *KINDS)] == [row["start_ns"] for row in rows]
    there = {
        row["request_id"] for row in records(folder, "requests") if row["arrival_ns"] < 2e9 and row["finish_ns"] >= 1e9
    }
    assert {event["id2"]["local"] for event in events if event["ph"] == "b"} == there
    busy = [row for row in records(folder, "steps") if row["start_ns"] == rows[-1]["end_ns"]]
    assert busy, "the run goes on behind the window"
    assert max(ns(event["ts"]) for event in events if event["ph"] == "C") <= rows[-1]["start_ns"]


def test_steps_can_be_named_instead(folder: Path) -> None:
    events = drawn(folder, window=Window(steps=(10, 12)))
    assert [event["args"]["step"] for event in slices(events, *KINDS)] == [10, 11, 12]
    last = len(records(folder, "steps")) - 1
    refused(folder, rf"no step is in 900000:900001; the run has steps 0 to {last}\b", Window(steps=(900_000, 900_001)))


def test_a_window_of_nothing_is_refused(folder: Path) -> None:
    refused(folder, "nothing happens from 1000 s to 1001 s; the run ends at", Window(1000, 1001))
    for bad in ((2, 1), (-1, 1), (float("nan"), 1), (1, float("nan")), (0, float("inf"))):
        with pytest.raises(ConfigError, match="no window"):
            Window(*bad)
    with pytest.raises(ConfigError, match="first:last"):
        Window(steps=(3, 2))


# --- what cannot be drawn ---


def refused(folder: Path, match: str, window: Window | None = None, *more: Path) -> None:
    """In one line, and nothing is left behind."""
    before = sorted(folder.glob("timeline*")) if folder.exists() else []
    with pytest.raises(RunFolderError, match=match) as caught:
        write_timeline([folder, *more], folder / "timeline-2.json", window)
    assert "\n" not in str(caught.value)
    assert before == (sorted(folder.glob("timeline*")) if folder.exists() else [])


def test_what_is_no_run_is_said(tmp_path: Path, folder: Path) -> None:
    refused(tmp_path / "nothing", "no such run folder")
    refused(tmp_path, f"is no run, but has 1 below it; name one: {folder}")
    (folder / "steps.parquet").unlink()
    refused(folder, "steps.parquet missing; the run ended, and its files were deleted since")


def test_an_empty_run_is_refused(folder: Path) -> None:
    for name in ("steps", "requests"):
        pq.write_table(pq.read_table(folder / f"{name}.parquet").slice(0, 0), folder / f"{name}.parquet")
    refused(folder, "neither steps nor requests")


def test_damaged_records_are_named(folder: Path) -> None:
    rows = records(folder, "steps")
    change_columns(folder / "steps.parquet", end_ns=[None] + [row["end_ns"] for row in rows[1:]])
    refused(folder, "steps.parquet: a row lacks its start_ns or end_ns")


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"time_s": "x"}'])
def test_a_bad_line_of_decisions_is_named(folder: Path, line: str) -> None:
    (folder / "decisions.jsonl").write_text(line + "\n")
    refused(folder, "decisions.jsonl:1: not a line of decisions")


def test_runs_of_different_traces_are_not_drawn_together(tmp_path: Path, folder: Path) -> None:
    other = write_run(tmp_path / "other", seed=5)
    refused(folder, "ran different traces", None, other)


def test_a_timeline_is_not_overwritten_unasked(folder: Path) -> None:
    write_timeline([folder])
    with pytest.raises(RunFolderError, match="exists; choose another --out or pass --overwrite"):
        write_timeline([folder])
    write_timeline([folder], overwrite=True)
    (folder / "timeline-2.json").mkdir()
    with pytest.raises(RunFolderError, match="is no file"):
        write_timeline([folder], folder / "timeline-2.json", overwrite=True)


# --- Perfetto itself ---


def test_perfetto_reads_what_was_meant(tmp_path: Path) -> None:
    sim = write_run(tmp_path / "sim", num_blocks=120)
    real = write_run(tmp_path / "real", backend="real", noise=0.1, num_blocks=120)
    write_decisions(real, {"step": 1, "time_s": 1.0, "preempted": ["r1"]})
    out = tmp_path / "both.json"
    write_timeline([sim, real], out)
    of_process = "JOIN process USING (upid) WHERE process.name LIKE 'real%'"
    errors, steps, parts, requests, counters, marks = answers(
        out,
        "SELECT name, value FROM stats WHERE severity != 'info' AND value > 0",
        "SELECT ts, dur, s.name, depth, EXTRACT_ARG(s.arg_set_id, 'args.digest') AS digest FROM slice s "
        f"JOIN thread_track t ON s.track_id = t.id JOIN thread USING (utid) {of_process} AND thread.name = 'steps' "
        "AND depth = 0 ORDER BY ts",
        "SELECT s.name, SUM(dur) AS dur FROM slice s JOIN thread_track t ON s.track_id = t.id "
        f"JOIN thread USING (utid) {of_process} AND depth = 1 GROUP BY 1",
        "SELECT ts, dur, EXTRACT_ARG(s.arg_set_id, 'args.request_id') AS id FROM slice s JOIN process_track t "
        f"ON s.track_id = t.id {of_process} AND s.name = 'request' AND depth = 0",
        "SELECT t.name, MIN(value) AS low, MAX(value) AS high FROM counter c JOIN process_counter_track t "
        f"ON c.track_id = t.id {of_process} GROUP BY 1",
        "SELECT ts, depth, s.name FROM slice s JOIN process_track t ON s.track_id = t.id "
        f"{of_process} AND s.name = 'preempted'",
    )
    assert errors == []
    rows = records(real, "steps")
    assert [(row["ts"], row["dur"], row["name"], row["digest"]) for row in steps] == [
        (row["start_ns"], row["end_ns"] - row["start_ns"], kind_of(row), f"{row['digest']:016x}") for row in rows
    ]
    assert {row["name"]: row["dur"] for row in parts} == {
        name: sum(row[f"{name}_ns"] for row in rows) for name in ("schedule", "prepare", "forward", "sample")
    }
    assert {(row["id"], row["ts"], row["dur"]) for row in requests} == {
        (row["request_id"], row["arrival_ns"], row["finish_ns"] - row["arrival_ns"])
        for row in records(real, "requests")
    }
    shown = {row["name"]: (row["low"], row["high"]) for row in counters}
    assert shown["KV blocks GPU free"] == (min(row["free_gpu_blocks"] for row in rows), 120)
    assert shown["sequences waiting"] == (0, max(row["num_waiting"] for row in rows))
    assert [(row["ts"], row["name"]) for row in marks] == [(1_000_000_000, "preempted")]
