"""`record.profile`: steps of a run as torch's profiler sees them, in the run folder and on its timeline."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch")

import torch

from real import step_trace
from testbed.records.schema import STEP_TRACE_FILE
from tests.analysis.chrome_events import ns, read
from tests.experiments.kit import REAL, SHORT, TINY, Say

PARTS = ("prepare", "swap", "forward", "sample")


def profiled(say: Say, folder: Path, steps: str, *more: str) -> list[dict[str, Any]]:
    say("run", *TINY, *SHORT, *REAL, f"record.profile={steps}", *more, f"hydra.run.dir={folder}").success()
    return json.loads(gzip.decompress((folder / STEP_TRACE_FILE).read_bytes()))["traceEvents"]


def test_these_steps_are_on_the_timeline_beside_the_runs_own(tmp_path: Path, say: Say) -> None:
    folder = tmp_path / "run"
    profiled(say, folder, "2:4")
    note = "PROFILED STEPS: those of record.profile, and requests meanwhile, took longer than without the profiler"
    assert note in " ".join(json.loads((folder / "manifest.json").read_text())["replay"]["notes"])
    say("fidelity", str(folder), "--out", str(tmp_path / "f")).success()
    assert note in (tmp_path / "f" / "fidelity.md").read_text()
    say("timeline", str(folder)).success()
    events = [event for event in read(folder / "timeline.json") if event["pid"] == 2]
    assert any(event["name"].startswith("aten::") for event in events), "operators"
    steps = {event["name"]: event for event in events if event["name"].startswith("step ")}
    assert list(steps) == ["step 2", "step 3", "step 4"]
    rows = {row["step"]: row for row in pq.read_table(folder / "steps.parquet").to_pylist()}
    shifts = [rows[number]["start_ns"] - ns(steps[f"step {number}"]["ts"]) for number in (2, 3, 4)]
    slack_ns = 5_000_000 + max(shifts) - min(shifts)  # only the median step lies right
    for number, name in ((3, "step 3"), (4, "step 4")):  # the profiler starts within the first
        wait = next(event for event in events if event["name"] == f"wait for {name}")  # in which a CPU computes
        begin, end = ns(steps[name]["ts"]), ns(wait["ts"]) + ns(wait["dur"])
        assert rows[number]["start_ns"] - slack_ns <= begin <= end <= rows[number]["end_ns"] + slack_ns
        within = [event for event in events if begin <= ns(event["ts"]) < end and event["name"] in PARTS]
        assert [event["name"] for event in within] == list(PARTS)


def test_a_part_of_the_timeline_has_that_part_of_the_profile(tmp_path: Path, say: Say) -> None:
    folder, out = tmp_path / "run", tmp_path / "part.json"
    profiled(say, folder, "2:4")
    say("timeline", str(folder), "--steps", "0:1", "--out", str(out)).success()
    assert not [event for event in read(out) if event["name"].startswith("step 4")]


def test_a_run_that_ends_before_keeps_what_was_traced(tmp_path: Path, say: Say) -> None:
    names = {event.get("name") for event in profiled(say, tmp_path / "run", "3:100000")}
    assert {"step 3", "step 4", "wait for step 4"} <= names
    assert "step 2" not in names


def test_steps_that_are_planned_ahead_are_traced_too(tmp_path: Path, say: Say) -> None:
    events = profiled(say, tmp_path / "run", "2:3", "scheduler=vllm_v1_async")
    names = {event.get("name") for event in events}
    assert {"step 2", "step 3", "wait for step 2", "wait for step 3"} <= names
    waits = [event for event in events if str(event.get("name")).startswith("wait for step ")]
    for forward in (event for event in events if event.get("name") == "forward" and "dur" in event):
        begin, end = forward["ts"], forward["ts"] + forward["dur"]
        assert [wait for wait in waits if wait["ts"] <= begin <= end <= wait["ts"] + wait["dur"]], "in its step's range"


def test_on_a_gpu_the_parts_are_ranges_of_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    with pytest.raises(ZeroDivisionError), step_trace.named_range("outer"), step_trace.named_range("inner"):
        raise ZeroDivisionError
    assert seen == ["outer", "inner", "pop", "pop"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((*REAL, "record.profile=4:2"), "record.profile is '4:2'; it must be first:last, the steps to trace"),
        ((*REAL, "record.profile=[3,6]"), "record.profile is [3, 6]; it must be first:last"),
        ((*REAL, "record.profile=x"), "record.profile is 'x'; it must be first:last"),
        (
            ("record.profile=1:2", "backend=vllm"),
            "record.profile is '1:2', but only backend=real has steps to trace; set it to null",
        ),
    ],
)
def test_what_cannot_be_traced_is_one_line(tmp_path: Path, say: Say, arguments: tuple[str, ...], told: str) -> None:
    assert told in say("run", *TINY, *SHORT, *arguments, f"hydra.run.dir={tmp_path / 'run'}").error()


def test_a_profiled_run_is_simulated_from_its_folder(tmp_path: Path, say: Say) -> None:
    measured, again = tmp_path / "run", tmp_path / "again"
    profiled(say, measured, "2:3")
    said = say(
        "run", f"from={measured}", "backend=sim", "device=cpu", "cost=linear", f"hydra.run.dir={again}"
    ).success()
    assert "record.profile has no effect in a simulation" in said
    out = ("device=cpu", "cost=linear", "--out", str(tmp_path / "fidelity"))
    told = say("fidelity", str(measured), *out).success()
    assert "record.profile has no effect" not in told


def test_a_profile_that_is_none_is_one_line(tmp_path: Path, say: Say) -> None:
    folder = tmp_path / "run"
    say("run", *TINY, *SHORT, f"hydra.run.dir={folder}").success()
    (folder / STEP_TRACE_FILE).write_bytes(gzip.compress(b'{"traceEvents": [{"ph": "X", "cat": "kernel"}]}'))
    assert "profile.json.gz: not a profile of steps (KeyError" in say("timeline", str(folder)).error()
