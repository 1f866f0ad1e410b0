"""`testbed timeline` on runs of the simulator and the real engine. What is drawn: tests/analysis."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.analysis.chrome_events import read
from tests.experiments.kit import REAL, SHORT, TINY, decisions_of, say

CROWDED = ("cache.num_gpu_blocks=14", "cache.num_cpu_blocks=40", "scheduler=vllm_v0", "scheduler.preemption=swap")


def run(capsys: pytest.CaptureFixture[str], folder: Path, *more: str) -> Path:
    said = say(capsys, "run", *TINY, *SHORT, "record.decisions=true", *more, f"hydra.run.dir={folder}")
    assert said.status == 0, said.err
    return folder


def test_a_simulated_and_a_real_run_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    sim, real = run(capsys, tmp_path / "sim"), run(capsys, tmp_path / "real", *REAL)
    said = say(capsys, "timeline", str(sim), str(real))
    assert said.status == 0, said.err
    events = read(sim / "timeline.json")
    assert said.out.startswith(f"{sim}/timeline.json: {len(events):,} events, ")
    assert said.out.endswith("; open it at https://ui.perfetto.dev or in chrome://tracing\n")
    for pid, folder in ((1, sim), (2, real)):
        marks = [event["id2"]["local"] for event in events if event["ph"] == "n" and event["pid"] == pid]
        assert sorted(marks) == sorted(key for step in decisions_of(folder) for key in step["cached_tokens"])
    assert "exists; choose another --out or pass --overwrite" in say(capsys, "timeline", str(sim)).error()
    assert say(capsys, "timeline", str(sim), "--overwrite").status == 0


def test_swaps_are_where_they_were_decided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(capsys, tmp_path / "run", *CROWDED, "trace.output={kind: constant, value: 24}")
    assert say(capsys, "timeline", str(folder)).status == 0
    decided = Counter(
        (round(step["time_s"] * 1e9), name.replace("_", " "), key)
        for step in decisions_of(folder)
        for name in ("swapped_out", "swapped_in")
        for key in step[name]
    )
    assert decided, "nothing was swapped"
    events = read(folder / "timeline.json")
    instants = [event for event in events if event["ph"] == "i"]
    assert Counter((round(e["ts"] * 1000), e["name"], e["args"]["request_id"]) for e in instants) == decided
    assert any(event["name"] == "swap" and event["dur"] > 0 for event in events if event["ph"] == "X")


def test_a_part_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = run(capsys, tmp_path / "run"), tmp_path / "part.json.gz"
    assert say(capsys, "timeline", str(folder), "--steps", "2:3", "--out", str(out)).status == 0
    steps = [e["args"]["step"] for e in read(out) if e["ph"] == "X" and "args" in e]
    assert steps == [2, 3]
    out.unlink()
    for wrong, text in (
        (("--from", "90"), "nothing happens from 90 s; the run ends at"),
        (("--from", "2", "--to", "1"), "from 2 s to 1 s is no window"),
        (("--from", "-5"), "from -5 s to the end is no window"),
        (("--steps", "700:701"), "no step is in 700:701"),
    ):
        assert text in say(capsys, "timeline", str(folder), *wrong, "--out", str(out)).error()
        assert not out.exists()


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such run folder" in say(capsys, "timeline", str(tmp_path / "nothing")).error()
    assert "not a run folder" in say(capsys, "timeline", str(tmp_path)).error()
    first, other = run(capsys, tmp_path / "a"), run(capsys, tmp_path / "b", "seed=1")
    assert "is no run, but has 2 below it; name one: " in say(capsys, "timeline", str(tmp_path)).error()
    assert "ran different traces" in say(capsys, "timeline", str(first), str(other)).error()


def test_a_run_without_steps_is_drawn_by_its_requests_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(capsys, tmp_path / "run", "record.steps=false")
    said = say(capsys, "timeline", str(folder))
    assert f"; {folder} has requests only: run again with record.steps=true for its steps" in said.out
    assert any(event["name"] == "request" for event in read(folder / "timeline.json"))
    assert say(capsys, "run", f"from={folder}", f"hydra.run.dir={folder}", "overwrite=true").status == 0
    assert not (folder / "timeline.json").exists(), "it was of the run before"
