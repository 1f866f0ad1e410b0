"""Run folders: what loads, and the one line that says what does not."""

from __future__ import annotations

import json

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import analysis
from analysis.load import Run, Sweep, load_run, load_sweep, same_trace, swept_keys
from testbed.errors import RunFolderError
from testbed.records.schema import REQUEST_COLUMNS, STEP_COLUMNS
from tests.analysis.runs import change_manifest, write_run, write_runs


def refused(what, match):
    with pytest.raises(RunFolderError, match=match) as caught:
        what()
    assert "\n" not in str(caught.value)


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "run", num_requests=12)


def test_one_run_of_one_request_is_in_the_singular(tmp_path):
    lines = str(load_sweep(write_run(tmp_path / "run", num_requests=1))).splitlines()
    assert lines[0].endswith(": 1 run")
    assert lines[2] == "traces   1, 1 request"


def test_a_run_loads_lazily_and_summarises(folder):
    run = load_run(folder)
    assert run.is_complete
    assert "requests" not in vars(run)
    assert len(run.requests) == 12
    assert run.summary["num_requests"] == 12
    assert run.flat_config["scheduler.name"] == "decode_first"


def test_a_stored_summary_of_this_version_is_taken(folder):
    stored = load_run(folder).summary | {"num_requests": 99}
    (folder / "summary.json").write_text(json.dumps(stored))
    assert load_run(folder).summary["num_requests"] == 99
    for other in (json.dumps(stored | {"summary_version": 0}), "", "[1]"):
        (folder / "summary.json").write_text(other)
        assert load_run(folder).summary["num_requests"] == 12


def test_what_is_no_run_folder_is_said_in_one_line(tmp_path, folder):
    refused(lambda: load_run(tmp_path / "nothing"), "no such run folder")
    (tmp_path / "empty").mkdir()
    refused(lambda: load_run(tmp_path / "empty"), "not a run folder")
    refused(lambda: load_sweep(tmp_path / "empty"), "no complete run folder")
    refused(lambda: load_sweep(tmp_path / "nothing"), "no such folder")


@pytest.mark.parametrize("name", ["manifest.json", "requests.parquet", "config.yaml"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    refused(lambda: load_run(folder), f"{name} missing")


@pytest.mark.parametrize("name", ["manifest.json", "steps.parquet", "config.yaml"])
def test_a_broken_file_is_named(folder, name):
    (folder / name).write_text("{ not: [valid")
    refused(lambda: load_run(folder), f"{name}, line 1: not YAML" if "yaml" in name else f"{name}: cannot be read")


@pytest.mark.parametrize("name", ["requests.parquet", "steps.parquet"])
def test_records_that_end_in_the_middle_are_of_a_run_to_be_made_again(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes()[:-20])
    refused(lambda: load_run(folder), f"{name}: cannot be read as Parquet")
    (folder / "done").unlink()
    refused(
        lambda: load_run(folder),
        "its records end in the middle; the run did not finish: run its command again with overwrite=true",
    )
    change_manifest(folder, command="scheduler_cls=real.vllm.TestbedScheduler")
    refused(lambda: load_run(folder), f"still serves, or ended before its requests did: `testbed parity {folder}` repl")


def test_missing_columns_are_named(folder):
    pq.write_table(pa.table({"request_id": ["a"]}), folder / "requests.parquet")
    refused(lambda: load_run(folder), "columns missing: session_id, turn, .*testbed run from=")


def test_a_partial_run_loads_and_says_so(tmp_path):
    run = load_run(write_run(tmp_path / "partial", num_requests=30, stop_s=1.0))
    assert not run.is_complete
    assert run.summary["num_unfinished"] > 0


@pytest.mark.parametrize(
    ("command", "cure"),
    [
        ("testbed run", r"the run is partial \(interrupted or still going\): run its command again"),
        ("scheduler_cls=real.vllm.TestbedScheduler", "the vLLM that it is of still serves, or ended before its requ"),
    ],
)
def test_where_all_runs_are_partial_it_says_what_to_do(tmp_path, command, cure):
    change_manifest(write_run(tmp_path / "run", num_requests=30, stop_s=1.0), command=command, failure=None)
    refused(lambda: load_sweep(tmp_path), f"1 incomplete, the first: {cure}")


def test_what_did_not_end_is_in_the_order_of_its_sweep(tmp_path):
    write_run(tmp_path / "whole", num_requests=8)
    for number, name in enumerate("cab"):
        change_manifest(write_run(tmp_path / name, num_requests=30, stop_s=1.0), point=number)
    assert [path.name for path, _ in load_sweep(tmp_path).incomplete] == ["c", "a", "b"]


def test_a_sweep_is_every_whole_run_below_and_reports_the_others(tmp_path):
    write_runs(tmp_path, seed=[0, 1], watermark=[0.0, 0.1], num_requests=8)
    write_run(tmp_path / "w9" / "cut", num_requests=30, stop_s=1.0)
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead" / "run.log").write_text("")
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "manifest.json").write_text("{}")
    sweep = load_sweep(tmp_path)
    assert len(sweep.runs) == 4
    assert swept_keys(sweep.runs) == ["seed", "cache.watermark"]
    assert {(path.name, reason.split()[0]) for path, reason in sweep.incomplete} == {("dead", "not"), ("cut", "the")}
    frame = sweep.frame
    assert list(frame.columns[:3]) == ["run", "seed", "cache.watermark"]
    assert frame["ttft_s.p50"].notna().all()


# --- one call for a run, a sweep, or many ---


@pytest.fixture
def two_sweeps(tmp_path):
    for name, watermark in (("a", 0.0), ("b", 0.1)):
        for seed in (0, 1):
            write_run(tmp_path / name / f"seed{seed}", seed=seed, watermark=watermark, num_requests=8 + 4 * seed)
    return tmp_path


def test_one_call_takes_a_run_a_sweep_or_many(two_sweeps):
    assert isinstance(analysis.load(two_sweeps / "a" / "seed0"), Run)
    assert isinstance(analysis.load(str(two_sweeps / "a")), Sweep)
    assert len(analysis.load(two_sweeps).runs) == 4
    many = analysis.load([two_sweeps / "a", two_sweeps / "b" / "seed1", two_sweeps / "a" / "seed0"])
    assert many.path == two_sweeps.resolve()
    assert many.frame["run"].tolist() == ["a/seed0", "a/seed1", "b/seed1"], "what is found twice counts once"
    assert many.swept == ["seed", "cache.watermark", "trace.num_requests"]
    refused(lambda: analysis.load([]), "no run folder given")
    refused(lambda: analysis.load(two_sweeps / "c"), "no such folder")
    refused(lambda: analysis.load([two_sweeps / "a", two_sweeps / "c"]), "no such folder")


def test_a_sweeps_frames_are_its_runs_with_their_swept_keys_in_front(two_sweeps):
    sweep = analysis.load(two_sweeps)
    for name, schema in (("requests", REQUEST_COLUMNS), ("steps", STEP_COLUMNS)):
        joined = getattr(sweep, name)
        assert list(joined.columns) == ["run", *sweep.swept, *schema]
        for run, (label, rows) in zip(sweep.runs, joined.groupby("run"), strict=True):
            assert label == run.path.relative_to(two_sweeps).as_posix()
            own = getattr(run, name)
            pd.testing.assert_frame_equal(rows[list(schema)].reset_index(drop=True), own)
            assert set(rows["cache.watermark"]) == {run.flat_config["cache.watermark"]}
    assert sweep.requests["token_ns"].dtype == sweep.runs[0].requests["token_ns"].dtype


def test_a_runs_table_is_one_row(folder):
    assert analysis.load(folder).frame["ttft_s.p99"].tolist() == [load_run(folder).summary["ttft_s"]["p99"]]


def test_five_lines_say_what_a_run_and_a_sweep_are(two_sweeps):
    run = analysis.load(two_sweeps / "b" / "seed1")
    lines = str(run).splitlines()
    assert len(lines) <= 5
    assert lines[0].startswith(f"run      {run.path} (complete, sim)")
    assert "12 requests" in lines[1]
    assert "12 of 12 finished" in lines[3]
    assert len(repr(run)) < 200, "the configuration is not in it"
    write_run(two_sweeps / "cut", num_requests=30, stop_s=1.0)
    assert "PARTIAL" in str(analysis.load(two_sweeps / "cut"))
    for shown in (run, analysis.load(two_sweeps)):
        assert shown._repr_mimebundle_(include=None, exclude=None) == {"text/plain": str(shown)}, "in a notebook"
    lines = str(analysis.load(two_sweeps)).splitlines()
    assert len(lines) <= 5
    assert "4 runs; 1 left out" in lines[0]
    assert lines[1] == "swept    cache.watermark 0, 0.1; trace.num_requests 8, 12; and 1 key that changes with these"
    assert "(watermark 0, num requests 12)" in lines[3]
    assert len(str(analysis.load([two_sweeps / "a" / "seed0"])).splitlines()) <= 5


def test_runs_on_different_traces_are_never_paired(tmp_path):
    one, other = (load_run(write_run(tmp_path / str(seed), seed=seed, num_requests=8)) for seed in (0, 1))
    assert same_trace([one, one]) == one.fingerprint
    refused(lambda: same_trace([one, other]), "different traces")
    one.manifest["trace"] = {}
    refused(lambda: same_trace([one]), "no trace fingerprint")
